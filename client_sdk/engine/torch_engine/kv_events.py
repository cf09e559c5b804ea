"""What the prefix cache holds, published on ZMQ in vLLM's format: maps, sequence numbers, replay.

An engine block is called by the first 8 bytes of its hash, as an unsigned integer; who listens
takes that as opaque, as it does with any engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from emberkv_proto.types import BlockHash

REPLAYED = 10_000
"""Messages kept for those who missed them."""
_END = b"\xff" * 8


class CacheEvents:
    """Changes of the prefix cache in order, until they are taken to be published."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._events: list[dict[str, Any]] = []

    def stored(
        self, block: BlockHash, parent: BlockHash | None, tokens: Sequence[int], salt: bytes
    ) -> None:
        starts_salted = salt and parent is None
        keys = [salt.decode("utf-8", "surrogatepass")] if starts_salted else None
        self._events.append(
            {
                "type": "BlockStored",
                "block_hashes": [_name(block)],
                "parent_block_hash": None if parent is None else _name(parent),
                "token_ids": list(tokens),
                "block_size": self._block_tokens,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [keys],
            }
        )

    def removed(self, block: BlockHash) -> None:
        event = {"type": "BlockRemoved", "block_hashes": [_name(block)], "medium": "GPU"}
        self._events.append(event)

    def take(self) -> list[dict[str, Any]]:
        events, self._events = self._events, []
        return events


class EventPublisher:
    """PUB on one port, replays on another; 0 picks free ones. Belongs to one event loop."""

    def __init__(self, host: str, port: int) -> None:
        """Raises zmq.ZMQError when a port is taken."""
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=REPLAYED)
        self._next = 0
        try:
            self.port = _bind(self._pub, host, port)
            self.replay_port = _bind(self._replay, host, port + 1 if port else 0)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self._server = asyncio.create_task(self._serve())

    async def publish(self, events: Sequence[dict[str, Any]]) -> None:
        """Never waits for listeners: one that is too slow misses messages, and may ask for them."""
        seq, payload = (
            self._next.to_bytes(8, "big"),
            msgspec.msgpack.encode([time.time(), events, 0]),
        )
        self._next += 1
        self._sent.append((seq, payload))
        await self._pub.send_multipart([b"", seq, payload])

    async def close(self) -> None:
        self._server.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._server
        self._context.destroy(linger=0)

    async def _serve(self) -> None:
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue  # no request of ours
            for seq, payload in [*self._sent]:
                if seq >= frames[2]:
                    await self._replay.send_multipart([frames[0], b"", b"", seq, payload])
            await self._replay.send_multipart([frames[0], b"", b"", _END, b""])


def _bind(socket: zmq.asyncio.Socket, host: str, port: int) -> int:
    socket.setsockopt(zmq.IPV6, 1)
    shown = f"[{host}]" if ":" in host else host
    socket.bind(f"tcp://{shown}:{port or '*'}")
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return int(endpoint.rstrip(b"\0").rpartition(b":")[2])


def _name(block: BlockHash) -> int:
    return int.from_bytes(block[:8], "big")
