"""What every peer's client process does alike; runs in the peer's venv.

A peer fills in how a batch is put and got, the rest is as in `_store_client`: the same buffers, the
same batches, the same checks.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks._workers import timed

BATCH = 32
Bytes = npt.NDArray[np.uint8]


class BlockPeer(ABC):
    """Contiguous blocks: a key for each, batches of 32."""

    def __init__(self) -> None:
        self._keys = (f"{os.getpid()}-{n}" for n in itertools.count())
        self._kept: list[list[str]] = []

    def prepare(self, block_bytes: int, kept_chains: int, region_bytes: int) -> None:
        del region_bytes  # the store's own client measures plain copies
        self.block_bytes = block_bytes
        self.source, self.target = self.buffers(BATCH * block_bytes)
        self.source[:] = np.frombuffer(os.urandom(self.source.nbytes), np.uint8)
        self.target[:] = 0
        self._kept = [self._batch() for _ in range(kept_chains)]
        self._next_kept: Iterator[list[str]] = itertools.cycle(self._kept)

    def put(self, batches: int) -> dict[str, Any]:
        names = [self._batch() for _ in range(batches)]
        taken = self._timed([partial(self.put_batch, keys) for keys in names])
        for keys in names:
            self.remove(keys)
        return taken

    def keep(self) -> None:
        for keys in self._kept:
            self.put_batch(keys)

    def get(self, batches: int) -> dict[str, Any]:
        return self._timed([lambda: self.get_batch(next(self._next_kept))] * batches)

    def kept(self) -> dict[str, Any]:
        """What another process needs to get what this one keeps."""
        return {"keys": self._kept, "digest": hashlib.sha256(self.source.data).hexdigest()}

    def adopt(self, keys: list[list[str]]) -> None:
        """Get what another process keeps."""
        self._next_kept = itertools.cycle(keys)

    def digest(self) -> str:
        """Of what was got last."""
        return hashlib.sha256(self.target.data).hexdigest()

    def check(self) -> None:
        if not np.array_equal(self.source, self.target):
            raise AssertionError("the peer gave other bytes than it was given")
        self.target[:] = 0

    def close(self) -> None:
        for keys in self._kept:
            self.remove(keys)
        self._kept = []

    @property
    def verbs(self) -> dict[str, Callable[..., Any]]:
        names = ("prepare", "put", "keep", "kept", "adopt", "get", "digest", "check", "close")
        return {name: getattr(self, name) for name in names}

    @abstractmethod
    def buffers(self, byte_count: int) -> tuple[Bytes, Bytes]:
        """A source and a target that the peer can use best."""

    @abstractmethod
    def put_batch(self, keys: Sequence[str]) -> None:
        """Store the source's blocks under the keys. Raises when one is not taken."""

    @abstractmethod
    def get_batch(self, keys: Sequence[str]) -> None:
        """Fill the target with the blocks of the keys. Raises when one is missed."""

    @abstractmethod
    def remove(self, keys: Sequence[str]) -> None:
        """Make room again, outside of what is timed."""

    def _batch(self) -> list[str]:
        return list(itertools.islice(self._keys, BATCH))

    def _timed(self, steps: Sequence[Callable[[], None]]) -> dict[str, Any]:
        def work() -> None:
            for step in steps:
                step()

        return timed(len(steps) * self.source.nbytes, work)
