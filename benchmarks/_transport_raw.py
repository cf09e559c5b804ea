"""The raw transport: `python -m benchmarks._transport_raw KIND OWNER_GRPC_ADDRESS`.

Leases a batch at a daemon as another daemon does, and reads it into memory of its own with the same
transport: as many bytes a call, as many calls at once, without index, checksums and landing.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from benchmarks._store_client import BATCH, namespace_of
from benchmarks._workers import serve
from client_sdk.transport.base import Cancellation, Peer, Segment
from client_sdk.transport.ucx_settings import Rdma, UcxSettings
from emberkv_proto.types import BlockHash, Incarnation, NodeId
from store_daemon.peer_client import PeerClient, RemoteGrant
from store_daemon.peer_transfer import TransferLimits
from store_daemon.transport.base import Transport
from store_daemon.transport.tcp import TcpTransport
from store_daemon.transport.ucx import UcxTransport

LEASE_SECONDS = 30.0
READ_SECONDS = 20.0


class RawReader:
    def __init__(self, kind: str, owner: str) -> None:
        self._kind, self._owner = kind, owner

    def prepare(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._namespace = namespace_of(block_bytes, "bench-transport")
        size = BATCH * block_bytes
        descriptor = os.memfd_create("emberkv-bench")
        os.truncate(descriptor, size)
        self._region = mmap.mmap(descriptor, size)
        np.frombuffer(self._region, np.uint8)[:] = 1
        self._transport: Transport = (
            TcpTransport(Incarnation(1))
            if self._kind == "tcp"
            else UcxTransport(Incarnation(1), descriptor, settings=UcxSettings(Rdma.OFF))
        )
        self._transport.register(memoryview(self._region))
        limits = TransferLimits()
        self._step = limits.blocks_per_read(block_bytes)
        self._threads = ThreadPoolExecutor(limits.reads_in_flight)
        self._peer: Peer | None = None

    def read(self, hashes: list[str]) -> dict[str, Any]:
        return asyncio.run(self._read([BlockHash(bytes.fromhex(text)) for text in hashes]))

    def close(self) -> None:
        self._threads.shutdown()
        self._transport.shutdown()

    async def _read(self, chain: list[BlockHash]) -> dict[str, Any]:
        client = PeerClient(NodeId("bench-raw"))
        try:
            remote = await client.acquire(
                self._owner, self._namespace, chain, LEASE_SECONDS, READ_SECONDS
            )
            if remote.grant.usable_blocks != BATCH:
                raise AssertionError(f"the owner lends {remote.grant.usable_blocks} blocks")
            if self._peer is None:
                self._peer = self._transport.connect(remote.source)
            begun = time.monotonic()
            pieces = range(0, BATCH, self._step)
            for done in [self._threads.submit(self._read_piece, remote, at) for at in pieces]:
                done.result()
            ended = time.monotonic()
            await client.release(self._owner, remote.grant.lease_id, READ_SECONDS)
        finally:
            await client.close()
        return {"byte_count": len(self._region), "begun": begun, "ended": ended}

    def _read_piece(self, remote: RemoteGrant, first: int) -> None:
        assert self._peer is not None
        segments = [
            Segment(block * self._block_bytes, place.offset, place.length)
            for block in range(first, first + self._step)
            for place in remote.block_ranges(block)
        ]
        self._transport.read(
            self._peer, remote.grant.lease_id, segments, READ_SECONDS, Cancellation()
        )


if __name__ == "__main__":
    reader = RawReader(sys.argv[1], sys.argv[2])
    serve({name: getattr(reader, name) for name in ("prepare", "read", "close")})
