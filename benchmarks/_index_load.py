"""The load that every index is measured with: chains in events of 64 blocks, and questions.

Runs in our child and in a peer's, whose venv has numpy and nothing of ours. An index comes as an
`Adapter`; what it needs in its own form is made before the clock starts.
"""

from __future__ import annotations

import hashlib
import mmap
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
CHAIN_BLOCKS = 8192
EVENT_BLOCKS = 64
EVENTS_IN_BATCH = 8
"""Of one node, as a daemon's stream brings them together."""
NODES = 64
HOLDERS = (1, 4, 64)
SMALLER = 8
"""A trace's blocks are of 512 tokens; engines' of 64 or fewer."""
CHURNED = 32
"""Chains that are removed and stored again."""
READY_BYTES = 256 << 20
"""More than an index takes in one order to build."""
CACHE_BYTES = 64 << 20
"""More than the last-level cache of most machines: written to before each cold question."""


class Adapter(ABC):
    """One index, as the load drives it."""

    @abstractmethod
    def stored(self, keys: Keys, parent: int | None) -> Any:
        """An event in this index's own form: a node has these blocks, `parent` is before them."""

    @abstractmethod
    def removed(self, keys: Keys) -> Any: ...

    @abstractmethod
    def tell(self, node: int, events: Sequence[Any]) -> Callable[[], object]:
        """The call that tells of a batch of a node's events, by the best way the index has."""

    @abstractmethod
    def question(self, keys: Keys) -> Callable[[], dict[int, int]]:
        """The call that asks for the hit of each node."""

    @abstractmethod
    def drain(self) -> None:
        """Wait until all that was told is applied."""


class Load:
    """The verbs of a child."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._flood = np.zeros(CACHE_BYTES // 8)
        self._answers = hashlib.blake2b()

    def prepare(self, chains: int, seed: int, event_blocks: int = EVENT_BLOCKS) -> None:
        self._event_blocks = event_blocks
        rng = np.random.default_rng(seed)
        self._chains = [
            rng.integers(1, 1 << 63, CHAIN_BLOCKS, dtype=np.uint64) for _ in range(chains)
        ]
        self._adapter.drain()
        self._rss = resident_bytes()

    def build(self, first: int, count: int, batch: int) -> float:
        """Store chains, each on one node, so many events in a batch; seconds."""
        have_pages_ready()
        numbers = range(first, first + count)
        return sum(self._store(number % NODES, number, batch) for number in numbers)

    def bytes_per_block(self) -> float:
        return (resident_bytes() - self._rss) / (len(self._chains) * CHAIN_BLOCKS)

    def share(self) -> None:
        """Chains 2 n and 2 n + 1 are held by HOLDERS[n] nodes, the second ones with holes."""
        for n, holders in enumerate(HOLDERS):
            for number in (2 * n, 2 * n + 1):
                for node in range(holders):
                    self._store((number + node) % NODES, number, 1)
            for node in range(holders):
                hole = CHAIN_BLOCKS - 32 * (node + 1)
                keys = self._chains[2 * n + 1][hole : hole + 10]
                self._adapter.tell((2 * n + 1 + node) % NODES, [self._adapter.removed(keys)])()
        self._adapter.drain()

    def churn(self, batch: int) -> dict[str, float]:
        """Remove the last chains, leaves first, and store them again; median seconds a chain."""
        numbers = range(len(self._chains) - CHURNED, len(self._chains))
        removed = []
        for number in numbers:
            chain = self._chains[number]
            events = [
                self._adapter.removed(chain[at : at + EVENT_BLOCKS])
                for at in range(CHAIN_BLOCKS - EVENT_BLOCKS, -1, -EVENT_BLOCKS)
            ]
            calls = self._calls(number % NODES, events, batch)
            removed.append(self._timed(calls))
        stored = [self._store(number % NODES, number, batch) for number in numbers]
        return {"removed": statistics.median(removed), "stored": statistics.median(stored)}

    def ask(self, number: int, repeats: int, is_cold: bool) -> float:
        """Median seconds of a question for a chain."""
        question, times = self._adapter.question(self._chains[number]), []
        question()
        for _ in range(repeats):
            if is_cold:
                self._flood += 1.0
            begun = time.perf_counter()
            question()
            times.append(time.perf_counter() - begun)
        return statistics.median(times)

    def answer(self, number: int) -> list[list[int]]:
        hits = self._adapter.question(self._chains[number])()
        return sorted([node, hit] for node, hit in hits.items())

    def replay(self, chains: Sequence[Sequence[int]], first: int) -> dict[str, float]:
        """Ask for each chain, then store it on the next node; seconds, and how many were stored.

        Each number of a chain stands for SMALLER blocks.
        """
        asked = told = 0.0
        blocks = 0
        for number, chain in enumerate(chains, first):
            keys = mixed(
                np.array([SMALLER * n + i for n in chain for i in range(SMALLER)], np.uint64)
            )
            question = self._adapter.question(keys)
            begun = time.perf_counter()
            hits = question()
            asked += time.perf_counter() - begun
            self._answers.update(repr(sorted(hits.items())).encode())
            node = number % NODES
            new = hits.get(node, 0)
            parent = int(keys[new - 1]) if new else None
            if new < keys.size:
                event = self._adapter.stored(keys[new:], parent)
                told += self._timed([self._adapter.tell(node, [event])])
                blocks += keys.size - new
        return {"asked": asked, "told": told, "blocks": blocks}

    def all_answers(self) -> str:
        """A digest of every answer of `replay`."""
        return self._answers.hexdigest()

    @property
    def verbs(self) -> dict[str, Callable[..., Any]]:
        names = (
            "prepare",
            "build",
            "bytes_per_block",
            "share",
            "churn",
            "ask",
            "answer",
            "replay",
            "all_answers",
        )
        return {name: getattr(self, name) for name in names}

    def _store(self, node: int, number: int, batch: int) -> float:
        chain = self._chains[number]
        events = []
        for at in range(0, CHAIN_BLOCKS, self._event_blocks):
            parent = int(chain[at - 1]) if at else None
            events.append(self._adapter.stored(chain[at : at + self._event_blocks], parent))
        return self._timed(self._calls(node, events, batch))

    def _calls(self, node: int, events: list[Any], batch: int) -> list[Callable[[], object]]:
        return [
            self._adapter.tell(node, events[at : at + batch]) for at in range(0, len(events), batch)
        ]

    def _timed(self, calls: Sequence[Callable[[], object]]) -> float:
        """CPU seconds, of all threads: a busy machine stretches them far less than the clock's."""
        begun = time.process_time()
        for call in calls:
            call()
        self._adapter.drain()
        return time.process_time() - begun


def mixed(numbers: Keys) -> Keys:
    """Numbers spread over all of 64 bits, as hashes are (splitmix64)."""
    mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    keys: Keys = (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
    return keys


def have_pages_ready() -> None:
    """Take memory from a virtual machine's host and free it again, before the clock starts.

    A host that takes free huge pages back within seconds gives each again in milliseconds, whatever
    it is wanted for: that would be most of what is measured, and chance would say who pays.
    """
    with mmap.mmap(-1, READY_BYTES) as pages:
        with suppress(AttributeError, OSError):  # not everywhere are there huge ones
            pages.madvise(mmap.MADV_HUGEPAGE)
        for place in range(0, READY_BYTES, mmap.PAGESIZE):
            pages[place] = 1


def resident_bytes() -> int:
    with open("/proc/self/status") as lines:
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
