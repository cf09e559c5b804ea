"""A client of Redis over its unix socket: `python -m benchmarks._peer_redis SOCKET`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

import numpy as np

from benchmarks._peer_client import BlockPeer, Bytes
from benchmarks._workers import page_memory, serve


class RedisPeer(BlockPeer):
    """A pipeline of SETs, several times as fast as one MSET, and MGET; redis-py with hiredis."""

    def __init__(self, socket_path: str) -> None:
        super().__init__()
        self._redis = import_module("redis").Redis(unix_socket_path=socket_path, socket_timeout=60)

    def buffers(self, byte_count: int) -> tuple[Bytes, Bytes]:
        source, target = (np.frombuffer(page_memory(byte_count), np.uint8) for _ in range(2))
        return source, target

    def put_batch(self, keys: Sequence[str]) -> None:
        size = self.block_bytes
        pipeline = self._redis.pipeline(transaction=False)
        for i, key in enumerate(keys):
            pipeline.set(key, self.source[i * size : (i + 1) * size].tobytes())
        pipeline.execute()

    def get_batch(self, keys: Sequence[str]) -> None:
        size = self.block_bytes
        for i, value in enumerate(self._redis.mget(keys)):
            self.target[i * size : (i + 1) * size].data[:] = value

    def remove(self, keys: Sequence[str]) -> None:
        self._redis.delete(*keys)


if __name__ == "__main__":
    serve(RedisPeer(sys.argv[1]).verbs)
