"""Copies of blocks that other nodes hold: which are kept as our own, and who goes first. Pure.

A block that a pull brought is a replica: it is served and evicted like any other, but gets no SSD
copy here, and all replicas together are held to a share of DRAM, beyond which they make room among
themselves: the oldest run first, from its end. It becomes one of our own when it is used again
here, or when it had to be pulled often enough: from then on it is treated as if it had been
computed here.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from emberkv_proto.types import BlockHash
from store_daemon.block import Block

MAX_REMEMBERED = 65536
"""Blocks whose pulls are counted; the ones that were pulled longest ago are forgotten."""
RUNS_LOOKED_AT = 16
MOST_GONE = 1024
"""Blocks that left and are listed yet; more only while there are as many replicas."""


@dataclass(frozen=True, slots=True)
class ReplicaLimits:
    """`pulls_to_keep`: within `memory_seconds`, the arriving one included; 1 keeps every block."""

    share_bytes: int
    pulls_to_keep: int = 2
    memory_seconds: float = 600.0


@dataclass(slots=True)
class _Pulled:
    count: int
    last: float


class Replicas:
    """O(1) a call on average, `oldest` O(RUNS_LOOKED_AT). Belongs to the store's event loop."""

    def __init__(self, limits: ReplicaLimits, clock: Callable[[], float]) -> None:
        self.limits = limits
        self._clock = clock
        self._pulled: OrderedDict[BlockHash, _Pulled] = OrderedDict()
        self._runs: deque[list[Block]] = deque()
        """None is empty; blocks in them may have left since."""
        self._listed = 0
        """Blocks in all runs."""
        self._sizes: dict[Block, int] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def surplus_bytes(self) -> int:
        """How much more than their share they take."""
        return max(0, self.bytes - self.limits.share_bytes)

    def is_wanted(self, block_hash: BlockHash) -> bool:
        """A pull brings this block: whether it was pulled often enough to be kept as our own."""
        now = self._clock()
        known = self._pulled.pop(block_hash, None)
        is_fresh = known is not None and now - known.last <= self.limits.memory_seconds
        count = known.count + 1 if known is not None and is_fresh else 1
        self._pulled[block_hash] = _Pulled(count, now)
        if len(self._pulled) > MAX_REMEMBERED:
            self._pulled.popitem(last=False)
        return count >= self.limits.pulls_to_keep

    def begin_run(self) -> list[Block]:
        """The blocks of one pull, root first, for `add`."""
        return []

    def add(self, run: list[Block], block: Block) -> None:
        """The next block of a run has landed and is no block of our own."""
        if not run:  # it is new, or all that it had is gone
            self._runs.append(run)
        run.append(block)
        self._listed += 1
        self._sizes[block] = block.dram_bytes
        self.bytes += self._sizes[block]

    def is_replica(self, block: Block) -> bool:
        return block in self._sizes

    def forget(self, block: Block) -> bool:
        """The block is a replica no more: it left, or is kept. Whether it was one."""
        size = self._sizes.pop(block, None)
        self.bytes -= size or 0
        if self._listed > 2 * len(self._sizes) + MOST_GONE:
            self._strike_gone()
        return size is not None

    def oldest(self, is_evictable: Callable[[Block], bool]) -> Block | None:
        """The next replica to go: the last block of the oldest run whose end may go at all."""
        for _ in range(min(RUNS_LOOKED_AT, len(self._runs))):
            run = self._runs[0]
            while run and run[-1] not in self._sizes:
                run.pop()
                self._listed -= 1
            if run and is_evictable(run[-1]):
                return run[-1]
            if not run:
                self._runs.popleft()
            else:
                self._runs.rotate(-1)  # held by somebody, or by the run that goes on behind it
        return None

    def check_integrity(self) -> None:
        assert self.bytes == sum(self._sizes.values())
        assert all(block.in_dram for block in self._sizes), "a replica that is not here"
        listed = {block for run in self._runs for block in run}
        assert listed >= set(self._sizes), "a replica that nobody can find"
        assert all(self._runs), "an empty run is listed"
        assert self._listed == sum(len(run) for run in self._runs)
        assert self._listed <= 2 * len(self._sizes) + MOST_GONE
        assert len(self._pulled) <= MAX_REMEMBERED

    def _strike_gone(self) -> None:
        """Blocks that left by other ways than `oldest` are kept no longer. O(listed), seldom."""
        for run in self._runs:
            run[:] = [block for block in run if block in self._sizes]
        self._runs = deque(run for run in self._runs if run)
        self._listed = sum(len(run) for run in self._runs)
