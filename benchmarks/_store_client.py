"""One client process of the store: puts, gets and paged copies, and plain memcpy in the same shape.

`python -m benchmarks._store_client SOCKET` takes the orders below, see `_workers`.
"""

from __future__ import annotations

import itertools
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks._figure import MIB
from benchmarks._workers import page_memory, serve, timed
from client_sdk import SyncClient, gather_from_pages, scatter_into_pages
from emberkv_proto.hashing import UNKNOWN_CHECKSUM, checksum
from emberkv_proto.layout import Group, GroupKind, KvLayout, Namespace
from emberkv_proto.types import AcquirePolicy, BlockHash

BATCH = 32
ROUND_BYTES = 128 * MIB
"""What one round of one client moves, so that it takes some tens of milliseconds."""
TIMEOUT_SECONDS = 20.0
PAGES, PAGE_TOKENS, HEADS, DIM, DTYPE_BYTES = 64, 16, 8, 128, 2
PAGE_BYTES = PAGE_TOKENS * HEADS * DIM * DTYPE_BYTES
"""Of keys or values, in one layer."""
Bytes = npt.NDArray[np.uint8]


def namespace_of(part_bytes: int, model: str) -> Namespace:
    layout = KvLayout("float32", 1, 1, 1).fingerprint
    return Namespace(model, "w", "float32", layout, 16, (Group(GroupKind.FULL, 1, part_bytes),))


def fresh_chain(blocks: int) -> list[BlockHash]:
    """Hashes nobody has used. To the store they are opaque; that of tokens is an engine's work."""
    packed = os.urandom(32 * blocks)
    return [BlockHash(packed[i : i + 32]) for i in range(0, len(packed), 32)]


def places(byte_count: int, block_bytes: int) -> list[list[memoryview]]:
    """Shared memory like a pool's, touched before, cut into batches of places for blocks."""
    descriptor = os.memfd_create("emberkv-bench")
    try:
        os.truncate(descriptor, byte_count)
        memory = memoryview(mmap.mmap(descriptor, byte_count))
    finally:
        os.close(descriptor)
    np.frombuffer(memory, np.uint8)[:] = 1
    blocks = [memory[i : i + block_bytes] for i in range(0, byte_count, block_bytes)]
    return [blocks[i : i + BATCH] for i in range(0, len(blocks) - BATCH + 1, BATCH)]


class StoreClient:
    """Contiguous blocks."""

    def __init__(self, socket_path: str) -> None:
        self._socket_path = socket_path
        self._client: SyncClient | None = None

    def prepare(self, block_bytes: int, kept_chains: int, region_bytes: int) -> None:
        """A round's blocks, all batches alike, a session for them, memory to compare with."""
        self.close()
        self._client = SyncClient(
            self._socket_path,
            namespace_of(block_bytes, f"bench-{block_bytes}"),
            timeout_seconds=TIMEOUT_SECONDS,
        )
        self._client.prefault(TIMEOUT_SECONDS)
        self._batch_bytes = BATCH * block_bytes
        self._source = np.frombuffer(page_memory(max(ROUND_BYTES, self._batch_bytes)), np.uint8)
        self._target = np.frombuffer(page_memory(self._source.nbytes), np.uint8)
        self._source.reshape(-1, self._batch_bytes)[:] = np.frombuffer(
            os.urandom(self._batch_bytes), np.uint8
        )
        self._target[:] = 0
        self._got_bytes = 0
        self._from, self._to = (
            [buffer[i : i + block_bytes].data for i in range(0, buffer.nbytes, block_bytes)]
            for buffer in (self._source, self._target)
        )
        self._sums = [checksum(part) for part in self._from]
        self._places = places(region_bytes, block_bytes)
        self._walk: Iterator[list[memoryview]] = itertools.cycle(self._places)
        self._kept: list[list[BlockHash]] = [fresh_chain(BATCH) for _ in range(kept_chains)]
        self._next_kept: Iterator[list[BlockHash]] = itertools.cycle(self._kept)

    def put(self, batches: int) -> dict[str, Any]:
        """A chain of so many batches out of one buffer; checksums are brought along."""
        return self._put(batches, self._sums[: batches * BATCH])

    def put_unsummed(self, batches: int) -> dict[str, Any]:
        """As `put`, and the daemon computes the checksums when it has time."""
        return self._put(batches, [UNKNOWN_CHECKSUM] * (batches * BATCH))

    def put_and_sum(self, batches: int) -> dict[str, Any]:
        """As `put`, and the SDK computes the checksums."""
        return self._put(batches, None)

    def keep(self) -> None:
        """Put what `get` will get."""
        for chain in self._kept:
            self._connected().put(chain, self._source[: self._batch_bytes])

    def get(self, batches: int) -> dict[str, Any]:
        """A chain of so many batches into one buffer."""
        client = self._connected()
        chain = [block for _ in range(batches) for block in next(self._next_kept)]
        self._got_bytes = batches * self._batch_bytes

        def work() -> None:
            got = client.get(chain, self._target[: batches * self._batch_bytes])
            if got != len(chain):
                raise AssertionError(f"the store gave {got} blocks of {len(chain)}")

        return timed(batches * self._batch_bytes, work)

    def check(self) -> None:
        """Raise unless what was got is what was put; forget it."""
        got = self._got_bytes
        if not got or not np.array_equal(self._source[:got], self._target[:got]):
            raise AssertionError("the store gave other bytes than it was given")
        self._target[:] = 0

    def copy_in(self, batches: int) -> dict[str, Any]:
        """Plain copies into memory like the pool's, from place to place as puts go."""
        starts = itertools.cycle(range(0, len(self._from), BATCH))
        return self._copy(
            batches,
            lambda: zip(
                next(self._walk), self._from[(at := next(starts)) : at + BATCH], strict=True
            ),
        )

    def copy_out(self, batches: int) -> dict[str, Any]:
        """Plain copies out of as many places as `get` takes turns with."""
        kept = itertools.cycle(self._places[: len(self._kept)])
        starts = itertools.cycle(range(0, len(self._to), BATCH))
        return self._copy(
            batches,
            lambda: zip(self._to[(at := next(starts)) : at + BATCH], next(kept), strict=True),
        )

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _connected(self) -> SyncClient:
        assert self._client is not None, "prepare comes first"
        return self._client

    def _put(self, batches: int, checksums: Sequence[int] | None) -> dict[str, Any]:
        client, chain = self._connected(), fresh_chain(batches * BATCH)
        source = self._source[: batches * self._batch_bytes]

        def work() -> None:
            if client.put(chain, source, checksums=checksums).committed_blocks != len(chain):
                raise AssertionError("the store did not take the whole chain")

        return timed(source.nbytes, work)

    def _copy(
        self, batches: int, pairs: Callable[[], zip[tuple[memoryview, memoryview]]]
    ) -> dict[str, Any]:
        def work() -> None:
            for _ in range(batches):
                for target, source in pairs():
                    target[:] = source

        return timed(batches * self._batch_bytes, work)


class PagedClient:
    """Scattered pages of a paged KV tensor, a tensor a layer, into the store and back."""

    def __init__(self, socket_path: str) -> None:
        self._socket_path = socket_path
        self._client: SyncClient | None = None

    def prepare(self, threads: int, layers: int) -> None:
        """A tensor of random pages for each layer, one of other pages, and a session."""
        self.close()
        self._block_bytes = layers * 2 * PAGE_BYTES
        namespace = namespace_of(self._block_bytes, f"bench-paged-{layers}")
        self._client = SyncClient(self._socket_path, namespace, timeout_seconds=TIMEOUT_SECONDS)
        self._client.prefault(TIMEOUT_SECONDS)
        self._threads = ThreadPoolExecutor(threads) if threads > 1 else None
        shape = (2, PAGES, PAGE_TOKENS, HEADS, DIM)
        self._random = np.random.default_rng(1)
        self._source, self._target = (
            [
                np.frombuffer(page_memory(2 * PAGES * PAGE_BYTES), np.uint16).reshape(shape)
                for _ in range(layers)
            ]
            for _ in range(2)
        )
        for layer, other in zip(self._source, self._target, strict=True):
            layer[:] = self._random.integers(0, 1 << 16, shape, np.uint16)
            other[:] = 1
        self._sums = [
            checksum(b"".join(layer[kv, page].tobytes() for layer in self._source for kv in (0, 1)))
            for page in range(PAGES)
        ]
        self._plain = places(BATCH * self._block_bytes, self._block_bytes)[0]
        staging = page_memory(BATCH * self._block_bytes)
        self._staging = np.frombuffer(staging, np.uint8).reshape(BATCH, -1)
        self._staging[:] = 1
        self._stored: list[BlockHash] = []
        self._pages: list[int] = []

    def store(self) -> dict[str, Any]:
        """One batch of scattered pages into the store."""
        assert self._client is not None, "prepare comes first"
        client = self._client
        self._pages = self._random.permutation(PAGES)[:BATCH].tolist()
        self._stored = fresh_chain(BATCH)
        sums = [self._sums[page] for page in self._pages]

        def work() -> None:
            with client.stage(self._stored) as write:
                views = [write.view(i) for i in range(BATCH)]
                gather_from_pages(self._source, self._pages, views, executor=self._threads)
                if write.commit(range(BATCH), sums) != BATCH:
                    raise AssertionError("the store did not take the whole batch")

        return timed(BATCH * self._block_bytes, work)

    def load(self) -> dict[str, Any]:
        """The last batch stored back into other pages, which are compared afterwards."""
        assert self._client is not None, "prepare comes first"
        client = self._client
        pages = self._random.permutation(PAGES)[:BATCH].tolist()

        def work() -> None:
            with client.acquire(self._stored, policy=AcquirePolicy.BEST_EFFORT) as lease:
                views = [lease.view(i) for i in range(BATCH)]
                scatter_into_pages(views, self._target, pages, executor=self._threads)
                lease.require_valid()

        taken = timed(BATCH * self._block_bytes, work)
        for source, target in zip(self._source, self._target, strict=True):
            if not np.array_equal(source[:, self._pages], target[:, pages]):
                raise AssertionError("other pages came back than went in")
            target[:, pages] = 1
        return taken

    def plain(self) -> dict[str, Any]:
        """As many contiguous bytes in and out again, without pages and without a store."""

        def work() -> None:
            for place, staged in zip(self._plain, self._staging, strict=True):
                place[:] = staged.data
            for place, staged in zip(self._plain, self._staging, strict=True):
                staged.data[:] = place

        return timed(2 * BATCH * self._block_bytes, work)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
            if self._threads is not None:
                self._threads.shutdown()


def main(socket_path: str) -> None:
    blocks, paged = StoreClient(socket_path), PagedClient(socket_path)
    try:
        serve(
            {
                "prepare": blocks.prepare,
                "put": blocks.put,
                "put_unsummed": blocks.put_unsummed,
                "put_and_sum": blocks.put_and_sum,
                "keep": blocks.keep,
                "get": blocks.get,
                "check": blocks.check,
                "copy_in": blocks.copy_in,
                "copy_out": blocks.copy_out,
                "close": blocks.close,
                "paged_prepare": paged.prepare,
                "paged_store": paged.store,
                "paged_load": paged.load,
                "paged_plain": paged.plain,
                "paged_close": paged.close,
            }
        )
    finally:
        blocks.close()
        paged.close()


if __name__ == "__main__":
    main(sys.argv[1])
