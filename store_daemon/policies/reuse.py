"""Learn from the blocks that come back which kind will, and how soon; keep those.

The rule is that of least hit density (Beckmann, Chen and Cidon, NSDI 2018), with classes that fit
chains of KV blocks: how many turns of its conversation came before the block, and how often it was
used itself. Within a class the least recently used goes first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from emberkv_proto.types import BlockHash
from store_daemon.policies.base import NOWHERE, EvictionPolicy

if TYPE_CHECKING:
    from store_daemon.block import Block

TURNS, USES = 4, 3
"""Classes: turns 0, 1, 2 and more; uses 0, 1 and more."""
AGES = 28
"""Ages are counted in blocks that entered since, by their power of two."""
GHOSTS_PER_BLOCK = 4
FADE = 0.9
"""What of the past still counts after an epoch."""
LEAST_EPOCH_BLOCKS = 1024
MOST_EPOCHS = 200
PRIOR_BLOCKS = 200.0
"""So many blocks' worth of doubt: a class of which little is known behaves like all together."""
FIRST_GUESS = 0.02
MOST_HAZARD = 0.95


@dataclass(frozen=True, slots=True)
class _Ghost:
    lane: int
    rank: float
    uses: int


@dataclass(frozen=True, slots=True)
class _Epoch:
    end: int
    """How many blocks had entered by then."""
    starts: list[float]
    """Per lane, the blocks whose age began to count in it."""


class ReusePolicy(EvictionPolicy):
    """A lane for each class, least recently used first; the head of the least value goes.

    The value of a block at its age is the best rate of hits for its time in DRAM that can still
    come. Rates are learned from the ages at which blocks were used again, in DRAM or as ghosts, of
    which there are at most four for each block that was in DRAM at once.
    """

    lanes = TURNS * USES

    def __init__(self) -> None:
        self._entered = 0
        self._size = 0
        self._capacity = 0
        self._ghosts: dict[BlockHash, _Ghost] = {}
        self._starts = [0.0] * self.lanes
        self._epochs: deque[_Epoch] = deque(maxlen=MOST_EPOCHS)
        self._next_epoch = LEAST_EPOCH_BLOCKS
        self._hits = [[0.0] * AGES for _ in range(self.lanes)]
        self._reached = [[0.0] * AGES for _ in range(self.lanes)]
        """How many blocks of the lane began long enough ago to have had each age."""
        self._values = [[1.0 / (1 << age) for age in range(AGES)] for _ in range(self.lanes)]

    def entered(self, block: Block) -> None:
        self._entered += 1
        self._size += 1
        self._capacity = max(self._capacity, self._size)
        ghost = self._ghosts.pop(block.hash, None)
        if ghost is not None:
            self._hits[ghost.lane][self._age(ghost.rank)] += 1
            block.uses = ghost.uses + 1
        self._begin(block)
        if self._entered >= self._next_epoch:
            self._end_epoch()

    def touched(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if block.lane != NOWHERE:
                self._hits[block.lane][self._age(block.rank)] += 1
                self._begin(block)

    def left(self, block: Block) -> None:
        self._size -= 1
        self._ghosts[block.hash] = _Ghost(block.lane, block.rank, block.uses)
        while len(self._ghosts) > GHOSTS_PER_BLOCK * self._capacity:
            del self._ghosts[next(iter(self._ghosts))]

    def order(self, block: Block) -> float:
        return block.rank

    def choose(self, heads: Sequence[Block | None]) -> Block | None:
        found = [head for head in heads if head is not None]
        return min(found, key=self._value)

    def check_integrity(self) -> None:
        assert self._size >= 0
        assert len(self._ghosts) <= GHOSTS_PER_BLOCK * self._capacity
        assert all(value >= 0 for values in self._values for value in values)

    def _begin(self, block: Block) -> None:
        block.lane = min(block.turn, TURNS - 1) * USES + min(block.uses, USES - 1)
        block.rank = self._entered
        self._starts[block.lane] += 1

    def _age(self, rank: float) -> int:
        return min((self._entered - int(rank)).bit_length(), AGES - 1)

    def _value(self, block: Block) -> tuple[float, float]:
        return self._values[block.lane][self._age(block.rank)], block.rank

    # ---- learning, once an epoch: O(lanes * ages * (ages + epochs)) ----

    def _end_epoch(self) -> None:
        self._count_reached()
        pooled = self._pooled_hazards()
        for lane in range(self.lanes):
            self._values[lane] = _best_rates(self._hazards(lane, pooled))
            self._hits[lane] = [FADE * hits for hits in self._hits[lane]]
        self._next_epoch = self._entered + max(LEAST_EPOCH_BLOCKS, self._capacity // 4)

    def _count_reached(self) -> None:
        """Blocks that began an age ago reach it now; the younger ones cannot tell of it yet."""
        before = self._epochs[-1].end if self._epochs else 0
        self._epochs.append(_Epoch(self._entered, self._starts))
        self._starts = [0.0] * self.lanes
        for age in range(AGES):
            lag = (1 << age) // 2
            due = [e.starts for e in self._epochs if before - lag < e.end <= self._entered - lag]
            for lane, reached in enumerate(self._reached):
                reached[age] = FADE * reached[age] + sum(starts[lane] for starts in due)

    def _pooled_hazards(self) -> list[float]:
        hazards: list[float] = []
        surviving, guess = 1.0, FIRST_GUESS
        for age in range(AGES):
            hits = sum(of_lane[age] for of_lane in self._hits)
            at_risk = surviving * sum(of_lane[age] for of_lane in self._reached)
            # Nothing known of an age: as for the one before, of half its length.
            guess = _hazard(hits, at_risk, guess)
            hazards.append(guess)
            surviving *= 1 - guess
        return hazards

    def _hazards(self, lane: int, pooled: Sequence[float]) -> list[float]:
        """Chance of a hit at each age for a block that has come to it without one."""
        hazards: list[float] = []
        surviving = 1.0
        for hits, reached, guess in zip(self._hits[lane], self._reached[lane], pooled, strict=True):
            hazard = _hazard(hits, surviving * reached, guess)
            hazards.append(hazard)
            surviving *= 1 - hazard
        return hazards


def _hazard(hits: float, at_risk: float, guess: float) -> float:
    return min(MOST_HAZARD, (hits + PRIOR_BLOCKS * guess) / (at_risk + PRIOR_BLOCKS))


def _best_rates(hazards: Sequence[float]) -> list[float]:
    """Per age, hits for the time in DRAM, over the span from there on that makes the most of it."""
    rates: list[float] = []
    for start in range(AGES):
        best = hits = room = 0.0
        surviving = 1.0
        for age in range(start, AGES):
            left = surviving * (1 - hazards[age])
            hits += surviving - left
            room += (surviving + left) / 2 * max(0.5, (1 << age) / 2)
            best = max(best, hits / room)
            surviving = left
        rates.append(best)
    return rates
