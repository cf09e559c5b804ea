from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from emberkv_proto.types import Source
from store_daemon.worth import Pace, blocks_worth_loading, expected_arrivals

SSD, PEER, DRAM = Source.SSD, Source.PEER, Source.DRAM
SECONDS = st.floats(0.0, 10.0)
PACES = st.builds(Pace, SECONDS, st.integers(1, 8), st.integers(0, 40), SECONDS)
SOURCES = st.lists(st.sampled_from([SSD, PEER, DRAM]), max_size=30)


def naive_total(arrivals: list[float], count: int, recompute_seconds: float) -> float:
    """Wait for `count` blocks, then compute the others."""
    waited = max(arrivals[:count], default=0.0)
    return waited + recompute_seconds * (len(arrivals) - count)


def naive_arrivals(pending: list[Source], paces: dict[Source, Pace]) -> list[float]:
    """Each source as so many workers on one queue."""
    arrivals, latest = [], 0.0
    workers = {source: [pace.setup_seconds] * pace.lanes for source, pace in paces.items()}

    def work(source: Source) -> float:
        free = workers[source]
        first = free.index(min(free))
        free[first] += paces[source].block_seconds
        return free[first]

    for source, pace in paces.items():
        for _ in range(pace.ahead):
            work(source)
    for source in pending:
        if source in paces:
            latest = max(latest, work(source))
        arrivals.append(latest)
    return arrivals


def test_a_fast_source_is_waited_for_and_a_slow_one_is_not() -> None:
    assert blocks_worth_loading([0.1, 0.2, 0.3], 1.0) == 3
    assert blocks_worth_loading([2.0, 4.0, 6.0], 1.0) == 0


def test_what_is_here_soon_is_loaded_and_the_slow_rest_computed() -> None:
    assert blocks_worth_loading([0.1, 0.2, 5.0, 10.0], 1.0) == 2


def test_a_slow_first_block_is_worth_it_for_the_many_behind() -> None:
    assert blocks_worth_loading([3.0, 3.0, 3.0, 3.0], 1.0) == 4
    assert blocks_worth_loading([3.0, 3.0], 1.0) == 0


def test_of_equal_choices_the_one_that_computes_least() -> None:
    assert blocks_worth_loading([1.0, 2.0], 1.0) == 2


def test_a_source_that_was_never_measured_is_tried() -> None:
    assert expected_arrivals([SSD, PEER], {}) == [0.0, 0.0]
    assert expected_arrivals([PEER, SSD, PEER], {SSD: Pace(1.0, 2, 2)}) == [0.0, 2.0, 2.0]


@given(arrivals=st.lists(SECONDS, max_size=30).map(sorted), recompute=st.floats(1e-3, 10.0))
def test_no_other_number_of_blocks_is_had_sooner(arrivals: list[float], recompute: float) -> None:
    worth = blocks_worth_loading(arrivals, recompute)
    totals = [naive_total(arrivals, n, recompute) for n in range(len(arrivals) + 1)]
    assert 0 <= worth <= len(arrivals)
    assert math.isclose(totals[worth], min(totals), rel_tol=1e-9, abs_tol=1e-9)
    later = [n for n, total in enumerate(totals) if total == totals[worth]]
    assert worth == max(later)


@given(pending=SOURCES, ssd=PACES, peer=PACES, known=st.sets(st.sampled_from([SSD, PEER])))
def test_arrivals_are_those_of_workers_on_a_queue(
    pending: list[Source], ssd: Pace, peer: Pace, known: set[Source]
) -> None:
    paces = {source: pace for source, pace in ((SSD, ssd), (PEER, peer)) if source in known}
    arrivals = expected_arrivals(pending, paces)
    wanted = naive_arrivals(pending, paces)
    assert len(arrivals) == len(pending)
    assert arrivals == sorted(arrivals)
    assert all(math.isclose(a, w, rel_tol=1e-9) for a, w in zip(arrivals, wanted, strict=True))
