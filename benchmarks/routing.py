"""The short form of `emberkv trace simulate`, with our targets: hits, balance, first tokens.

Eight nodes, 3 million tokens in each store, with a pool and without; docs/simulation.md says how it
is simulated. The reference of hit rates is one cache without bounds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks._figure import Figure
from benchmarks._traces import SHARED, Trace, conversations
from router.simulation.comparison import POLICIES, Setting, at_load, simulate
from router.simulation.workload import (
    BLOCK_TOKENS,
    Workload,
    arrival,
    best_hit_rate,
    read_workload,
)

QUICK_REQUESTS = 4000
OUTPUT_TOKENS = 250
"""Of generated conversations."""


def workload_of(trace: Trace) -> Workload:
    """A generated trace, whose prompts are whole blocks."""
    return Workload(
        trace.name,
        [
            arrival(
                request.seconds, request.chain, len(request.chain) * BLOCK_TOKENS, OUTPUT_TOKENS
            )
            for request in trace.requests
        ],
    )


def measure(workloads: Sequence[Workload]) -> Iterator[Figure]:
    for workload in workloads:
        best = best_hit_rate(workload.arrivals)
        for is_pooled in (False, True):
            setting = Setting(is_pooled=is_pooled)
            offered = at_load(workload, setting)
            found = {name: simulate(offered, setting, name) for name in POLICIES}
            kind = "pooled" if is_pooled else "alone"
            others = [item.p90_seconds for name, item in found.items() if name != "cost"]
            for name, item in found.items():
                is_judged = name == "cost" and is_pooled
                at = f"{workload.name}_{kind}_{name}"
                yield Figure(
                    f"hit_rate_{at}",
                    round(100 * item.hit_rate, 2),
                    "%",
                    "one cache without bounds",
                    round(100 * best, 2),
                    1,
                    at_least=0.97 if is_judged else None,
                )
                yield Figure(
                    f"busiest_over_mean_{at}",
                    round(item.imbalance, 4),
                    "x",
                    "even work",
                    1.0,
                    1,
                    at_most=1.05 if is_judged else None,
                )
                yield Figure(
                    f"first_token_p90_{at}",
                    round(item.p90_seconds, 2),
                    "s",
                    "the best of the other policies",
                    round(min(others), 2),
                    1,
                    at_most=1.0 if is_judged else None,
                )


def _beside_checkout() -> list[Workload]:
    """Mooncake's traces, where somebody has put them into ../shared/traces."""
    found = []
    for name in ("conversation", "synthetic"):
        path = SHARED / f"mooncake_fast25_{name}_trace.jsonl"
        if path.exists():
            found.append(replace(read_workload(path), name=name))
    return found


def run() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing")
    parser.add_argument("--quick", action="store_true", help="the first requests of each trace")
    parser.add_argument("--trace", type=Path, action="append", help="a trace in Mooncake's format")
    arguments = parser.parse_args()
    if arguments.trace:
        workloads = [read_workload(path) for path in arguments.trace]
    else:
        workloads = _beside_checkout() or [workload_of(conversations())]
    if arguments.quick:
        workloads = [
            replace(workload, arrivals=workload.arrivals[:QUICK_REQUESTS]) for workload in workloads
        ]
    began = time.monotonic()
    missed = False
    for figure in measure(workloads):
        print(figure.to_json(), flush=True)
        missed |= not figure.is_ok
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    if missed:
        raise SystemExit(1)


if __name__ == "__main__":
    run()
