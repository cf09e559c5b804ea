"""Hits between nodes: a trace's requests go round the nodes, whatever is cached where.

Tokens that were hit, by source; whether what is pulled comes sooner than it would be computed; and
how near the daemon's estimate, given with the lease, comes to the time that it took.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
from blake3 import blake3

from benchmarks._figure import MIB, Figure, Options, main
from benchmarks._nodes import running_nodes
from benchmarks._traces import Request, Trace, conversations, traces_beside_checkout
from client_sdk import SyncClient
from emberkv_proto.layout import Group, GroupKind, Namespace
from emberkv_proto.types import AcquirePolicy, BlockHash, Source

BLOCK_BYTES = 256 * 1024
BLOCK_TOKENS = 512
"""As in Mooncake's traces."""
RECOMPUTE_SECONDS = 0.1
"""Of a block: some 5,000 tokens a second, as a large model prefills."""
POOL_BLOCKS = 400
"""In the DRAM of all nodes together; SSD has four times as many."""
PAUSE_SECONDS = 0.05
"""After a request, so that the index hears of its blocks before the next one comes."""
WARM_PULLS = 4
"""The first pulls of a node meet no estimate, and connections that are not there yet."""
NAMESPACE = Namespace(
    "bench", "w", "bfloat16", "0" * 32, BLOCK_TOKENS, (Group(GroupKind.FULL, 1, BLOCK_BYTES),)
)


@dataclass(slots=True)
class Pull:
    """A lease of which all that was not in DRAM came from peers."""

    blocks: int
    took_seconds: float
    estimated_seconds: float


@dataclass(slots=True)
class Played:
    """What a trace came to."""

    tokens: Counter[str] = field(default_factory=Counter)
    pulls: list[Pull] = field(default_factory=list)


class Node:
    """An engine's side of one node: loads what is worth it, stores what it would compute."""

    def __init__(self, client: SyncClient, content: np.ndarray[tuple[int], np.dtype[np.uint8]]):
        self._client = client
        self._content = content
        self._pulls = 0

    def serve(self, chain: Sequence[BlockHash], known: int, played: Played) -> None:
        """`known`: how many leading blocks somebody has stored, as a router would say."""
        client, ready = self._client, 0
        if known:
            ready = self._load(chain[:known], played)
        rest = chain[ready:]
        played.tokens["recompute"] += len(rest) * BLOCK_TOKENS
        if rest:
            parent = chain[ready - 1] if ready else None
            client.put(rest, self._content[: len(rest) * BLOCK_BYTES], parent)

    def _load(self, chain: Sequence[BlockHash], played: Played) -> int:
        began = time.perf_counter()
        with self._client.acquire(
            chain,
            policy=AcquirePolicy.WAIT_COMPLETE,
            deadline_seconds=30.0,
            recompute_seconds_per_block=RECOMPUTE_SECONDS,
        ) as lease:
            asked = list(lease.sources)
            estimated = lease.seconds_to_complete
            ready = lease.wait(lease.usable_blocks, 30.0) if lease.usable_blocks else 0
            took = time.perf_counter() - began
            for source in asked[:ready]:
                played.tokens[source.name.lower()] += BLOCK_TOKENS
            pulled = asked[:ready].count(Source.PEER)
            if pulled and Source.SSD not in asked and ready == len(asked):
                self._pulls += 1
                if self._pulls > WARM_PULLS:
                    played.pulls.append(Pull(pulled, took, estimated))
            return ready


def play(trace: Sequence[Request], nodes: int) -> Played:
    longest = max(len(request.chain) for request in trace)
    content = np.zeros(longest * BLOCK_BYTES, dtype=np.uint8)
    content[:] = np.arange(len(content), dtype=np.uint64).astype(np.uint8)
    played = Played()
    dram = POOL_BLOCKS // nodes * (BLOCK_BYTES + 4096)
    extent = 16 * MIB
    with ExitStack() as stack:
        serving = stack.enter_context(
            running_nodes(nodes, max(dram // extent, 2) * extent, 4 * dram + 512 * MIB, extent)
        )
        clients = [
            stack.enter_context(SyncClient(node.socket_path, NAMESPACE, timeout_seconds=30.0))
            for node in serving
        ]
        engines = [Node(client, content) for client in clients]
        stored: set[int] = set()
        for number, request in enumerate(trace):
            known = sum(1 for _ in takewhile(stored.__contains__, request.chain))
            chain = [block_of(n) for n in request.chain]
            engines[number % nodes].serve(chain, known, played)
            stored.update(request.chain)
            time.sleep(PAUSE_SECONDS)
    return played


def block_of(number: int) -> BlockHash:
    """Equal numbers mean equal prefixes, so the number says all that a chained hash would."""
    return BlockHash(blake3(number.to_bytes(8, "little")).digest())


def excerpt(options: Options) -> Trace:
    """Conversations of several turns, or the first requests of Mooncake's, where it is at hand."""
    found = {trace.name: trace for trace in traces_beside_checkout()}
    if options.quick or "conversation" not in found:
        whole = conversations(200)
        return Trace(whole.name, whole.requests[: options.repeats(400, 160)])
    trace = found["conversation"]
    short = [request for request in trace.requests if len(request.chain) <= POOL_BLOCKS // 16]
    return Trace(trace.name, short[:600])


def measure(options: Options) -> Iterator[Figure]:
    trace = excerpt(options)
    for nodes in (2, 4):
        played = play(trace.requests, nodes)
        name = f"pull_{trace.name}_{nodes}_nodes"
        total = sum(played.tokens.values())
        for source in ("dram", "ssd", "peer", "recompute"):
            count = played.tokens[source]
            yield Figure(f"{name}_{source}", count, "tokens", "all tokens asked for", total, 1)
        pulls = played.pulls
        took = sum(pull.took_seconds for pull in pulls)
        computed = sum(pull.blocks for pull in pulls) * RECOMPUTE_SECONDS
        yield Figure(
            f"{name}_pull_beside_recompute",
            took,
            "s",
            "computing the pulled blocks",
            computed or 1.0,
            len(pulls),
            at_most=1.0,
        )
        known = [pull for pull in pulls if pull.estimated_seconds]
        errors = [abs(p.estimated_seconds / p.took_seconds - 1) for p in known]
        yield Figure(
            f"{name}_estimate_error_p50",
            statistics.median(errors) if errors else 1.0,
            "of the time it took",
            "exact",
            1.0,
            len(errors),
            value_at_most=0.30,
        )


if __name__ == "__main__":
    main("pull", measure)
