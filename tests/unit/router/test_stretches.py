"""What counts as a stretch of an engine's prefill, and what voids it."""

from __future__ import annotations

from contextlib import ExitStack
from random import Random

import pytest

from router.stretches import MAX_MEMBERS, Stopwatch, Watched, Worked


class Measured:
    """A stopwatch with a clock that is set by hand, and what it measured."""

    def __init__(self) -> None:
        self.now = 0.0
        self.found: list[tuple[int, float]] = []
        self.stopwatch = Stopwatch(lambda: self.now, self._keep)

    def _keep(self, worked: Worked, seconds: float) -> None:
        self.found.append((worked.computed_tokens, seconds))


def test_a_request_alone_is_a_stretch_from_its_sending_to_its_first_byte() -> None:
    m = Measured()
    with m.stopwatch.send() as watched:
        m.now = 2.0
        watched.answered()
        m.now = 9.0
        watched.answered()
        assert m.found == []
        watched.told(Worked(100))
        watched.told(Worked(100))
    assert m.found == [(100, 2.0)]
    m.stopwatch.check_integrity()


def test_requests_that_wait_for_each_other_are_one_stretch() -> None:
    m = Measured()
    with m.stopwatch.send() as one, m.stopwatch.send() as two:
        m.now = 1.0
        one.answered()
        one.told(Worked(100))
        m.now = 3.0
        two.answered()
        two.told(Worked(200))
    assert m.found == [(300, 3.0)]


def test_idle_time_between_requests_is_in_no_stretch() -> None:
    m = Measured()
    for _ in range(2):
        with m.stopwatch.send() as watched:
            m.now += 1.0
            watched.answered()
            watched.told(Worked(50))
        m.now += 100.0
    assert m.found == [(50, 1.0), (50, 1.0)]


def test_an_engine_that_is_never_idle_is_measured_every_few_answers() -> None:
    m = Measured()
    with ExitStack() as stack:
        waiting = [stack.enter_context(m.stopwatch.send()) for _ in range(3)]
        for _ in range(2 * MAX_MEMBERS):
            waiting.append(stack.enter_context(m.stopwatch.send()))
            m.now += 0.5
            watched = waiting.pop(0)
            watched.answered()
            watched.told(Worked(100))
            m.stopwatch.check_integrity()
        assert m.found == [(100 * MAX_MEMBERS, 0.5 * MAX_MEMBERS)] * 2


@pytest.mark.parametrize("when", ["before its first byte", "after its first byte"])
def test_a_request_without_a_good_end_voids_the_stretch_and_not_the_next(when: str) -> None:
    m = Measured()
    with m.stopwatch.send() as good:
        with m.stopwatch.send() as bad:
            m.now = 1.0
            if when.startswith("after"):
                bad.answered()
        m.now = 2.0
        good.answered()
        good.told(Worked(100))
    assert m.found == []
    m.stopwatch.check_integrity()
    with m.stopwatch.send() as watched:
        m.now = 3.0
        watched.answered()
        watched.told(Worked(100))
    assert m.found == [(100, 1.0)]


def test_one_that_tells_nothing_voids_the_stretch_in_which_it_was_sent_too() -> None:
    """A whole answer's first byte comes after its decoding, but its prefill disturbed others."""
    m = Measured()
    with m.stopwatch.send(), ExitStack() as stack:
        others = [stack.enter_context(m.stopwatch.send()) for _ in range(MAX_MEMBERS)]
        for other in others:
            m.now += 1
            other.answered()
    m.stopwatch.check_integrity()
    assert m.found == []


def test_random_lives_leave_nothing_behind_and_count_no_token_twice() -> None:
    m, rng = Measured(), Random(11)
    live: list[Watched] = []
    told = 0
    for _ in range(4000):
        m.now += rng.random()
        step = rng.random()
        if step < 0.4 or not live:
            live.append(m.stopwatch.send())
        elif step < 0.7:
            rng.choice(live).answered()
        else:
            watched = live.pop(rng.randrange(len(live)))
            if rng.random() < 0.9:
                watched.answered()
                watched.told(Worked(1))
                told += 1
            watched.__exit__(None, None, None)
        m.stopwatch.check_integrity()
    assert 0 < sum(tokens for tokens, _ in m.found) <= told
    assert all(seconds > 0 for _, seconds in m.found)
    assert sum(seconds for _, seconds in m.found) <= m.now
