"""The store's benchmark: its arithmetic, its child processes, and one tiny run of each part."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import _store_copies, _store_ssd, store
from benchmarks._daemon import running_daemon
from benchmarks._figure import (
    MIB,
    Figure,
    Line,
    NotAvailable,
    Options,
    main,
    median_values,
    size_name,
)
from benchmarks._store_copies import Contender, Shape, copies
from benchmarks._store_paged import paged
from benchmarks._workers import ROOT, Worker, WorkerFailedError, gigabytes_per_second

QUICK = Options(quick=True)
CHILD = """
import os, sys, time
from benchmarks._workers import serve, timed
serve({
    "double": lambda number: print("noise") or 2 * number,
    "fail": lambda: 1 / 0,
    "end": lambda: os._exit(3),
    "hang": lambda: time.sleep(60),
    "move": lambda: timed(8, lambda: None),
})
"""


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = (str(ROOT), str(ROOT / "proto"), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def child() -> Worker:
    return Worker([sys.executable, "-c", CHILD])


@pytest.mark.usefixtures("importable")
def test_a_child_obeys_in_order_and_says_what_went_wrong() -> None:
    with child() as worker:
        worker.tell("double", number=4)
        worker.tell("double", number=5)
        assert [worker.answer(), worker.answer()] == [8, 10]
        with pytest.raises(WorkerFailedError, match="ZeroDivisionError"):
            worker.ask("fail")
        with pytest.raises(WorkerFailedError, match="KeyError"):
            worker.ask("unknown")
        assert gigabytes_per_second([worker.ask("move")]) > 0
        with pytest.raises(WorkerFailedError, match="code 3"):
            worker.ask("end")


@pytest.mark.usefixtures("importable")
def test_a_child_that_hangs_is_given_up_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks._workers.END_SECONDS", 0.5)
    with child() as worker:
        worker.tell("hang")
        with pytest.raises(WorkerFailedError, match="in time"):
            worker.answer(0.1)
    assert worker.exit_code is not None


def test_what_several_move_at_once_counts_from_the_first_begin_to_the_last_end() -> None:
    answers = [
        {"byte_count": 10**9, "begun": 1.0, "ended": 2.0},
        {"byte_count": 10**9, "begun": 1.5, "ended": 3.0},
    ]
    assert gigabytes_per_second(answers) == pytest.approx(1.0)


def test_runs_take_turns_and_each_begins_a_round() -> None:
    order: list[str] = []

    def run(name: str) -> float:
        order.append(name)
        return float(len(order))

    assert median_values([lambda: run("a"), lambda: run("b")], 3) == [4.0, 3.0]
    assert "".join(order) == "abbaab"


def test_a_run_that_is_told_to_end_cleans_up_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[str] = []

    def measure(options: Options) -> Iterator[Line]:
        try:
            yield Figure("first", 1.0, "GB/s", "memcpy", 1.0, 3)
            os.kill(os.getpid(), signal.SIGTERM)
            yield Figure("second", 1.0, "GB/s", "memcpy", 1.0, 3)
        finally:
            ended.append("servers")

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "argv", ["bench"])
    with pytest.raises(SystemExit, match="143"):
        main("bench", measure)
    assert ended == ["servers"]
    assert "second" not in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("block_bytes", "name", "batches"),
    [(64 * 1024, "64KiB", 64), (MIB, "1MiB", 4), (4 * MIB, "4MiB", 1), (64 * MIB, "64MiB", 1)],
)
def test_a_round_moves_about_as_much_at_every_size(
    block_bytes: int, name: str, batches: int
) -> None:
    assert size_name(block_bytes) == name
    assert Shape(block_bytes).batches == batches


def run_main(
    lines: list[Line], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, list[dict[str, object]], str]:
    monkeypatch.setattr(sys, "argv", ["bench", "--quick"])
    code = 0
    try:
        main("bench", lambda options: lines)
    except SystemExit as ended:
        code = int(ended.code or 0)
    printed = capsys.readouterr()
    return code, [json.loads(line) for line in printed.out.splitlines()], printed.err


def test_a_missed_target_or_an_unmeasured_peer_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = Figure("fast", 2.0, "GB/s", "memcpy", 1.0, 3, at_least=0.95)
    slow = Figure("slow", 0.9, "GB/s", "memcpy", 1.0, 3, at_least=0.95)
    told = Figure("told", 0.1, "GB/s", "memcpy", 1.0, 3)
    late = Figure("late", 61.0, "us", "echo", 30.0, 3, value_at_most=60.0)
    code, printed, errors = run_main([fast, told], monkeypatch, capsys)
    assert (code, errors) == (0, "")
    assert [line["ok"] for line in printed] == [True, True]
    code, printed, errors = run_main(
        [fast, slow, NotAvailable("peer", "no wheel"), late], monkeypatch, capsys
    )
    assert code == 1
    assert [line["ok"] for line in printed] == [True, False, False, False]
    assert printed[2]["not_available"] == "no wheel"
    assert "slow, peer, late" in errors


@pytest.mark.usefixtures("importable")
def test_tiny_run_of_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_store_copies, "ROUND_BYTES", MIB)
    with (
        running_daemon(512 * 4096, 512 * 1024) as serving,
        store.store_client(serving.socket_path) as one,
    ):
        figures = list(copies(Contender("us", [one]), [], MIB, QUICK, sizes=(4096,)))
        one.ask("prepare", block_bytes=4096, kept_chains=1, region_bytes=MIB)
        with pytest.raises(WorkerFailedError, match="other bytes"):
            one.ask("check")
    assert [figure.name for figure in figures] == [
        "put_32x4KiB_1_clients",
        "get_32x4KiB_1_clients",
    ]
    assert all(math.isfinite(figure.ratio) and figure.ratio > 0 for figure in figures)


@pytest.mark.usefixtures("importable")
def test_tiny_run_of_the_paged_copies() -> None:
    with (
        running_daemon(16 * MIB, 8 * MIB) as serving,
        store.store_client(serving.socket_path) as client,
    ):
        (figure,) = paged(client, 2, [], QUICK, layers=2)
    assert figure.ratio > 0


@pytest.mark.usefixtures("importable")
def test_tiny_run_of_the_drive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_store_ssd, "BLOCKS", 6)
    monkeypatch.setattr(_store_ssd, "DRAM_BYTES", 12 * MIB)
    monkeypatch.setattr(_store_ssd, "EXTENT_BYTES", 4 * MIB)
    written, promoted = _store_ssd.moves(QUICK)
    assert (written.name, promoted.name) == ("writeback_1MiB", "promote_1MiB")
    assert written.ratio > 0
    assert promoted.ratio > 0
