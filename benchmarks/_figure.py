"""One form for every figure: measured beside its reference in the same run, printed as a ratio."""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value, what it is compared with, and whether the ratio meets the target.

    `ratio` is value / reference, and `at_least` and `at_most` are about it. For a time, smaller is
    better. `value_at_most` is a target of its own, about the value.
    """

    name: str
    value: float
    unit: str
    reference: str
    reference_value: float
    repeats: int
    at_least: float | None = None
    at_most: float | None = None
    value_at_most: float | None = None

    @property
    def ratio(self) -> float:
        return self.value / self.reference_value

    @property
    def is_ok(self) -> bool:
        return (
            (self.at_least is None or self.ratio >= self.at_least)
            and (self.at_most is None or self.ratio <= self.at_most)
            and (self.value_at_most is None or self.value <= self.value_at_most)
        )

    def to_json(self) -> str:
        load = os.getloadavg()[0]
        target = {
            "at_least": self.at_least,
            "at_most": self.at_most,
            "value_at_most": self.value_at_most,
        }
        return json.dumps(
            {
                **{k: v for k, v in asdict(self).items() if k not in target},
                "ratio": round(self.ratio, 4),
                "target": {k: v for k, v in target.items() if v is not None},
                "ok": self.is_ok,
                "load": round(load, 2),
            }
        )


@dataclass(frozen=True, slots=True)
class NotAvailable:
    """A peer that could not be measured. Nothing was shown beside it, so it counts as missed."""

    name: str
    why: str

    @property
    def is_ok(self) -> bool:
        return False

    def to_json(self) -> str:
        return json.dumps({"name": self.name, "not_available": self.why, "ok": False})


Line = Figure | NotAvailable


@dataclass(frozen=True, slots=True)
class Options:
    quick: bool
    peers_dir: Path | None = None
    """Where the peers' venvs are kept; None: measure without peers."""

    def repeats(self, full: int, quick: int) -> int:
        return quick if self.quick else full


def medians_seconds(runs: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Median seconds of each run. They take turns, so that a noisy moment hits all alike."""
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    for _ in range(repeats):
        for run, taken in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


def median_values(runs: Sequence[Callable[[], float]], repeats: int) -> list[float]:
    """Median of what each run says of itself. They take turns, and which begins changes."""
    values: list[list[float]] = [[] for _ in runs]
    for repeat in range(repeats):
        for turn in range(len(runs)):
            number = (turn + repeat) % len(runs)
            values[number].append(runs[number]())
    return [statistics.median(taken) for taken in values]


def size_name(byte_count: int) -> str:
    return f"{byte_count // MIB}MiB" if byte_count >= MIB else f"{byte_count // 1024}KiB"


def default_peers_dir() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("EMBERKV_BENCH_PEERS") or Path(cache) / "emberkv" / "bench-peers")


def main(name: str, measure: Callable[[Options], Iterable[Line]]) -> None:
    """Run, print one JSON line a figure as it comes, exit 1 when a target is missed."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}")
    parser.add_argument("--quick", action="store_true", help="at most a minute, without peers")
    parser.add_argument("--peers", action="store_true", help="beside other systems, if it has any")
    parser.add_argument(
        "--peers-dir",
        type=Path,
        default=default_peers_dir(),
        help="where their venvs are kept; EMBERKV_BENCH_PEERS (default: %(default)s)",
    )
    arguments = parser.parse_args()
    options = Options(arguments.quick, arguments.peers_dir if arguments.peers else None)
    missed: list[str] = []
    # As by Ctrl-C: what was started is ended on the way out.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        for line in measure(options):
            print(line.to_json(), flush=True)
            if not line.is_ok:
                missed.append(line.name)
    finally:
        signal.signal(signal.SIGTERM, before)
    if missed:
        print(f"targets missed: {', '.join(missed)}", file=sys.stderr)
        raise SystemExit(1)
