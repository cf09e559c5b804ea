"""Put and get through a daemon beside plain memcpy, and round trips beside a bare unix echo."""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks._daemon import running_daemon
from benchmarks._figure import Figure, Options, main, medians_seconds
from benchmarks._round_trips import round_trips
from client_sdk import SyncClient
from emberkv_proto.hashing import block_hashes, checksum
from emberkv_proto.layout import Group, GroupKind, KvLayout, Namespace
from emberkv_proto.types import AcquirePolicy, BlockHash

MIB = 1 << 20
BATCH = 32
PART_BYTES = MIB
DRAM_BYTES = 256 * MIB
WARM_PUTS = 2 * DRAM_BYTES // (BATCH * PART_BYTES)
"""Until every page of the pool was touched through this process's mapping."""


def namespace_of(part_bytes: int, model: str) -> Namespace:
    layout = KvLayout("float32", 1, 1, 1).fingerprint
    return Namespace(model, "w", "float32", layout, 16, (Group(GroupKind.FULL, 1, part_bytes),))


def fresh_chain(namespace: Namespace, blocks: int) -> list[BlockHash]:
    tokens = np.frombuffer(os.urandom(4 * 16 * blocks), dtype=np.uint32)
    return block_hashes(namespace.id, tokens, 16)


def parts_of(buffer: npt.NDArray[np.uint8]) -> list[memoryview]:
    return [buffer[i * PART_BYTES : (i + 1) * PART_BYTES].data for i in range(BATCH)]


def measure(options: Options) -> Sequence[Figure]:
    trips = namespace_of(4096, "bench-round-trips")
    with running_daemon(DRAM_BYTES, 64 * MIB) as serving:
        return [
            *_copies(serving.socket_path, options),
            *round_trips(serving, trips, lambda blocks: fresh_chain(trips, blocks), options),
        ]


def _copies(path: Path, options: Options) -> Iterator[Figure]:
    namespace = namespace_of(PART_BYTES, "bench-copies")
    repeats = options.repeats(30, 10)
    source = np.frombuffer(os.urandom(BATCH * PART_BYTES), dtype=np.uint8)
    target = np.empty_like(source)
    source_parts, target_parts = parts_of(source), parts_of(target)
    sums = [checksum(part) for part in source_parts]
    scratch = np.empty_like(source)
    with SyncClient(path, namespace, timeout_seconds=10.0) as client:
        kept = fresh_chain(namespace, BATCH)

        def put_chain(chain: Sequence[BlockHash]) -> None:
            with client.stage(chain) as write:
                for i, part in enumerate(source_parts):
                    write.view(i)[:] = part
                write.commit(range(BATCH), sums)

        def get() -> None:
            with client.acquire(kept, policy=AcquirePolicy.BEST_EFFORT) as lease:
                for i, part in enumerate(target_parts):
                    part[:] = lease.view(i)

        def copy() -> None:
            np.copyto(scratch, source)

        places = itertools.cycle(_places_like_the_pool())

        def copy_walking() -> None:
            np.copyto(next(places), source)

        client.prefault(60.0)
        for _ in range(WARM_PUTS):
            put_chain(fresh_chain(namespace, BATCH))
        put_chain(kept)
        put, got, plain, walking = medians_seconds(
            [lambda: put_chain(fresh_chain(namespace, BATCH)), get, copy, copy_walking], repeats
        )
    gigabytes = BATCH * PART_BYTES / 1e9
    to_pool = "memcpy of the same bytes into shared memory of the pool's size, from place to place"
    warm = "memcpy of the same bytes into the same buffer each time"
    for name, seconds, reference, bare, at_least in (
        ("put_32x1MiB", put, to_pool, walking, 0.6),
        ("put_32x1MiB_beside_warm", put, warm, plain, 0.4),
        ("get_32x1MiB", got, warm, plain, 0.6),
    ):
        yield Figure(
            name,
            gigabytes / seconds,
            "GB/s, checksums brought along",
            reference,
            gigabytes / bare,
            repeats,
            at_least=at_least,
        )


def _places_like_the_pool() -> list[npt.NDArray[np.uint8]]:
    """Where a put could go if nobody kept books: memory as the pool's is, touched before."""
    descriptor = os.memfd_create("emberkv-bench")
    try:
        os.truncate(descriptor, DRAM_BYTES)
        pool = np.frombuffer(mmap.mmap(descriptor, DRAM_BYTES), dtype=np.uint8)
    finally:
        os.close(descriptor)
    pool[:] = 1
    step = BATCH * PART_BYTES
    return [pool[start : start + step] for start in range(0, DRAM_BYTES, step)]


if __name__ == "__main__":
    main("store", measure)
