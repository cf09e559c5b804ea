"""The memory index beside Dynamo's RadixTree (`--peers`), else beside its pure-Python twin.

Each in a process of its own, in turns, the same chains: 64 nodes, chains of 8192 blocks, events of
64 blocks, eight events of a node in a batch as a daemon's stream brings them, and one by one. A
batch is told by the best way an index has: ours joins it into one call, inside the clock; Dynamo's
binding takes an event a call. Answers must be those of the oracle, and Dynamo's where no block was
removed. What an event is differs: ours are arrays, Dynamo's binding takes JSON, which it reads on
the clock. Applying is measured in CPU time of all threads, asking by the clock.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks._figure import Figure, Line, NotAvailable, Options, main
from benchmarks._index_ingest import ingest_figures
from benchmarks._index_load import CHAIN_BLOCKS, CHURNED, EVENTS_IN_BATCH, HOLDERS
from benchmarks._peers import DYNAMO, PeerUnavailableError, installed
from benchmarks._traces import Trace, conversations, traces_beside_checkout
from benchmarks._workers import Worker, WorkerFailedError

SEED = 3
BUILD_SECONDS = 900.0
SLICES = 10
"""In which the traces are replayed, in turns."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Of ours over the reference's."""

    apply: float
    query: float
    query_with_holes: float
    bytes_per_block: float | None


BESIDE_DYNAMO = Targets(8.0, 1 / 5, 1 / 2, 32.0)
BESIDE_TWIN = Targets(2.0, 1 / 5, 1 / 2, None)
"""A small table in its first pages says little about bytes a block."""


@dataclass(frozen=True, slots=True)
class Rival:
    name: str
    worker: Worker
    targets: Targets


def measure(options: Options) -> Iterator[Line]:
    why = ""
    with ExitStack() as stack:
        try:
            command, name, targets = _rival(options.peers_dir)
        except PeerUnavailableError as error:
            why = str(error)
            command, name, targets = _rival(None)
        ours = stack.enter_context(Worker(_child("memory")))
        rival = Rival(name, stack.enter_context(Worker(command)), targets)
        if why:
            yield NotAvailable("dynamo_radix_tree", why)
        yield from _table(ours, rival, options)
        yield from _questions(ours, rival, options)
    for trace in traces_beside_checkout() or [conversations()]:
        with Worker(_child("memory")) as ours, Worker(command) as other:
            yield from _replayed(trace, ours, Rival(name, other, targets), options)
    yield from ingest_figures(options)


def _child(name: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks._index_child", name]


def _rival(directory: Path | None) -> tuple[list[str], str, Targets]:
    if directory is None:
        return _child("python"), "the pure-Python twin", BESIDE_TWIN
    python = installed(DYNAMO, directory) / "python"
    return [str(python), "-m", "benchmarks._peer_dynamo"], "Dynamo RadixTree", BESIDE_DYNAMO


def _table(ours: Worker, rival: Rival, options: Options) -> Iterator[Line]:
    """Rates of applying, and memory."""
    chains = 64 if options.quick else 610
    both = (ours, rival.worker)
    for worker in both:
        worker.ask("prepare", chains=chains, seed=SEED)
    seconds = [0.0, 0.0]
    for first in range(0, chains, 61):
        for n, worker in enumerate(both):
            worker.tell("build", first=first, count=min(61, chains - first), batch=EVENTS_IN_BATCH)
            seconds[n] += worker.answer(BUILD_SECONDS)
    million = chains * CHAIN_BLOCKS / 1e6
    yield Figure(
        f"stored_{million:.1f}M_blocks_from_empty",
        million / seconds[0],
        "M blocks/CPU s",
        rival.name,
        million / seconds[1],
        1,
        at_least=rival.targets.apply,
    )
    sizes = [worker.ask("bytes_per_block") for worker in both]
    yield Figure(
        "resident_bytes_per_block",
        sizes[0],
        "B",
        rival.name,
        sizes[1],
        1,
        value_at_most=rival.targets.bytes_per_block,
    )
    rounds = options.repeats(5, 3)
    for batch, what in ((EVENTS_IN_BATCH, ""), (1, "_event_by_event")):
        churned = [[worker.ask("churn", batch=batch) for worker in both] for _ in range(rounds)]
        for verb in ("stored", "removed"):
            fast, slow = (
                CHAIN_BLOCKS / 1e6 / statistics.median(turn[n][verb] for turn in churned)
                for n in range(2)
            )
            yield Figure(
                f"{verb}_among_{million:.1f}M_blocks{what}",
                fast,
                "M blocks/CPU s",
                rival.name,
                slow,
                rounds * CHURNED,
                at_least=rival.targets.apply,
            )


def _questions(ours: Worker, rival: Rival, options: Options) -> Iterator[Line]:
    """Seconds of questions, and whether the answers are right."""
    with Worker(_child("naive")) as oracle:
        oracle.ask("prepare", chains=2 * len(HOLDERS), seed=SEED, event_blocks=CHAIN_BLOCKS)
        for worker in (oracle, ours, rival.worker):
            worker.ask("share")
        rounds, times = options.repeats(9, 5), options.repeats(15, 7)
        for n, holders in enumerate(HOLDERS):
            for number, what in ((2 * n, ""), (2 * n + 1, "_with_holes")):
                right = oracle.ask("answer", number=number)
                _check(f"{holders} holders{what}", right, ours.ask("answer", number=number))
                if not what:
                    _check(rival.name, right, rival.worker.ask("answer", number=number))
                for kind in ("warm", "cold"):
                    taken: list[list[float]] = [[], []]
                    for _ in range(rounds):
                        for seconds, worker in zip(taken, (ours, rival.worker), strict=True):
                            order = {"number": number, "repeats": times, "is_cold": kind == "cold"}
                            seconds.append(worker.ask("ask", **order))
                    limit = rival.targets.query_with_holes if what else rival.targets.query
                    yield Figure(
                        f"query_{CHAIN_BLOCKS}_blocks_{holders}_holders{what}_{kind}",
                        statistics.median(taken[0]) * 1e6,
                        "us",
                        rival.name,
                        statistics.median(taken[1]) * 1e6,
                        rounds * times,
                        at_most=limit,
                    )


def _replayed(trace: Trace, ours: Worker, rival: Rival, options: Options) -> Iterator[Line]:
    """Ask for each request of a trace, then store it on the next of 64 nodes."""
    chains = [request.chain for request in trace.requests]
    if options.quick:
        chains = chains[:2000]
    both = (ours, rival.worker)
    for worker in both:
        worker.ask("prepare", chains=0, seed=SEED)
    asked, told, blocks = [0.0, 0.0], [0.0, 0.0], 0
    step = -(-len(chains) // SLICES)
    for first in range(0, len(chains), step):
        for n, worker in enumerate(both):
            worker.tell("replay", chains=chains[first : first + step], first=first)
            answer = worker.answer(BUILD_SECONDS)
            asked[n] += answer["asked"]
            told[n] += answer["told"]
        blocks += answer["blocks"]
    _check(f"trace {trace.name}", *(worker.ask("all_answers") for worker in both))
    yield Figure(
        f"{trace.name}_trace_query",
        asked[0] / len(chains) * 1e6,
        "us",
        rival.name,
        asked[1] / len(chains) * 1e6,
        len(chains),
        at_most=1.0,
    )
    yield Figure(
        f"{trace.name}_trace_stored",
        blocks / told[0] / 1e6,
        "M blocks/CPU s",
        rival.name,
        blocks / told[1] / 1e6,
        len(chains),
        at_least=rival.targets.apply,
    )


def _check(what: str, right: object, answer: object) -> None:
    if answer != right:
        raise WorkerFailedError(f"{what}: {str(answer)[:300]} instead of {str(right)[:300]}")


if __name__ == "__main__":
    main("index", measure)
