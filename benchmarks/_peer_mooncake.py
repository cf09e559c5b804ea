"""A client of Mooncake Store: `python -m benchmarks._peer_mooncake embedded|daemon ADDRESS`.

Embedded, the process owns a segment and ADDRESS is the master's; else ADDRESS is that of the
node's `mooncake_client`, with which it shares memory. Pages go by the calls with several buffers a
key, straight from and to the layers' tensors, which lie in registered memory.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from benchmarks._peer_client import BATCH, BlockPeer, Bytes
from benchmarks._workers import page_memory, serve, timed

MIB = 1 << 20
ARENA_BYTES = 512 * MIB
SEGMENT_BYTES = 1536 * MIB
LOCAL_BUFFER_BYTES = 64 * MIB
PAGES, PAGE_BYTES = 64, 32 * 1024


class MooncakePeer(BlockPeer):
    """Zero-copy calls on one registered arena: half of it is the source, half the target."""

    def __init__(self, mode: str, address: str) -> None:
        super().__init__()
        mooncake = import_module("mooncake.store")
        self._store = mooncake.MooncakeDistributedStore()
        self._config = mooncake.ReplicateConfig()
        if mode == "daemon":
            self._require(
                self._store.setup_dummy(ARENA_BYTES + 64 * MIB, LOCAL_BUFFER_BYTES, address)
            )
            self._base = self._store.alloc_from_mem_pool(ARENA_BYTES)
            arena = (ctypes.c_uint8 * ARENA_BYTES).from_address(self._base)
            self._arena: Bytes = np.ctypeslib.as_array(arena)
        else:
            self._require(
                self._store.setup(
                    "127.0.0.1",
                    "P2PHANDSHAKE",
                    SEGMENT_BYTES,
                    LOCAL_BUFFER_BYTES,
                    "tcp",
                    "",
                    address,
                )
            )
            self._config.preferred_segment = self._store.get_hostname()  # not over the network
            self._arena = np.frombuffer(page_memory(ARENA_BYTES), np.uint8)
            self._base = self._arena.ctypes.data
        self._require(self._store.register_buffer(self._base, ARENA_BYTES))
        self._arena[:] = 0

    # ---- contiguous blocks ----

    def buffers(self, byte_count: int) -> tuple[Bytes, Bytes]:
        half = ARENA_BYTES // 2
        return self._arena[:byte_count], self._arena[half : half + byte_count]

    def put_batch(self, keys: Sequence[str]) -> None:
        results = self._store.batch_put_from(list(keys), *self._places(0), self._config)
        self._require(*results)

    def get_batch(self, keys: Sequence[str]) -> None:
        results = self._store.batch_get_into(list(keys), *self._places(ARENA_BYTES // 2))
        self._require(*(result - self.block_bytes for result in results))

    def remove(self, keys: Sequence[str]) -> None:
        self._require(*self._store.batch_remove(list(keys), True))

    # ---- paged tensors ----

    def paged_prepare(self, layers: int) -> None:
        self._layers = layers
        self._random = np.random.default_rng(2)
        half = ARENA_BYTES // 2
        shape = (layers, 2, PAGES, PAGE_BYTES)
        size = layers * 2 * PAGES * PAGE_BYTES
        self._from = self._arena[:size].reshape(shape)
        self._to = self._arena[half : half + size].reshape(shape)
        self._from[:] = self._random.integers(0, 256, shape, np.uint8)
        self._stored: list[str] = []

    def paged_store(self) -> dict[str, Any]:
        if self._stored:
            self.remove(self._stored)
        self._pages = self._random.permutation(PAGES)[:BATCH].tolist()
        self._stored = self._batch()

        def work() -> None:
            results = self._store.batch_put_from_multi_buffers(
                self._stored, *self._pieces(self._base, self._pages), self._config
            )
            self._require(*results)

        return timed(BATCH * self._paged_bytes, work)

    def paged_load(self) -> dict[str, Any]:
        pages = self._random.permutation(PAGES)[:BATCH].tolist()

        def work() -> None:
            results = self._store.batch_get_into_multi_buffers(
                self._stored, *self._pieces(self._base + ARENA_BYTES // 2, pages)
            )
            self._require(*(result - self._paged_bytes for result in results))

        taken = timed(BATCH * self._paged_bytes, work)
        if not np.array_equal(self._to[:, :, pages], self._from[:, :, self._pages]):
            raise AssertionError("other pages came back than went in")
        return taken

    def paged_close(self) -> None:
        self.remove(self._stored)
        self._stored = []

    def leave(self) -> None:
        self._store.close()

    @property
    def _paged_bytes(self) -> int:
        return self._layers * 2 * PAGE_BYTES

    def _pieces(self, base: int, pages: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
        rows = [base + row * PAGES * PAGE_BYTES for row in range(self._layers * 2)]
        return (
            [[row + page * PAGE_BYTES for row in rows] for page in pages],
            [[PAGE_BYTES] * len(rows)] * len(pages),
        )

    def _places(self, start: int) -> tuple[list[int], list[int]]:
        size = self.block_bytes
        return [self._base + start + i * size for i in range(BATCH)], [size] * BATCH

    @staticmethod
    def _require(*results: int) -> None:
        wrong = {result for result in results if result}
        if wrong:
            raise RuntimeError(f"mooncake answered {sorted(wrong)}")


if __name__ == "__main__":
    peer = MooncakePeer(sys.argv[1], sys.argv[2])
    paged = {name: getattr(peer, name) for name in dir(peer) if name.startswith("paged_")}
    serve({**peer.verbs, **paged})
    peer.leave()
    sys.stderr.flush()
    os._exit(0)  # its threads outlive an interpreter that ends
