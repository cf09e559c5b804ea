"""Where each policy's choices lead on request traces: hits, balance, seconds to the first token.

Simulated (see _routing): eight nodes, 3 million tokens in each store, engines 1.15 times as quick
as a cache without bounds would need. The reference of hit rates is that cache.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from benchmarks._figure import Figure
from benchmarks._routing import (
    Cluster,
    Outcome,
    Simulation,
    best_hit_rate,
    offered_tokens_per_second,
)
from benchmarks._traces import Trace, conversations, read_trace, traces_beside_checkout
from router.candidates import Preferences, make_policy
from router.config import PolicyName, RouterSection
from router.scoring import Speeds

NODES = 8
BLOCKS_PER_NODE = 3_000_000 // 512
HEADROOM = 1.15
QUICK_REQUESTS = 4000


def outcome(trace: Trace, name: str, best: float, *, is_pooled: bool) -> Outcome:
    """With the router's own default settings, but for the prefill speed."""
    cfg = RouterSection()
    needed = offered_tokens_per_second(trace.requests) * (1 - best)
    speeds = Speeds(
        HEADROOM * needed / NODES,
        cfg.dram_tokens_per_second,
        cfg.ssd_tokens_per_second,
        cfg.peer_tokens_per_second,
        cfg.peer_setup_seconds,
        cfg.decode_request_seconds,
    )
    preferences = Preferences(
        cfg.near_best_fraction, cfg.least_loaded_candidates, cfg.tie_seconds, cfg.tie_fraction
    )
    cluster = Cluster(NODES, BLOCKS_PER_NODE, is_pooled, speeds)
    return Simulation(cluster, make_policy(name, preferences)).run(trace.requests)


def measure(traces: Sequence[Trace]) -> Iterator[Figure]:
    for trace in traces:
        best = best_hit_rate(trace.requests)
        for is_pooled in (False, True):
            found = {
                name: outcome(trace, name, best, is_pooled=is_pooled)
                for name in get_args(PolicyName)
            }
            kind = "pooled" if is_pooled else "alone"
            others = [item.p90_seconds for name, item in found.items() if name != "cost"]
            for name, item in found.items():
                is_judged = name == "cost" and is_pooled
                at = f"{trace.name}_{kind}_{name}"
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


def run() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing")
    parser.add_argument("--quick", action="store_true", help="the first requests of each trace")
    parser.add_argument("--trace", type=Path, action="append", help="a trace in Mooncake's format")
    arguments = parser.parse_args()
    if arguments.trace:
        traces = [read_trace(path) for path in arguments.trace]
    else:
        traces = traces_beside_checkout() or [conversations()]
    if arguments.quick:
        traces = [Trace(trace.name, trace.requests[:QUICK_REQUESTS]) for trace in traces]
    began = time.monotonic()
    missed = False
    for figure in measure(traces):
        print(figure.to_json(), flush=True)
        missed |= not figure.is_ok
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    if missed:
        raise SystemExit(1)


if __name__ == "__main__":
    run()
