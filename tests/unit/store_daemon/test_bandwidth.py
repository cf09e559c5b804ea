from __future__ import annotations

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store_daemon.bandwidth import Line, ReadSpeed

MIB = 1 << 20


def test_nothing_is_known_of_what_was_not_read() -> None:
    speed = ReadSpeed()
    assert speed.bytes_per_second(0.0) is None
    assert speed.read_seconds(0.0) is None
    assert speed.seconds_for(MIB, 0.0) is None
    speed.check_integrity()


def test_a_few_stalls_and_cache_hits_do_not_count() -> None:
    speed = ReadSpeed()
    for number in range(20):
        speed.measured(MIB, 0.001, float(number))
    for seconds in (5.0, 0.000001, 7.0):
        speed.measured(MIB, seconds, 20.0)
    assert speed.bytes_per_second(20.0) == pytest.approx(MIB / 0.001)
    assert speed.seconds_for(4 * MIB, 20.0) == pytest.approx(0.004)


def test_a_drive_that_became_slow_is_noticed_and_later_tried_again() -> None:
    speed = ReadSpeed(samples=4, memory_seconds=10.0)
    for number in range(4):
        speed.measured(MIB, 0.001, float(number))
    for number in range(4, 7):
        speed.measured(MIB, 1.0, float(number))
    assert speed.seconds_for(MIB, 6.0) == pytest.approx(1.0)
    assert speed.seconds_for(MIB, 16.0) == pytest.approx(1.0), "the last one is 10 s old"
    assert speed.seconds_for(MIB, 16.1) is None, "unknown, so it is worth a try"


READS = st.lists(
    st.tuples(st.integers(1, 1 << 30), st.floats(1e-6, 100.0), st.floats(0.0, 20.0)), max_size=30
)


@given(reads=READS, samples=st.integers(1, 8), memory=st.floats(0.0, 40.0))
def test_it_is_the_median_of_the_last_reads_that_are_remembered(
    reads: list[tuple[int, float, float]], samples: int, memory: float
) -> None:
    speed = ReadSpeed(samples, memory)
    now, kept = 0.0, []
    for read_bytes, seconds, pause in reads:
        now += pause
        speed.measured(read_bytes, seconds, now)
        kept.append((now, read_bytes / seconds, seconds))
        speed.check_integrity()
    remembered = [entry for entry in kept[-samples:] if now - entry[0] <= memory]
    wanted = median(rate for _, rate, _ in remembered) if remembered else None
    assert speed.bytes_per_second(now) == wanted
    assert speed.read_seconds(now) == (median(s for *_, s in remembered) if remembered else None)


def test_line_tells_setup_from_bytes_and_bears_nonsense() -> None:
    speed = ReadSpeed()
    for number in range(1, 31):
        nonsense = 9 if number % 5 == 0 else 1
        seconds = 0.005 + number * 0.001
        speed.measured(number * 1000, seconds * nonsense, float(number), setup_seconds=0.005)
    line = speed.line(30.0)
    assert line is not None
    assert line.seconds_for(0) == pytest.approx(0.005, rel=0.2)
    assert line.seconds_for(100_000) == pytest.approx(0.105, rel=0.2)


def test_one_read_is_enough_to_tell_setup_from_bytes() -> None:
    speed = ReadSpeed()
    speed.measured(1000, 0.011, 0.0, setup_seconds=0.010)
    line = speed.line(0.0)
    assert line is not None
    assert (line.setup_seconds, line.byte_seconds) == pytest.approx((0.010, 1e-6))
    speed.check_integrity()


def test_setup_that_grows_with_the_read_is_right_for_the_usual_one() -> None:
    speed = ReadSpeed()
    for number in range(1, 21):  # the owner brings each byte from its drive before the lease
        setup_seconds = 0.001 + number * 0.002
        speed.measured(number * 1000, setup_seconds + number * 0.001, 0.0, setup_seconds)
    line = speed.line(0.0)
    assert line is not None
    assert line.seconds_for(10_000) == pytest.approx(0.031, rel=0.1)


def test_line_of_reads_of_one_size_is_all_the_bytes() -> None:
    speed = ReadSpeed()
    for at in range(3):
        speed.measured(1000, 2.0, float(at))
    line = speed.line(3.0)
    assert line is not None
    assert (line.setup_seconds, line.byte_seconds) == (0.0, 0.002)


@given(reads=READS, share=st.floats(0.0, 1.0))
def test_more_bytes_never_take_less_time(
    reads: list[tuple[int, float, float]], share: float
) -> None:
    speed = ReadSpeed()
    for read_bytes, seconds, _ in reads:
        speed.measured(read_bytes, seconds, 0.0, setup_seconds=seconds * share)
    line = speed.line(0.0)
    assert (line is None) == (not reads)
    if line is not None:
        assert line.setup_seconds >= 0
        assert 0 < line.seconds_for(1000) <= line.seconds_for(2000)


def test_line_is_fitted_anew_after_each_read_and_forgotten_with_them() -> None:
    speed = ReadSpeed(memory_seconds=10.0)
    speed.measured(1000, 1.0, 0.0)
    assert speed.line(0.0) == Line(0.0, 0.001)
    speed.measured(1000, 3.0, 5.0)
    assert speed.line(5.0) == Line(0.0, 0.002)
    assert speed.line(12.0) == Line(0.0, 0.003)
    assert speed.line(16.0) is None
