"""One form for every figure: measured beside its reference in the same run, printed as a ratio."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value, what it is compared with, and whether the ratio meets the target.

    `ratio` is value / reference. For a time, smaller is better: `at_most` is the target then.
    """

    name: str
    value: float
    unit: str
    reference: str
    reference_value: float
    repeats: int
    at_least: float | None = None
    at_most: float | None = None

    @property
    def ratio(self) -> float:
        return self.value / self.reference_value

    @property
    def is_ok(self) -> bool:
        return (self.at_least is None or self.ratio >= self.at_least) and (
            self.at_most is None or self.ratio <= self.at_most
        )

    def to_json(self) -> str:
        load = os.getloadavg()[0]
        target = {"at_least": self.at_least, "at_most": self.at_most}
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
class Options:
    quick: bool

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


def main(name: str, measure: Callable[[Options], Sequence[Figure]]) -> None:
    """Run, print one JSON line a figure, exit 1 when a target is missed."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}")
    parser.add_argument("--quick", action="store_true", help="at most a minute")
    figures = measure(Options(parser.parse_args().quick))
    for figure in figures:
        print(figure.to_json(), flush=True)
    missed = [figure.name for figure in figures if not figure.is_ok]
    if missed:
        print(f"targets missed: {', '.join(missed)}", file=sys.stderr)
        raise SystemExit(1)
