"""A local session's byte stream, carried to a daemon on another host by a gRPC stream.

The client holds one end of a socket pair and notices nothing: when either side goes, so does that.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import grpc

from client_sdk.index_client import CHANNEL_OPTIONS
from client_sdk.tls import Tls, open_blocking_channel
from emberkv_proto.errors import UnavailableError
from emberkv_proto.v1 import store_pb2, store_pb2_grpc

_CHUNK_BYTES = 32 * 1024


def open_tunnel(address: str, tls: Tls | None, seconds: float) -> socket.socket:
    """A connected stream socket whose other end is the daemon at host:port.

    Raises UnavailableError when nobody answers there within `seconds`.
    """
    channel = open_blocking_channel(address, tls, CHANNEL_OPTIONS)
    try:
        grpc.channel_ready_future(channel).result(timeout=seconds)
    except grpc.FutureTimeoutError:
        channel.close()
        raise UnavailableError(
            f"no daemon answers at {address} within {seconds:g} s; is it daemon.grpc_port of a"
            " running store daemon, and does TLS agree on both sides?"
        ) from None
    except BaseException:
        channel.close()
        raise
    ours, theirs = socket.socketpair()
    thread = threading.Thread(
        target=_carry, args=(channel, theirs), name="emberkv-tunnel", daemon=True
    )
    thread.start()
    return ours


def _carry(channel: grpc.Channel, sock: socket.socket) -> None:
    """Until either side ends. gRPC runs the outgoing half in a thread of its own."""
    call: Any = None
    try:
        call = store_pb2_grpc.SessionsStub(channel).Open(_outgoing(sock, lambda: call.cancel()))  # type: ignore[no-untyped-call]
        for message in call:
            sock.sendall(message.data)
    except (grpc.RpcError, OSError):
        pass  # the session sees its socket close, and says so
    finally:
        with contextlib.suppress(OSError):  # our side may have closed already
            sock.shutdown(socket.SHUT_RDWR)
        channel.close()
        sock.close()


def _outgoing(sock: socket.socket, hang_up: Any) -> Iterator[store_pb2.SessionBytes]:
    with contextlib.suppress(OSError):
        while data := sock.recv(_CHUNK_BYTES):
            yield store_pb2.SessionBytes(data=data)
    hang_up()  # a daemon that is stopped would not end its half
