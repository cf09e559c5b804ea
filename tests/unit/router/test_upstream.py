"""A connection to an engine, with its bytes fed by hand."""

from __future__ import annotations

import asyncio

from router.deadlines import Deadlines
from router.upstream import UpstreamConnection

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n"


class Owner:
    def __init__(self) -> None:
        self.back: list[UpstreamConnection] = []
        self.deadlines = Deadlines(asyncio.get_running_loop())

    def opened(self, connection: UpstreamConnection) -> None:
        pass

    def put(self, connection: UpstreamConnection) -> None:
        self.back.append(connection)

    def lost(self, connection: UpstreamConnection) -> None:
        pass


class Wire(asyncio.Transport):
    """Takes what is written; tells when it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.is_aborted = False

    def write(self, data: bytes) -> None:  # type: ignore[override]
        pass

    def abort(self) -> None:
        self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_aborted


async def test_a_body_that_comes_before_it_is_relayed_is_kept() -> None:
    owner, wire = Owner(), Wire()
    connection = UpstreamConnection(owner, "http://engine", 60.0, 5.0)
    connection.connection_made(wire)
    asking = asyncio.ensure_future(connection.request(b"GET / HTTP/1.1\r\n\r\n"))
    await asyncio.sleep(0)
    connection.data_received(HEAD + b"em")
    head = await asking
    connection.data_received(b"be")  # whoever asked has not run again yet
    pieces: list[bytes] = []
    relaying = asyncio.ensure_future(connection.relay(head, head.body(), pieces.append))
    await asyncio.sleep(0)
    connection.data_received(b"rs")
    await asyncio.wait_for(relaying, 30)
    assert b"".join(pieces) == b"embers"
    assert owner.back == [connection]
    connection.data_received(b"HTTP/1.1 200 OK\r\n")
    assert wire.is_aborted  # nobody asked
