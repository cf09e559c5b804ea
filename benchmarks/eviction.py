"""Hit rate of each eviction policy on request traces, beside the best that hindsight could do.

The policies and the queue are the store's own; only places and bytes are left out. A request reads
the leading blocks of its chain that are there, then stores the others. The reference is Belady's
MIN for blocks: it knows the future, so no policy can reach it.
"""

from __future__ import annotations

import argparse
import heapq
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks._figure import Figure, Line, NotAvailable, default_peers_dir
from benchmarks._kvcache_simulator import checks, fifo_hit_rate
from benchmarks._peers import KVCACHE_SIMULATOR, PeerUnavailableError, installed
from benchmarks._traces import Request, Trace, conversations, read_trace, traces_beside_checkout
from emberkv_proto.layout import Group, GroupKind, Namespace
from emberkv_proto.types import BlockHash
from store_daemon.block import Block, StoredNamespace
from store_daemon.eviction import EvictionQueue
from store_daemon.policies import POLICIES, EvictionPolicy

SIZES = (3_819, 7_639, 15_279, 30_559)
"""Blocks in 64, 128, 256 and 512 GiB, at 512 tokens of 35,136 bytes each."""
QUICK_SIZES = SIZES[1:2]
NEVER = 1 << 62
OWN = StoredNamespace.of(
    Namespace("trace", "w1", "bfloat16", "0" * 32, 512, (Group(GroupKind.FULL, 1, 512 * 35_136),))
)


class SimulatedNode:
    """A store of `capacity` blocks without places: catalog rules, the real queue and policy."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self.now = 0.0
        self._capacity = capacity
        self._queue = EvictionQueue(policy, lambda: self.now, self._policy_failed)
        self._blocks: dict[BlockHash, Block] = {}
        self._children: dict[BlockHash, int] = {}

    def serve(self, chain: Sequence[BlockHash]) -> int:
        """Read and then store a chain; return how many of its blocks were hits."""
        found = []
        for block_hash in chain:
            block = self._blocks.get(block_hash)
            if block is None:
                break
            found.append(block)
        self._queue.touch(found)
        self._queue.next_access()
        parent = found[-1] if found else None
        for depth in range(len(found), len(chain)):
            if parent is not None:
                parent.pins = 1
            has_room = len(self._blocks) < self._capacity or self._evict()
            if parent is not None:
                parent.pins = 0
            if not has_room:
                if parent is not None:
                    self._offer(parent)
                break
            parent = self._store(chain[depth], parent, depth)
        if len(found) < len(chain) and parent is not None:
            self._offer(parent)
        return len(found)

    def check_integrity(self) -> None:
        self._queue.check_integrity()
        assert len(self._blocks) <= self._capacity
        for block in self._blocks.values():
            assert block.parent is None or block.parent in self._blocks, "a prefix has a hole"
            assert block.is_queued or not self._is_evictable(block)

    def _store(self, block_hash: BlockHash, parent: Block | None, depth: int) -> Block:
        parent_hash = parent.hash if parent is not None else None
        block = Block(block_hash, OWN, parent_hash, [], [], in_dram=True, depth=depth)
        if parent is not None:
            block.turn = parent.turn + (parent.uses > 0)
        self._blocks[block_hash] = block
        if parent_hash is not None:
            self._children[parent_hash] = self._children.get(parent_hash, 0) + 1
        self._queue.entered(block)
        return block

    def _evict(self) -> bool:
        victim = self._queue.oldest_of_all(self._is_evictable)
        if victim is None:
            return False
        del self._blocks[victim.hash]
        victim.in_dram = False
        self._queue.left(victim)
        if victim.parent is not None:
            left = self._children[victim.parent] - 1
            self._children[victim.parent] = left
            if not left:
                del self._children[victim.parent]
                self._offer(self._blocks[victim.parent])
        return True

    def _offer(self, block: Block) -> None:
        if not block.is_queued and self._is_evictable(block):
            self._queue.offer(block)

    def _is_evictable(self, block: Block) -> bool:
        return block.in_dram and not block.pins and block.hash not in self._children

    def _policy_failed(self) -> None:
        raise AssertionError("a policy failed")


def policy_hit_rate(trace: Trace, policy: EvictionPolicy, capacity: int) -> float:
    """Percent of the blocks of the trace's second half that were hits."""
    node = SimulatedNode(policy, capacity)
    half = len(trace.requests) // 2
    hits = asked = 0
    for number, request in enumerate(trace.requests):
        node.now = request.seconds
        found = node.serve([BlockHash(b.to_bytes(32, "big")) for b in request.chain])
        if number >= half:
            hits += found
            asked += len(request.chain)
    node.check_integrity()
    return 100 * hits / asked


def best_hit_rate(trace: Trace, capacity: int) -> float:
    """The same of Belady's MIN, which may also decline to store a block."""
    uses = list(_uses(trace.requests))
    next_use = [NEVER] * len(uses)
    last: dict[int, int] = {}
    for number in range(len(uses) - 1, -1, -1):
        next_use[number] = last.get(uses[number], NEVER)
        last[uses[number]] = number
    start = sum(len(request.chain) for request in trace.requests[: len(trace.requests) // 2])
    held: dict[int, int] = {}
    farthest: list[tuple[int, int]] = []
    hits = 0
    for number, block in enumerate(uses):
        if block in held and number >= start:
            hits += 1
        held[block] = next_use[number]
        heapq.heappush(farthest, (-next_use[number], block))
        while len(held) > capacity:
            negated, victim = heapq.heappop(farthest)
            if held.get(victim) == -negated:
                del held[victim]
    return 100 * hits / (len(uses) - start)


def _uses(requests: Sequence[Request]) -> Iterator[int]:
    for request in requests:
        yield from request.chain


def measure(traces: Sequence[Trace], sizes: Sequence[int]) -> Iterator[Figure]:
    for trace in traces:
        for capacity in sizes:
            best = best_hit_rate(trace, capacity)
            for name, policy in POLICIES.items():
                yield Figure(
                    f"hit_rate_{trace.name}_{capacity}_blocks_{name}",
                    round(policy_hit_rate(trace, policy(), capacity), 2),
                    "%",
                    "Belady's MIN, which knows the future",
                    round(best, 2),
                    1,
                )


def check(traces: Sequence[Trace], sizes: Sequence[int], peers_dir: Path) -> Iterator[Line]:
    """This simulator against one that others wrote."""
    try:
        executable = installed(KVCACHE_SIMULATOR, peers_dir) / "kvcache-simulator"
    except PeerUnavailableError as error:
        yield NotAvailable(KVCACHE_SIMULATOR.name, str(error))
        return
    for trace in traces:

        def ours(name: str, capacity: int, trace: Trace = trace) -> float:
            if name == "fifo":
                return fifo_hit_rate(trace, capacity)
            if name == "hindsight":
                return best_hit_rate(trace, capacity)
            return policy_hit_rate(trace, POLICIES[name](), capacity)

        yield from checks(executable, trace, sizes, ours)


def run() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.eviction")
    parser.add_argument("--quick", action="store_true", help="one size, at most a minute")
    parser.add_argument("--trace", type=Path, action="append", help="a trace in Mooncake's format")
    parser.add_argument(
        "--peers", action="store_true", help="check LRU, FIFO and MIN against kvcache-simulator"
    )
    parser.add_argument("--peers-dir", type=Path, default=default_peers_dir())
    arguments = parser.parse_args()
    if arguments.trace:
        traces = [read_trace(path) for path in arguments.trace]
    else:
        traces = traces_beside_checkout() or [conversations()]
    began = time.monotonic()
    sizes = QUICK_SIZES if arguments.quick else SIZES
    lines: Iterator[Line] = measure(traces, sizes)
    if arguments.peers:
        lines = check(traces, sizes, arguments.peers_dir)
    missed = False
    for line in lines:
        print(line.to_json(), flush=True)
        missed |= not line.is_ok
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    if missed:
        raise SystemExit(1)


if __name__ == "__main__":
    run()
