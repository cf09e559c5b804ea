"""Sessions of engines on other hosts: the frames of the local socket, carried by a gRPC stream.

What the stream brings goes into one end of a socket pair, at whose other end sits the same
connection as for an engine on this node. So the stream is the session: its end frees what it lent.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from client_sdk import aio
from emberkv_proto.errors import DeadlineError, InvalidRequestError, UnavailableError
from emberkv_proto.v1 import store_pb2, store_pb2_grpc
from store_daemon.grpc_errors import Context, errors_answered

CHUNK_BYTES = 64 * 1024
WRITE_SECONDS = 20.0


class SessionDoor(Protocol):
    """Who takes the connections. Called on the event loop."""

    async def admit_remote(self, sock: socket.socket) -> None:
        """Serve a connected stream socket, which is the door's from now on."""
        ...


class SessionTunnel(store_pb2_grpc.SessionsServicer):
    """`door`: None where engines of other hosts are not taken."""

    def __init__(self, door: Callable[[], SessionDoor | None]) -> None:
        self._door = door

    async def Open(  # noqa: N802
        self, request_iterator: AsyncIterator[store_pb2.SessionBytes], context: Context
    ) -> None:
        async with errors_answered(context):
            door = self._door()
            if door is None:
                raise UnavailableError(
                    "this daemon takes no engines of other hosts: set transport.engine_agents"
                )
            ours, theirs = socket.socketpair()
            with ours:
                ours.setblocking(False)
                await door.admit_remote(theirs)
                await _carry(request_iterator, ours, context)


async def _carry(
    requests: AsyncIterator[store_pb2.SessionBytes], ours: socket.socket, context: Context
) -> None:
    loop = asyncio.get_running_loop()
    feeding = loop.create_task(_feed(requests, ours))
    try:
        while data := await loop.sock_recv(ours, CHUNK_BYTES):
            async with aio.timeout(WRITE_SECONDS):
                await context.write(store_pb2.SessionBytes(data=data))
    except asyncio.TimeoutError:
        raise DeadlineError(f"nothing was read for {WRITE_SECONDS} seconds") from None
    except ConnectionError:
        return  # our own side hung up
    finally:
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)


async def _feed(requests: AsyncIterator[store_pb2.SessionBytes], ours: socket.socket) -> None:
    """Ends with the engine's half of the stream, and with it the session."""
    loop = asyncio.get_running_loop()
    try:
        async for message in requests:
            if len(message.data) > CHUNK_BYTES:
                raise InvalidRequestError(f"a message of {len(message.data)} bytes in a session")
            await loop.sock_sendall(ours, message.data)
    finally:
        with contextlib.suppress(OSError):  # our own side may have hung up
            ours.shutdown(socket.SHUT_RDWR)
