"""A client of two daemons: `python -m benchmarks._transport_puller OWNER_SOCKET READER_SOCKET`.

Puts a batch at the owner's daemon and has the reader's pull it. Every batch is fresh, so each one
comes over the network, is verified and lands; waiting for it copies nothing.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np

from benchmarks._store_client import BATCH, TIMEOUT_SECONDS, fresh_chain, namespace_of
from benchmarks._workers import page_memory, serve, timed
from client_sdk import SyncClient
from emberkv_proto.types import BlockHash

KNOWN_SECONDS = 20.0
SETTLE_SECONDS = 0.2


class Puller:
    def __init__(self, owner_socket: str, reader_socket: str) -> None:
        self._sockets = owner_socket, reader_socket

    def prepare(self, block_bytes: int) -> None:
        namespace = namespace_of(block_bytes, "bench-transport")
        self._owner, self._reader = (
            SyncClient(socket, namespace, timeout_seconds=TIMEOUT_SECONDS)
            for socket in self._sockets
        )
        self._source = np.frombuffer(page_memory(BATCH * block_bytes), np.uint8)
        self._source[:] = np.frombuffer(os.urandom(self._source.nbytes), np.uint8)
        self._target = np.frombuffer(page_memory(self._source.nbytes), np.uint8)
        self._chain: list[BlockHash] = []

    def put(self) -> list[str]:
        """A fresh batch at the owner; its hashes, for whoever reads it another way."""
        self._chain = fresh_chain(BATCH)
        self._owner.put(self._chain, self._source)
        return [block.hex() for block in self._chain]

    def pull(self) -> dict[str, Any]:
        """Once the index knows of the batch: from the question to its last block.

        One of which the index knew only a part yet is not what is to be measured: take another.
        """
        deadline = time.monotonic() + KNOWN_SECONDS
        while True:
            time.sleep(SETTLE_SECONDS)
            taken = timed(self._source.nbytes, self._pull_once)
            if self._pulled == BATCH:
                return taken
            if time.monotonic() > deadline:
                raise AssertionError(f"{self._pulled} of {BATCH} blocks were pulled")
            if self._pulled:
                self.put()

    def check(self) -> None:
        """Raise unless what was pulled is what was put."""
        if self._reader.get(self._chain, self._target) != BATCH:
            raise AssertionError("what was pulled is gone")
        if not np.array_equal(self._source, self._target):
            raise AssertionError("other bytes were pulled than were put")

    def close(self) -> None:
        self._owner.close()
        self._reader.close()

    def _pull_once(self) -> None:
        lease = self._reader.acquire(self._chain)
        self._pulled = 0
        if lease is not None:
            with lease:
                self._pulled = lease.wait(BATCH, TIMEOUT_SECONDS)


if __name__ == "__main__":
    puller = Puller(sys.argv[1], sys.argv[2])
    serve({name: getattr(puller, name) for name in ("prepare", "put", "pull", "check", "close")})
