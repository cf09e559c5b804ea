"""Sessions with a store daemon on another host, which lends slots but maps no pool."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass

from client_sdk.attached_pool import PoolShape
from client_sdk.session import (
    Session,
    finish_terms,
    hello_frame,
    missing_bytes,
)
from client_sdk.session_tunnel import open_tunnel
from client_sdk.tls import Tls
from client_sdk.transport.connections import split_host_port
from emberkv_proto import __version__
from emberkv_proto.convert import engine_to_wire
from emberkv_proto.errors import InvalidRequestError, UnavailableError
from emberkv_proto.layout import Namespace
from emberkv_proto.types import EngineInfo
from emberkv_proto.v1 import store_pb2
from emberkv_proto.wire import PROTOCOL

_READ_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class RemoteEndpoint:
    """Implements `session.SessionEndpoint` for host:port of a daemon's gRPC server."""

    address: str
    namespace: Namespace | None
    part: int = 0
    engine: EngineInfo | None = None
    client_name: str = ""
    tls: Tls | None = None

    @property
    def where(self) -> str:
        return self.address

    def hello(self) -> store_pb2.HelloRequest:
        return store_pb2.HelloRequest(
            protocol=PROTOCOL,
            client=self.client_name
            or f"emberkv {__version__} {socket.gethostname()}:{os.getpid()}",
            namespace_json=self.namespace.to_json() if self.namespace else "",
            part=self.part,
            engine=engine_to_wire(self.engine) if self.engine else None,
        )

    def check_path(self) -> None:
        split_host_port(self.address)

    def open(self, seconds: float) -> Session:
        """Connect and shake hands; every step within `seconds` in all.

        Raises:
            UnavailableError: no daemon there, it does not answer, or takes no remote engines.
            LayoutMismatchError, InvalidRequestError: the daemon refuses the namespace.
        """
        if self.namespace is None:
            raise InvalidRequestError("a session over the network needs a namespace")
        deadline = time.monotonic() + seconds
        sock = open_tunnel(self.address, self.tls, seconds)
        try:
            sock.settimeout(seconds)
            sock.sendall(hello_frame(self))
            received = b""
            while (missing := missing_bytes(received, len(received))) > 0:
                sock.settimeout(max(deadline - time.monotonic(), 1e-4))
                piece = sock.recv(min(missing, _READ_BYTES))
                if not piece:
                    raise UnavailableError(
                        f"the daemon at {self.address} ended the session before it began; does it"
                        " take engines of other hosts (transport.engine_agents)?"
                    )
                received += piece
            terms = finish_terms(self, received)
            if terms.transport is None:
                raise UnavailableError(f"the daemon at {self.address} names no transport")
            return Session(sock, terms, PoolShape(terms.pool_bytes, terms.part_bytes))
        except TimeoutError:
            sock.close()
            raise UnavailableError(
                f"the daemon at {self.address} did not answer within {seconds:g} s"
            ) from None
        except OSError as error:
            sock.close()
            raise UnavailableError(f"session with {self.address}: {error}") from None
        except BaseException:
            sock.close()
            raise
