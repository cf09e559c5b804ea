"""A connection to an engine, with its bytes fed by hand."""

from __future__ import annotations

import asyncio

import pytest

from router.deadlines import Deadlines
from router.upstream import StaleError, UpstreamConnection
from router.upstream_head import ResponseHead, UpstreamError

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


async def test_who_is_cancelled_when_all_came_leaves_the_connection_to_the_next() -> None:
    owner, wire = Owner(), Wire()
    connection = UpstreamConnection(owner, "http://engine", 60.0, 5.0)
    connection.connection_made(wire)
    asking = asyncio.ensure_future(connection.request(b"GET / HTTP/1.1\r\n\r\n"))
    await asyncio.sleep(0)
    connection.data_received(HEAD)
    head = await asking
    relaying = asyncio.ensure_future(connection.relay(head, head.body(), lambda _: None))
    await asyncio.sleep(0)
    connection.data_received(b"embers")
    assert owner.back == [connection]
    following = Asker()
    connection.send(b"GET / HTTP/1.1\r\n\r\n", following)
    relaying.cancel()  # before it ran again
    await asyncio.wait({relaying}, timeout=30)
    assert relaying.cancelled()
    connection.data_received(HEAD + b"embers")
    assert following.told == [200, b"embers", "ended"]
    assert not wire.is_aborted


class Asker:
    """A receiver that writes down what it is told, and takes the body over at once."""

    def __init__(self, *, leaves_at: bytes = b"") -> None:
        self.connection: UpstreamConnection | None = None
        self.told: list[object] = []
        self._leaves_at = leaves_at

    def answered(self, head: ResponseHead) -> None:
        self.told.append(head.status)
        assert self.connection is not None
        self.connection.follow(head, head.body(), self.piece)

    def piece(self, data: bytes) -> None:
        self.told.append(data)
        if data == self._leaves_at and self.connection is not None:
            self.connection.drop()

    def ended(self) -> None:
        self.told.append("ended")

    def failed(self, error: UpstreamError) -> None:
        self.told.append(type(error))


async def asked(asker: Asker) -> tuple[Owner, Wire, UpstreamConnection]:
    owner, wire = Owner(), Wire()
    connection = UpstreamConnection(owner, "http://engine", 60.0, 5.0)
    connection.connection_made(wire)
    connection.send(b"GET / HTTP/1.1\r\n\r\n", asker)
    return owner, wire, connection


async def test_a_receiver_is_told_of_head_body_and_end_and_the_connection_serves_the_next() -> None:
    asker = Asker()
    owner, wire, connection = await asked(asker)
    connection.data_received(HEAD[:9])
    connection.data_received(HEAD[9:] + b"em")
    connection.data_received(b"bers")
    assert asker.told == [200, b"em", b"bers", "ended"]
    assert owner.back == [connection]
    following = Asker()
    connection.send(b"GET / HTTP/1.1\r\n\r\n", following)
    connection.data_received(HEAD + b"embers")
    assert following.told == [200, b"embers", "ended"]
    assert not wire.is_aborted


@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_without_a_body_ends_with_its_head_whatever_that_says(status: int) -> None:
    asker = Asker()
    owner, _, connection = await asked(asker)
    connection.data_received(b"HTTP/1.1 %d Without\r\nTransfer-Encoding: chunked\r\n\r\n" % status)
    assert asker.told == [status, "ended"]
    assert owner.back == [], "an end of chunks may follow, which nobody wants to read as a head"


async def test_who_leaves_in_a_piece_is_told_nothing_more() -> None:
    asker = Asker(leaves_at=b"embers")  # the last piece of all
    owner, wire, connection = await asked(asker)
    connection.data_received(HEAD + b"embers")
    connection.data_received(b"more")
    connection.connection_lost(None)
    assert asker.told == [200, b"embers"]
    assert wire.is_aborted
    assert owner.back == []


async def test_a_pooled_connection_lost_before_a_byte_is_stale_and_later_a_failure() -> None:
    for came, is_stale in ((b"", True), (HEAD[:5], False)):
        asker = Asker()
        _, _, connection = await asked(asker)
        connection.is_reused = True
        connection.data_received(came)
        connection.connection_lost(None)
        assert (asker.told == [StaleError]) is is_stale
        assert len(asker.told) == 1
