"""A stand-in for an engine's event publisher: real sockets, and faults on demand."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import msgspec
import zmq
import zmq.asyncio

SUBSCRIBE_SECONDS = 60.0
END = b"\xff" * 8


def stored(
    hashes: Sequence[Any], tokens: Sequence[int], parent: Any = None, **more: Any
) -> dict[str, Any]:
    """A BlockStored as vLLM publishes it."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": len(tokens) // len(hashes),
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **more,
    }


def removed(*hashes: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}


CLEARED = {"type": "AllBlocksCleared"}


class EventPublisher:
    """PUB and, if wanted, ROUTER on ports of their own, which a restart keeps.

    (XPUB, which is PUB to who listens, and tells of them.)
    """

    def __init__(self, *, has_replay: bool = True, buffered: int = 1000) -> None:
        self._context = zmq.asyncio.Context()
        self._has_replay = has_replay
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=buffered)
        self.next_seq = 0
        self.events_endpoint = self.replay_endpoint = ""
        self.replays: list[int] = []
        """From where each was asked."""
        self.is_mute = False
        """Replays are not answered."""
        self.is_old = False
        """Replays are answered without the topic, as before vLLM 0.26 and by SGLang."""
        self._pub: zmq.asyncio.Socket | None = None
        self._router: zmq.asyncio.Socket | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> EventPublisher:
        self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
        self._context.term()

    def open(self) -> None:
        self._pub = self._bound(zmq.XPUB, self.events_endpoint)
        self.events_endpoint = _endpoint(self._pub)
        if self._has_replay:
            self._router = self._bound(zmq.ROUTER, self.replay_endpoint)
            self.replay_endpoint = _endpoint(self._router)
            self._task = asyncio.create_task(self._serve(self._router))

    async def close(self) -> None:
        """Hang up on everybody."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        for socket in (self._pub, self._router):
            if socket is not None:
                socket.close(linger=0)
        self._pub = self._router = self._task = None

    async def restart(self) -> None:
        """Another life: nothing is remembered, numbers begin with 0."""
        await self.close()
        self.forget()
        self.open()

    async def subscribed(self) -> None:
        """Wait until somebody has subscribed in this life: without it a first message, which
        nobody asks for again where there is no replay, may be published to nobody."""
        assert self._pub is not None
        await asyncio.wait_for(self._pub.recv(), SUBSCRIBE_SECONDS)

    def forget(self) -> None:
        self.buffer.clear()
        self.next_seq = 0

    async def publish(self, *events: Mapping[str, Any] | Sequence[Any]) -> None:
        seq, payload = self._next(events)
        assert self._pub is not None
        await self._pub.send_multipart([b"kv@topic", seq.to_bytes(8, "big"), payload])

    def drop(self, *events: Mapping[str, Any] | Sequence[Any]) -> None:
        """Said, and lost on the way; a replay has it."""
        self._next(events)

    async def send_raw(self, *frames: bytes) -> None:
        assert self._pub is not None
        await self._pub.send_multipart(list(frames))

    def _next(self, events: Sequence[Any]) -> tuple[int, bytes]:
        payload = msgspec.msgpack.encode([time.time(), list(events), 0])
        seq = self.next_seq
        self.next_seq += 1
        self.buffer.append((seq, payload))
        return seq, payload

    async def _serve(self, router: zmq.asyncio.Socket) -> None:
        while True:
            client, _, first = await router.recv_multipart()
            self.replays.append(int.from_bytes(first, "big"))
            if self.is_mute:
                continue
            topic = [] if self.is_old else [b"kv@topic"]
            for seq, payload in [*self.buffer]:
                if seq >= self.replays[-1]:
                    number = seq.to_bytes(8, "big")
                    await router.send_multipart([client, b"", *topic, number, payload])
            await router.send_multipart([client, b"", *([] if self.is_old else [b""]), END, b""])

    def _bound(self, kind: int, endpoint: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        if not endpoint:
            socket.bind("tcp://127.0.0.1:*")
            return socket
        for _ in range(200):  # the port of a life before is free a moment later
            try:
                socket.bind(endpoint)
                break
            except zmq.ZMQError:
                time.sleep(0.02)
        return socket


def _endpoint(socket: zmq.asyncio.Socket) -> str:
    name = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(name, bytes)
    return name.rstrip(b"\0").decode()
