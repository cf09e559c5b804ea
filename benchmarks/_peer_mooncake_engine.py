"""Mooncake's Transfer Engine over TCP: `python -m benchmarks._peer_mooncake_engine`.

One process owns a buffer, another reads batches of it into its own; runs in the peer's venv.
"""

from __future__ import annotations

import hashlib
import os
import sys
from importlib import import_module
from typing import Any

import numpy as np

from benchmarks._workers import page_memory, serve, timed

BATCH = 32


class MooncakeEngine:
    def __init__(self) -> None:
        self._engine = import_module("mooncake.engine").TransferEngine()
        self._require(self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""))

    def prepare(self, block_bytes: int) -> dict[str, Any]:
        self._block_bytes = block_bytes
        self._memory = np.frombuffer(page_memory(BATCH * block_bytes), np.uint8)
        self._memory[:] = np.frombuffer(os.urandom(self._memory.nbytes), np.uint8)
        self._base = int(self._memory.ctypes.data)
        self._require(self._engine.register_memory(self._base, self._memory.nbytes))
        return {"session": f"127.0.0.1:{self._engine.get_rpc_port()}", "base": self._base}

    def read(self, session: str, base: int) -> dict[str, Any]:
        """A batch of blocks of the other process."""
        size = self._block_bytes
        starts = [i * size for i in range(BATCH)]
        ours = [self._base + start for start in starts]
        theirs = [base + start for start in starts]

        def work() -> None:
            self._require(
                self._engine.batch_transfer_sync_read(session, ours, theirs, [size] * BATCH)
            )

        return timed(self._memory.nbytes, work)

    def digest(self) -> str:
        return hashlib.sha256(self._memory.data).hexdigest()

    @staticmethod
    def _require(result: int) -> None:
        if result:
            raise RuntimeError(f"mooncake answered {result}")


if __name__ == "__main__":
    engine = MooncakeEngine()
    serve({name: getattr(engine, name) for name in ("prepare", "read", "digest")})
    sys.stderr.flush()
    os._exit(0)  # its threads outlive an interpreter that ends
