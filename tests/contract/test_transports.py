"""What every transport promises. Guard bytes around each local range tell of stray writes."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec

import pytest

from client_sdk.transport.base import (
    Cancellation,
    ReadCancelledError,
    Segment,
    TransportAddress,
)
from emberkv_proto.errors import (
    DeadlineError,
    EmberError,
    FrameError,
    InvalidRequestError,
    LeaseExpiredError,
    StaleIncarnationError,
    UnavailableError,
)
from emberkv_proto.hashing import checksum
from emberkv_proto.types import Incarnation
from store_daemon.transport.base import Transport
from store_daemon.transport.tcp import TcpTransport
from store_daemon.transport.tcp_server import ServeLimits
from tests.helpers.anonymous_pool import AnonymousPool
from tests.helpers.serve_region import (
    KINDS,
    LEASE,
    ServingProcess,
    make_transport,
    needed_module,
    seeded_bytes,
    serving_process,
)

GUARD = 0x55
KIB, MIB = 1 << 10, 1 << 20
POOL = 8 * MIB
SEGMENTS = 16


@dataclass
class Pair:
    """An owner with seeded bytes, and a reader whose pool is all guard bytes."""

    owner: Transport
    reader: Transport
    owner_pool: AnonymousPool
    reader_pool: AnonymousPool
    address: TransportAddress
    leased: range

    def read(self, segments: list[Segment], deadline: float = 30.0, lease: int = LEASE) -> None:
        peer = self.reader.connect(self.address)
        try:
            self.reader.read(peer, lease, segments, deadline, Cancellation())
        finally:
            self.reader.close(peer)


@dataclass
class RemotePair:
    """A reader here, an owner in another process that sends a segment each `delay` seconds."""

    kind: str
    reader: Transport
    pool: AnonymousPool
    owner: ServingProcess
    address: TransportAddress
    segments: list[Segment]

    def in_mid_transfer(self, act: Callable[[], None]) -> threading.Thread:
        """Call `act` from a thread once the second segment has arrived."""
        second = self.segments[1]
        wanted = seeded_bytes(2, POOL)[second.remote_offset : second.remote_offset + second.length]

        def watch() -> None:
            deadline = time.monotonic() + 30.0
            place = slice(second.local_offset, second.local_offset + second.length)
            while self.pool.view[place] != wanted and time.monotonic() < deadline:
                time.sleep(0.005)
            act()

        thread = threading.Thread(target=watch)
        thread.start()
        return thread


@contextmanager
def remote_pair(kind: str, delay: float) -> Iterator[RemotePair]:
    """The owner checks each segment twice: it starts to send after SEGMENTS * delay seconds."""
    with AnonymousPool(POOL) as pool, serving_process(kind, 2, POOL, delay) as owner:
        pool.view[:] = bytes([GUARD]) * POOL
        reader = make_transport(kind, Incarnation(9), pool, progress_seconds=3.0)
        size = POOL // SEGMENTS
        order = range(SEGMENTS)
        segments = [Segment((SEGMENTS - 1 - i) * size + 64, i * size, size - 128) for i in order]
        try:
            yield RemotePair(kind, reader, pool, owner, owner.address, segments)
            reader.check_integrity()  # type: ignore[attr-defined]
        finally:
            reader.shutdown()


def needs_module_of(kind: str) -> None:
    module = needed_module(kind)
    if module is not None and find_spec(module) is None:
        extra = "ucp" if module == "ucxx" else "ucx"
        pytest.skip(f"{module} is not installed; `pip install 'emberkv[{extra}]'`")


@pytest.fixture(params=KINDS, scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    needs_module_of(request.param)
    return str(request.param)


@contextmanager
def running_pair(kind: str) -> Iterator[Pair]:
    with (
        AnonymousPool(POOL) as owner_pool,
        AnonymousPool(POOL) as reader_pool,
        ExitStack() as stack,
    ):
        owner_pool.view[:] = seeded_bytes(1, POOL)
        leased = range(MIB, 7 * MIB)

        def may_read(lease_id: int, offset: int, length: int) -> bool:
            return lease_id == LEASE and offset in leased and offset + length - 1 in leased

        owner = make_transport(kind, Incarnation(3), owner_pool)
        stack.callback(owner.shutdown)
        address = owner.serve(may_read)
        reader = make_transport(kind, Incarnation(9), reader_pool)
        stack.callback(reader.shutdown)
        yield Pair(owner, reader, owner_pool, reader_pool, address, leased)


@pytest.fixture(scope="module")
def lasting_pair(kind: str) -> Iterator[Pair]:
    with running_pair(kind) as pair:
        yield pair


@pytest.fixture
def pair(lasting_pair: Pair) -> Iterator[Pair]:
    """One pair for all tests that leave it as it was."""
    lasting_pair.reader_pool.view[:] = bytes([GUARD]) * POOL
    yield lasting_pair
    lasting_pair.owner.check_integrity()  # type: ignore[attr-defined]
    lasting_pair.reader.check_integrity()  # type: ignore[attr-defined]


@pytest.fixture
def passing_pair(kind: str) -> Iterator[Pair]:
    with running_pair(kind) as pair:
        yield pair
        pair.owner.check_integrity()  # type: ignore[attr-defined]
        pair.reader.check_integrity()  # type: ignore[attr-defined]


def assert_only_written(pool: AnonymousPool, segments: list[Segment], source: bytes) -> None:
    expected = bytearray([GUARD]) * len(pool.view)
    for s in segments:
        expected[s.local_offset : s.local_offset + s.length] = source[
            s.remote_offset : s.remote_offset + s.length
        ]
    is_as_expected = bool(pool.view == expected)  # of so many bytes pytest cannot show a diff
    assert is_as_expected


def test_scattered_ranges_arrive_byte_for_byte_and_nothing_else_changes(pair: Pair) -> None:
    segments = [
        Segment(5 * MIB, MIB, 1),
        Segment(4096, 3 * MIB + 17, MIB + 13),
        Segment(0, 2 * MIB, 4095),
        Segment(POOL - 3, 7 * MIB - 3, 3),
        Segment(6 * MIB, MIB, 300 * KIB),
    ]
    pair.read(segments)
    assert_only_written(pair.reader_pool, segments, bytes(pair.owner_pool.view))


def test_many_reads_share_a_peer_from_many_threads(pair: Pair) -> None:
    peer = pair.reader.connect(pair.address)
    segments = [Segment(i * 64 * KIB, MIB + i * 64 * KIB, 64 * KIB) for i in range(64)]
    errors: list[BaseException] = []

    def read_some(mine: list[Segment]) -> None:
        try:
            for segment in mine:
                pair.reader.read(peer, LEASE, [segment], 30.0, Cancellation())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read_some, args=(segments[n::8],)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pair.reader.close(peer)
    assert not errors
    assert_only_written(pair.reader_pool, segments, bytes(pair.owner_pool.view))


@pytest.mark.parametrize(
    ("lease", "offset", "length"),
    [(LEASE + 1, MIB, 10), (LEASE, MIB - 1, 10), (LEASE, 7 * MIB - 1, 2), (LEASE, 0, POOL)],
)
def test_read_outside_the_lease_is_refused_and_writes_nothing(
    pair: Pair, lease: int, offset: int, length: int
) -> None:
    with pytest.raises(LeaseExpiredError):
        pair.read([Segment(0, offset, length)], lease=lease)
    assert_only_written(pair.reader_pool, [], b"")
    pair.read([Segment(0, MIB, 10)])  # the owner serves on


def test_checksums_of_what_was_read_are_those_of_the_bytes_or_none(pair: Pair) -> None:
    segments = [Segment(0, MIB, 3), Segment(2 * MIB, 2 * MIB, MIB + 17)]
    peer = pair.reader.connect(pair.address)
    sums = pair.reader.read(peer, LEASE, segments, 20.0, Cancellation())
    pair.reader.close(peer)
    source = pair.owner_pool.view
    wanted = [checksum(source[s.remote_offset : s.remote_offset + s.length]) for s in segments]
    assert sums is None or list(sums) == wanted
    assert sums is not None or pair.reader.name != "tcp"


def test_reads_go_on_after_each_refused_one(pair: Pair) -> None:
    """A refusal ends the connection; the next one's introduction must outlive the last one's."""
    for number in range(12):
        with pytest.raises(LeaseExpiredError):
            pair.read([Segment(0, MIB, 10)], lease=LEASE + 1)
        pair.read([Segment(0, MIB + number, 10)])


def test_lease_that_ends_in_mid_answer_breaks_the_read(kind: str) -> None:
    asked = 0

    def may_read(lease_id: int, offset: int, length: int) -> bool:
        nonlocal asked
        asked += 1
        return asked <= 6  # four up front, two while sending

    with (
        AnonymousPool(POOL) as owner_pool,
        AnonymousPool(POOL) as reader_pool,
        ExitStack() as stack,
    ):
        owner = make_transport(kind, Incarnation(3), owner_pool)
        stack.callback(owner.shutdown)
        reader = make_transport(kind, Incarnation(4), reader_pool)
        stack.callback(reader.shutdown)
        peer = reader.connect(owner.serve(may_read))
        segments = [Segment(i * MIB, i * MIB, MIB) for i in range(4)]
        with pytest.raises(UnavailableError):
            reader.read(peer, LEASE, segments, 30.0, Cancellation())


@pytest.mark.parametrize(
    "segment",
    [
        Segment(-1, MIB, 10),
        Segment(0, -1, 10),
        Segment(0, MIB, 0),
        Segment(0, MIB, -5),
        Segment(POOL - 9, MIB, 10),
        Segment(0, MIB, 1 << 40),
    ],
)
def test_local_range_outside_the_pool_is_refused_before_any_io(
    pair: Pair, segment: Segment
) -> None:
    with pytest.raises(InvalidRequestError):
        pair.read([segment])
    assert_only_written(pair.reader_pool, [], b"")


def test_empty_and_oversize_lists_are_refused(pair: Pair) -> None:
    with pytest.raises(InvalidRequestError):
        pair.read([])
    with pytest.raises(InvalidRequestError):
        pair.read([Segment(0, MIB, 1)] * 100_000)


def test_remote_range_outside_the_owners_pool_is_refused(pair: Pair) -> None:
    for offset in (POOL, (1 << 63) - 1, (1 << 64) - 1):
        with pytest.raises((FrameError, LeaseExpiredError)):
            pair.read([Segment(0, offset, 10)])
    pair.read([Segment(0, MIB, 10)])


def test_other_incarnation_of_the_owner_is_refused(pair: Pair) -> None:
    stale = TransportAddress(
        pair.address.transport, pair.address.address, Incarnation(pair.address.incarnation - 1)
    )
    peer = pair.reader.connect(stale)
    with pytest.raises(StaleIncarnationError):
        pair.reader.read(peer, LEASE, [Segment(0, MIB, 10)], 30.0, Cancellation())


def test_owner_that_is_gone_fails_at_once(passing_pair: Pair) -> None:
    pair = passing_pair
    pair.read([Segment(0, MIB, 10)])
    peer = pair.reader.connect(pair.address)
    pair.reader.read(peer, LEASE, [Segment(0, MIB, 10)], 30.0, Cancellation())
    pair.owner.shutdown()
    started = time.monotonic()
    for _ in range(3):
        with pytest.raises(UnavailableError):
            pair.reader.read(peer, LEASE, [Segment(0, MIB, 10)], 30.0, Cancellation())
    assert time.monotonic() - started < 20.0


def test_closed_peer_and_shut_down_transport_refuse_reads(passing_pair: Pair) -> None:
    pair = passing_pair
    peer = pair.reader.connect(pair.address)
    pair.reader.close(peer)
    with pytest.raises(UnavailableError):
        pair.reader.read(peer, LEASE, [Segment(0, MIB, 10)], 30.0, Cancellation())
    other = pair.reader.connect(pair.address)
    pair.reader.shutdown()
    with pytest.raises(UnavailableError):
        pair.reader.read(other, LEASE, [Segment(0, MIB, 10)], 30.0, Cancellation())
    with pytest.raises(UnavailableError):
        pair.reader.connect(pair.address)


def test_cancelled_read_ends_at_once_and_later_ones_fail(kind: str) -> None:
    with remote_pair(kind, delay=0.05) as pair:
        cancellation = Cancellation()
        peer = pair.reader.connect(pair.address)
        watch = pair.in_mid_transfer(cancellation.cancel)
        with pytest.raises(UnavailableError):
            pair.reader.read(peer, LEASE, pair.segments, 30.0, cancellation)
        watch.join()
        assert_in_mid_transfer(pair)
        pair.pool.view[:] = bytes([GUARD]) * POOL
        with pytest.raises(ReadCancelledError):
            pair.reader.read(peer, LEASE, pair.segments, 30.0, cancellation)
        time.sleep(0.5)
        assert_only_written(pair.pool, [], b"")
        pair.reader.read(peer, LEASE, pair.segments[:2], 30.0, Cancellation())
        assert_only_written(pair.pool, pair.segments[:2], seeded_bytes(2, POOL))


def test_total_deadline_ends_a_read_that_makes_progress(kind: str) -> None:
    with remote_pair(kind, delay=0.05) as pair:
        peer = pair.reader.connect(pair.address)
        started = time.monotonic()
        with pytest.raises(DeadlineError):
            pair.reader.read(peer, LEASE, pair.segments, 1.2, Cancellation())
        assert time.monotonic() - started < 20.0


def test_killed_peer_in_mid_transfer_fails_the_read_at_once(kind: str) -> None:
    with remote_pair(kind, delay=0.05) as pair:
        peer = pair.reader.connect(pair.address)
        watch = pair.in_mid_transfer(pair.owner.kill)
        started = time.monotonic()
        with pytest.raises(UnavailableError):
            pair.reader.read(peer, LEASE, pair.segments, 30.0, Cancellation())
        assert time.monotonic() - started < 25.0  # far from the deadline
        watch.join()
        assert_in_mid_transfer(pair)


def test_stopped_peer_fails_the_read_and_writes_nothing_when_it_goes_on(kind: str) -> None:
    """The slots are reused right after the failed read; a late byte would show."""
    with remote_pair(kind, delay=0.05) as pair:
        peer = pair.reader.connect(pair.address)
        watch = pair.in_mid_transfer(pair.owner.stop)
        with pytest.raises(DeadlineError):
            pair.reader.read(peer, LEASE, pair.segments, 30.0, Cancellation())
        watch.join()
        assert_in_mid_transfer(pair)
        pair.pool.view[:] = bytes([GUARD]) * POOL
        pair.owner.go_on()
        time.sleep(1.0)
        assert_only_written(pair.pool, [], b"")
        pair.reader.read(peer, LEASE, pair.segments, 30.0, Cancellation())
        assert_only_written(pair.pool, pair.segments, seeded_bytes(2, POOL))


def assert_in_mid_transfer(pair: RemotePair) -> None:
    """Over CMA all bytes come in one call; there the owner's second look at the lease is last."""
    most = SEGMENTS if pair.kind == "ucx-read" else SEGMENTS - 1
    assert 0 < arrived_segments(pair) <= most


def arrived_segments(pair: RemotePair) -> int:
    source = seeded_bytes(2, POOL)
    return sum(
        pair.pool.view[s.local_offset : s.local_offset + s.length]
        == source[s.remote_offset : s.remote_offset + s.length]
        for s in pair.segments
    )


# ---- tcp alone: what a broken or hostile client can send ----

HELLO = struct.pack("<8sIIQ", b"EMBRTCP\0", 1, 0, 3)


def send_raw(address: TransportAddress, raw: bytes) -> bytes:
    host, _, port = address.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=90) as sock:
        answer = b""
        with suppress(OSError):  # it may hang up on us at any byte
            sock.sendall(raw)
            sock.shutdown(socket.SHUT_WR)
            while piece := sock.recv(65536):
                answer += piece
        return answer


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"",
        HELLO[:10],
        struct.pack("<8sIIQ", b"EMBRTCP\0", 99, 0, 3),
        struct.pack("<8sIIQ", b"EMBRTCP\0", 1, 77, 3),
        HELLO + b"x" * 24,
        HELLO + struct.pack("<8sQII", b"EMBRTCP\0", LEASE, 0, 0),
        HELLO + struct.pack("<8sQII", b"EMBRTCP\0", LEASE, 0xFFFFFFFF, 0),
        HELLO + struct.pack("<8sQII", b"EMBRTCP\0", LEASE, 2, 0) + b"z" * 16,
        HELLO + struct.pack("<8sQII", b"EMBRTCP\0", LEASE, 1, 0) + struct.pack("<QQ", MIB, 0),
        HELLO + struct.pack("<8sQII", b"EMBRTCP\0", LEASE, 1, 0) + b"\xff" * 16,
    ],
)
def test_tcp_malformed_frames_give_no_bytes_and_leave_the_owner_serving(
    pair: Pair, raw: bytes
) -> None:
    answer = send_raw(pair.address, raw)
    assert len(answer) <= 48  # a hello and a header, never payload
    pair.read([Segment(0, MIB, 10)])


def test_tcp_busy_owner_turns_further_readers_away() -> None:
    with AnonymousPool(MIB) as owner_pool, AnonymousPool(MIB) as reader_pool:
        owner = TcpTransport(Incarnation(3), serve_limits=ServeLimits(connections=1))
        reader = make_transport("tcp", Incarnation(4), reader_pool)
        owner.register(owner_pool.view)
        try:
            address = owner.serve(lambda lease, offset, length: True)
            first, second = reader.connect(address), reader.connect(address)
            reader.read(first, 1, [Segment(0, 0, 10)], 30.0, Cancellation())
            with pytest.raises(UnavailableError):
                reader.read(second, 1, [Segment(0, 0, 10)], 30.0, Cancellation())
            reader.close(first)
            deadline = time.monotonic() + 30
            while True:
                try:
                    reader.read(second, 1, [Segment(0, 0, 10)], 30.0, Cancellation())
                    break
                except EmberError:
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
        finally:
            reader.shutdown()
            owner.shutdown()


def test_tcp_idle_connection_the_owner_closed_is_replaced() -> None:
    with AnonymousPool(MIB) as owner_pool, AnonymousPool(MIB) as reader_pool:
        owner = TcpTransport(Incarnation(3), serve_limits=ServeLimits(idle_seconds=0.05))
        reader = make_transport("tcp", Incarnation(4), reader_pool)
        owner.register(owner_pool.view)
        try:
            peer = reader.connect(owner.serve(lambda lease, offset, length: True))
            for number in range(3):
                owner_pool.view[:10] = bytes([number + 1]) * 10
                reader.read(peer, 1, [Segment(0, 0, 10)], 30.0, Cancellation())
                assert bytes(reader_pool.view[:11]) == bytes([number + 1]) * 10 + b"\0"
                time.sleep(0.2)
        finally:
            reader.shutdown()
            owner.shutdown()
