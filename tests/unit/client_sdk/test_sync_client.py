"""The blocking client against a small daemon that can be made to fail in every way."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from client_sdk import OperatorClient, Patience, SyncClient
from client_sdk.session import MAX_OWED_ANSWERS
from emberkv_proto.errors import (
    AccessDeniedError,
    ChecksumUnknownError,
    CorruptionError,
    DrainingError,
    InvalidRequestError,
    LayoutMismatchError,
    LeaseExpiredError,
    StaleIncarnationError,
    UnavailableError,
    UnknownLeaseError,
    UnknownStageError,
)
from emberkv_proto.layout import Group, GroupKind, Namespace
from emberkv_proto.types import AcquirePolicy, BlockHash, SaltId, Source, StageState, Tier
from emberkv_proto.v1 import store_pb2
from emberkv_proto.wire import HEADER, Method, pack_frame
from tests.helpers.fake_daemon import FakeDaemon

PART_BYTES = 1000
NAMESPACE = Namespace(
    model="m",
    weights_id="w",
    kv_dtype="float32",
    layout_fingerprint="f",
    block_tokens=16,
    groups=(Group(GroupKind.FULL, 2, PART_BYTES),),
)
HASHES = [BlockHash(bytes([i]) * 32) for i in range(1, 9)]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path / "d.sock") as daemon:
        yield daemon


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[SyncClient]:
    with SyncClient(daemon.socket_path, NAMESPACE, timeout_seconds=30.0) as client:
        yield client
        client.check_integrity()
    client.check_integrity()


@pytest.fixture
def hasty(daemon: FakeDaemon) -> Iterator[SyncClient]:
    """A client for daemons that fall silent."""
    with SyncClient(daemon.socket_path, NAMESPACE, timeout_seconds=2.0) as client:
        yield client
        client.check_integrity()
    client.check_integrity()


def store(client: SyncClient, hashes: list[BlockHash]) -> None:
    with client.stage(hashes) as staged:
        for i in staged.granted:
            staged.view(i)[:] = hashes[i][:1] * PART_BYTES
        staged.commit()
        staged.check_integrity()


def test_committed_blocks_are_leased_and_read_back_byte_identical(client: SyncClient) -> None:
    store(client, HASHES)
    with client.acquire(HASHES) as lease:
        lease.check_integrity()
        assert (lease.usable_blocks, lease.ready_blocks) == (8, 8)
        assert lease.sources == [Source.DRAM] * 8
        for i, block_hash in enumerate(HASHES):
            assert bytes(lease.view(i)) == block_hash[:1] * PART_BYTES
            assert lease.view(i).readonly
            lease.verify(i)
        assert lease.is_valid
    assert not lease.is_valid


def test_two_clients_share_bytes_and_see_only_what_is_committed(
    daemon: FakeDaemon, client: SyncClient
) -> None:
    with SyncClient(daemon.socket_path, NAMESPACE) as other:
        with client.stage(HASHES[:2]) as staged:
            assert other.stage(HASHES[:1]).states == [StageState.IN_PROGRESS]
            assert other.acquire(HASHES).usable_blocks == 0
            for i in staged.granted:
                staged.view(i)[:] = bytes(PART_BYTES)
            assert staged.commit([0]) == 1
            assert staged.granted == [1]
        assert other.probe(HASHES).hit_blocks == 1
        assert other.probe(HASHES).tiers[:2] == (frozenset({Tier.DRAM}), frozenset())
        assert other.stage(HASHES[:1]).states == [StageState.PRESENT]
    client.heartbeat()  # an abort is not waited for; what is called later comes after it
    assert len(daemon.aborted) == 1


def test_a_miss_is_an_empty_lease_that_needs_no_release(
    daemon: FakeDaemon, client: SyncClient
) -> None:
    with client.acquire(HASHES) as lease:
        assert (lease.usable_blocks, lease.ready_blocks, lease.sources) == (0, 0, [])
        assert lease.wait(1, 0.2) == 0
        with pytest.raises(UnknownLeaseError):
            lease.view(0)
    assert Method.RELEASE not in daemon.seen


def test_second_release_is_refused_and_views_end_with_the_first(
    daemon: FakeDaemon, client: SyncClient
) -> None:
    store(client, HASHES)
    lease = client.acquire(HASHES)
    lease.release()
    with pytest.raises(UnknownLeaseError):
        lease.release()
    with pytest.raises(UnknownLeaseError):
        lease.view(0)
    client.heartbeat()  # a release is not waited for; what is called later comes after it
    assert len(daemon.released) == 1


def test_release_does_not_wait_for_its_answer_and_a_refusal_is_counted_later(
    daemon: FakeDaemon, client: SyncClient
) -> None:
    store(client, HASHES)
    daemon.refuse[Method.RELEASE] = UnknownLeaseError("not held")
    client.acquire(HASHES).release()
    assert client.probe(HASHES).hit_blocks == len(HASHES)
    assert client.counters.errors == 1
    assert client.is_connected


def test_a_daemon_that_never_answers_releases_costs_one_timeout_and_the_session(
    daemon: FakeDaemon, hasty: SyncClient
) -> None:
    daemon.heartbeat_seconds = 60.0  # a heartbeat would find out too
    store(hasty, HASHES)
    leases = [hasty.acquire(HASHES) for _ in range(MAX_OWED_ANSWERS)]
    daemon.faults[Method.RELEASE] = lambda frame: None
    for lease in leases[:-1]:
        lease.release()
    session = hasty._session()
    leases[-1].release()
    assert not session.is_alive
    assert hasty.counters.errors == 1


def test_an_answer_to_a_release_that_nobody_told_ends_the_session(
    daemon: FakeDaemon, client: SyncClient
) -> None:
    store(client, HASHES)
    daemon.faults[Method.RELEASE] = lambda frame: frame + frame
    session = client._session()
    client.acquire(HASHES).release()
    with pytest.raises(UnavailableError):
        client.probe(HASHES)
    assert not session.is_alive


def test_many_releases_in_a_row_keep_their_answers_apart(
    daemon: FakeDaemon, client: SyncClient
) -> None:
    store(client, HASHES)
    for lease in [client.acquire(HASHES) for _ in range(3 * MAX_OWED_ANSWERS)]:
        lease.release()
    assert client.probe(HASHES).hit_blocks == len(HASHES)
    assert len(daemon.released) == 3 * MAX_OWED_ANSWERS
    client.check_integrity()


def test_wait_brings_blocks_one_after_the_other(daemon: FakeDaemon, client: SyncClient) -> None:
    store(client, HASHES)
    daemon.ready_at_once = 2
    with client.acquire(HASHES) as lease:
        assert lease.ready_blocks == 2
        with pytest.raises(InvalidRequestError):
            lease.view(2)
        assert lease.wait(4, 1.0) == 4
        assert lease.sources[1:5] == [Source.DRAM, Source.SSD, Source.SSD, Source.DRAM]
        assert lease.wait(99, 1.0) == 8
        assert lease.is_complete
        assert bytes(lease.view(7)) == HASHES[7][:1] * PART_BYTES
        lease.check_integrity()


def test_wait_ends_at_its_deadline_when_nothing_comes(
    daemon: FakeDaemon, client: SyncClient
) -> None:
    store(client, HASHES)
    daemon.ready_at_once = 2
    nothing = store_pb2.WaitResponse(usable_blocks=8, ready_blocks=2).SerializeToString()
    daemon.faults[Method.WAIT] = lambda frame: _with_payload(frame, nothing)
    with client.acquire(HASHES) as lease:
        began = time.monotonic()
        assert lease.wait(8, 0.2) == 2
        assert 0.2 <= time.monotonic() - began < 20.0


def test_a_lease_shrinks_when_a_block_cannot_be_brought(
    daemon: FakeDaemon, client: SyncClient
) -> None:
    store(client, HASHES)
    daemon.ready_at_once = 2
    shrunk = store_pb2.WaitResponse(usable_blocks=1, ready_blocks=1).SerializeToString()
    daemon.faults[Method.WAIT] = lambda frame: _with_payload(frame, shrunk)
    with client.acquire(HASHES) as lease:
        assert lease.wait(8, 1.0) == 1
        assert lease.usable_blocks == 1
        lease.check_integrity()


def test_blocks_outside_the_window_have_no_view(daemon: FakeDaemon, client: SyncClient) -> None:
    store(client, HASHES)
    daemon.ready_at_once = 0
    daemon.needed_from = 6
    whole = store_pb2.WaitResponse(
        usable_blocks=3,
        ready_blocks=3,
        offsets=struct.pack("<QQQ", 0, 0, 4096),
        checksums=bytes(24),
        sources=bytes([3] * 3),
        needed_from=2,
    ).SerializeToString()
    daemon.faults[Method.WAIT] = lambda frame: _with_payload(frame, whole)
    with client.acquire(HASHES) as lease:
        assert [lease.needs(i) for i in range(8)] == [False] * 6 + [True] * 2
        assert lease.wait(8, 1.0) == 3
        assert lease.needed_from == 2, "a shorter hit has another window"
        assert len(lease.view(2)) == PART_BYTES
        for read in (lease.view, lease.checksum, lease.verify):
            with pytest.raises(InvalidRequestError, match="outside the window"):
                read(1)
        lease.check_integrity()


def test_a_flipped_byte_is_found_by_verify(daemon: FakeDaemon, client: SyncClient) -> None:
    store(client, HASHES)
    daemon.flip_byte(HASHES[3])
    with client.acquire(HASHES) as lease:
        lease.verify(2)
        with pytest.raises(CorruptionError, match="block 3"):
            lease.verify(3)


def test_leaving_a_stage_without_commit_aborts_it(daemon: FakeDaemon, client: SyncClient) -> None:
    def fail_in_the_middle() -> None:
        with client.stage(HASHES) as staged:
            staged.view(0)[:1] = b"x"
            raise RuntimeError("engine's own trouble")

    with pytest.raises(RuntimeError):
        fail_in_the_middle()
    assert client.probe(HASHES).hit_blocks == 0  # answered after the abort, which nobody waits for
    assert len(daemon.aborted) == 1


def test_a_stage_says_whose_quota_its_blocks_count_against(
    daemon: FakeDaemon, client: SyncClient
) -> None:
    with client.stage(HASHES[:1]), client.stage(HASHES[1:2], HASHES[0], SaltId(b"t" * 16)):
        pass
    assert daemon.salt_ids == [b"", b"t" * 16]


def test_commit_after_abort_is_refused(client: SyncClient) -> None:
    staged = client.stage(HASHES[:2])
    staged.abort()
    staged.abort()
    assert staged.commit() == 0
    with pytest.raises(UnknownStageError):
        staged.view(0)
    with pytest.raises(InvalidRequestError):
        staged.commit([0])


def test_committed_block_can_be_neither_written_nor_committed_again(client: SyncClient) -> None:
    with client.stage(HASHES[:2]) as staged:
        staged.commit([0])
        with pytest.raises(InvalidRequestError):
            staged.view(0)
        with pytest.raises(InvalidRequestError):
            staged.commit([0])
        with pytest.raises(InvalidRequestError):
            staged.commit([1, 1])
        with pytest.raises(InvalidRequestError):
            staged.commit([1], checksums=[])


def test_full_pool_grants_a_part_and_says_so(daemon: FakeDaemon, client: SyncClient) -> None:
    hashes = [BlockHash(i.to_bytes(32, "big")) for i in range(1, daemon.slots + 3)]
    with client.stage(hashes) as staged:
        assert staged.states.count(StageState.GRANTED) == daemon.slots
        assert staged.states[-2:] == [StageState.NO_SPACE] * 2
        with pytest.raises(InvalidRequestError):
            staged.view(len(hashes) - 1)


def test_absent_daemon_is_named_with_the_fix_and_does_not_stop_construction(
    tmp_path: Path,
) -> None:
    path = tmp_path / "none.sock"
    with SyncClient(path, NAMESPACE) as client:
        assert not client.is_connected
        with pytest.raises(UnavailableError, match=r"none\.sock.*start the store daemon"):
            client.connect()
        with pytest.raises(UnavailableError, match="not connected"):
            _ = client.node_id


def test_socket_file_without_a_daemon_is_named(tmp_path: Path) -> None:
    path = tmp_path / "left.sock"
    with FakeDaemon(path):
        path.rename(tmp_path / "kept")
        path.touch()
    (tmp_path / "kept").rename(path)
    with (
        SyncClient(path, NAMESPACE) as client,
        pytest.raises(UnavailableError, match=r"nobody listens at .*left\.sock"),
    ):
        client.connect()


def test_too_long_socket_path_and_unknown_part_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="107"):
        SyncClient(tmp_path / ("x" * 120), NAMESPACE)
    with pytest.raises(InvalidRequestError, match="part 1"):
        SyncClient(tmp_path / "s", NAMESPACE, part=1)


def test_failed_attempts_are_held_back_without_blocking(tmp_path: Path) -> None:
    with SyncClient(tmp_path / "none.sock", NAMESPACE) as client:
        with pytest.raises(UnavailableError):
            client.probe(HASHES)
        held_back = 0
        for _ in range(200):
            with pytest.raises(UnavailableError) as caught:
                client.probe(HASHES)
            held_back += "next attempt in" in str(caught.value)
        assert held_back > 100, "each call tries to connect"
        assert client.counters.errors >= 201


def test_lost_session_fails_the_call_in_flight_and_the_next_one_reconnects(
    daemon: FakeDaemon, client: SyncClient
) -> None:
    store(client, HASHES)
    lease = client.acquire(HASHES)
    staged = client.stage([BlockHash(b"n" * 32)])
    view = lease.view(0)
    session = client._session()
    daemon.incarnation = 2
    daemon.faults[Method.PROBE] = lambda frame: daemon.hang_up()
    with pytest.raises(UnavailableError):
        client.probe(HASHES)
    daemon.faults.clear()
    assert not session.is_alive
    assert client.probe(HASHES).hit_blocks == 8
    assert (client.incarnation, client.counters.reconnects) == (2, 1)
    # What the old session lent is void, but its mapping lives as long as a view of it.
    assert not lease.is_valid
    with pytest.raises(StaleIncarnationError):
        lease.view(0)
    with pytest.raises(StaleIncarnationError):
        lease.wait(99, 0.1) if lease.ready_blocks < 8 else lease.verify(0)
    with pytest.raises(StaleIncarnationError):
        staged.view(0)
    with pytest.raises(StaleIncarnationError):
        staged.commit()
    assert bytes(view[:1]) == HASHES[0][:1]
    lease.release()
    staged.abort()
    assert not daemon.released


def test_silent_daemon_costs_the_timeout_and_closes_the_session(
    daemon: FakeDaemon, hasty: SyncClient
) -> None:
    hasty.connect()
    session = hasty._session()
    daemon.faults[Method.PROBE] = lambda frame: None
    began = time.monotonic()
    with pytest.raises(UnavailableError, match=r"did not answer PROBE within 2\.00 s"):
        hasty.probe(HASHES)
    assert 1.9 < time.monotonic() - began < 20.0
    assert not session.is_alive


def test_borrowed_slots_stay_held_until_a_slow_session_is_left(
    daemon: FakeDaemon, hasty: SyncClient
) -> None:
    """The daemon was only slow: it must not free what this process may still copy."""
    store(hasty, HASHES)
    lease = hasty.acquire(HASHES)
    session = lease._session
    daemon.faults[Method.PROBE] = lambda frame: None
    with pytest.raises(UnavailableError):
        hasty.probe(HASHES)
    assert session._sock.fileno() != -1
    lease.release()
    assert session._sock.fileno() == -1
    session.check_integrity()


def test_a_client_closed_in_mid_write_keeps_its_slots_until_the_write_is_left(
    daemon: FakeDaemon, client: SyncClient
) -> None:
    """The daemon gives them to others as soon as it sees the end."""
    store(client, HASHES[:2])
    lease, staged = client.acquire(HASHES[:2]), client.stage(HASHES[2:])
    session = staged._session
    client.close()
    assert not lease.is_valid
    assert not staged.is_valid
    assert session._sock.fileno() != -1
    with SyncClient(daemon.socket_path, NAMESPACE) as other:
        with other.stage(HASHES[2:]) as held:
            assert set(held.states) == {StageState.IN_PROGRESS}
        staged.abort()
        assert session._sock.fileno() == -1
    session.check_integrity()


def test_silent_daemon_at_the_handshake_costs_the_timeout(
    daemon: FakeDaemon, hasty: SyncClient
) -> None:
    daemon.faults[Method.HELLO] = lambda frame: None
    began = time.monotonic()
    with pytest.raises(UnavailableError, match="did not answer within"):
        hasty.connect()
    assert time.monotonic() - began < 20.0
    with pytest.raises(UnavailableError, match="next attempt"):
        hasty.probe(HASHES)


def test_lease_expires_by_the_local_clock_without_heartbeats(
    daemon: FakeDaemon, client: SyncClient
) -> None:
    daemon.lease_seconds, daemon.heartbeat_seconds = 3.0, 60.0
    store(client, HASHES)
    with client.acquire(HASHES) as lease:
        assert lease.is_valid
        time.sleep(3.1)
        assert not lease.is_valid
        with pytest.raises(LeaseExpiredError):
            lease.view(0)
        # A heartbeat that comes too late revives nothing.
        client.heartbeat()
        assert not lease.is_valid


def test_background_heartbeats_keep_a_lease_alive(daemon: FakeDaemon, client: SyncClient) -> None:
    daemon.lease_seconds, daemon.heartbeat_seconds = 3.0, 0.1
    store(client, HASHES)
    with client.acquire(HASHES) as lease:
        began = time.monotonic()
        while time.monotonic() - began < 3.5 or daemon.seen.count(Method.HEARTBEAT) < 5:
            assert lease.is_valid
            time.sleep(0.1)


def test_background_thread_reopens_a_lost_session(daemon: FakeDaemon, client: SyncClient) -> None:
    client.connect()
    daemon.hang_up()
    deadline = time.monotonic() + 30
    while client.counters.reconnects == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert client.is_connected


def test_close_ends_thread_session_and_later_calls(daemon: FakeDaemon) -> None:
    client = SyncClient(daemon.socket_path, NAMESPACE)
    store(client, HASHES)
    lease = client.acquire(HASHES)
    client.close()
    client.close()
    assert not any(thread.name == "emberkv-heartbeat" for thread in threading.enumerate())
    assert not lease.is_valid
    with pytest.raises(UnavailableError, match="closed"):
        client.probe(HASHES)
    client.check_integrity()


def test_dropped_lease_is_reported(client: SyncClient) -> None:
    store(client, HASHES)
    lease = client.acquire(HASHES)
    with pytest.warns(ResourceWarning, match="dropped, not released"):
        del lease


def test_what_the_daemon_refuses_comes_back_as_its_own_error(
    daemon: FakeDaemon, client: SyncClient
) -> None:
    daemon.refuse[Method.STAGE] = DrainingError("node is draining")
    with pytest.raises(DrainingError, match="node is draining"):
        client.stage(HASHES)
    assert client.is_connected, "a refusal is no lost session"
    assert client.counters.errors == 1


def test_refused_handshake_is_loud_in_connect_and_a_miss_in_calls(
    daemon: FakeDaemon, client: SyncClient
) -> None:
    daemon.refuse[Method.HELLO] = AccessDeniedError("uid 7 is not allowed")
    with pytest.raises(AccessDeniedError, match="uid 7"):
        client.connect()
    time.sleep(0.6)
    with pytest.raises(UnavailableError, match="uid 7"):
        client.probe(HASHES)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda h: setattr(h, "namespace_id", bytes(16)), LayoutMismatchError),
        (lambda h: setattr(h, "part_bytes", 999), LayoutMismatchError),
        (lambda h: setattr(h, "namespace_id", b"short"), InvalidRequestError),
        (lambda h: setattr(h, "pool_bytes", 1 << 40), UnavailableError),
        (lambda h: setattr(h, "pool_bytes", 0), UnavailableError),
        (lambda h: setattr(h, "heartbeat_seconds", 0.0), UnavailableError),
        (lambda h: setattr(h, "lease_seconds", float("nan")), UnavailableError),
    ],
)
def test_handshake_that_does_not_add_up_is_refused(
    daemon: FakeDaemon, client: SyncClient, change: object, wanted: type[Exception]
) -> None:
    daemon.hello = change  # type: ignore[assignment]
    with pytest.raises(wanted):
        client.connect()
    assert not client.is_connected


def test_handshake_without_a_descriptor_is_refused(daemon: FakeDaemon, client: SyncClient) -> None:
    daemon.send_descriptor = False
    with pytest.raises(UnavailableError, match="descriptor"):
        client.connect()


def _with_payload(frame: bytes, payload: bytes) -> bytes:
    _, method, status, request_id = HEADER.unpack(frame[: HEADER.size])
    return HEADER.pack(len(payload), method, status, request_id) + payload


@pytest.mark.parametrize(
    "fault",
    [
        lambda frame: b"\xff" * 64,
        lambda frame: frame + b"more",
        lambda frame: pack_frame(Method.PROBE, 77, frame[HEADER.size :]),
        lambda frame: HEADER.pack(0, 99, 0, 1),
        lambda frame: HEADER.pack(1 << 30, Method.PROBE, 0, 1) + bytes(100),
        lambda frame: _with_payload(frame, b"\xff\xff\xff"),
    ],
    ids=["noise", "too much", "other request", "unknown method", "oversize", "no message"],
)
def test_malformed_answer_ends_the_session_and_nothing_else(
    daemon: FakeDaemon, client: SyncClient, fault: object
) -> None:
    client.connect()
    session = client._session()
    daemon.faults[Method.PROBE] = fault  # type: ignore[assignment]
    with pytest.raises(UnavailableError):
        client.probe(HASHES)
    assert not session.is_alive
    daemon.faults.clear()
    assert client.probe(HASHES).hit_blocks == 0


def _grant(**changes: object) -> bytes:
    fields: dict[str, object] = {
        "lease_id": 9,
        "expires_in_seconds": 10.0,
        "usable_blocks": 1,
        "ready_blocks": 1,
        "offsets": bytes(8),
        "checksums": bytes(8),
        "sources": b"\x02",
    }
    return store_pb2.AcquireResponse(**{**fields, **changes}).SerializeToString()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "payload",
    [
        _grant(usable_blocks=9, sources=bytes([2] * 9)),
        _grant(ready_blocks=2, offsets=bytes(16), checksums=bytes(16)),
        _grant(offsets=bytes(7)),
        _grant(checksums=b""),
        _grant(sources=b""),
        _grant(sources=b"\x63"),
        _grant(offsets=struct.pack("<Q", 64 * 4096 - PART_BYTES + 1)),
        _grant(offsets=struct.pack("<Q", 2**64 - 1)),
        _grant(needed_from=2),
    ],
)
def test_lease_that_does_not_add_up_ends_the_session(
    daemon: FakeDaemon, client: SyncClient, payload: bytes
) -> None:
    client.connect()
    session = client._session()
    daemon.faults[Method.ACQUIRE] = lambda frame: _with_payload(frame, payload)
    with pytest.raises(UnavailableError):
        client.acquire(HASHES)
    assert not session.is_alive


@pytest.mark.parametrize(
    "answer",
    [
        store_pb2.StageResponse(stage_id=1, states=b"\0", offsets=bytes(8)),
        store_pb2.StageResponse(stage_id=1, states=b"\0\x09", offsets=bytes(16)),
        store_pb2.StageResponse(stage_id=0, states=b"\0\0", offsets=bytes(16)),
        store_pb2.StageResponse(stage_id=1, states=b"\1\1", offsets=bytes(16)),
        store_pb2.StageResponse(stage_id=1, states=b"\0\1", offsets=struct.pack("<QQ", 1 << 50, 0)),
    ],
)
def test_stage_that_does_not_add_up_ends_the_session(
    daemon: FakeDaemon, client: SyncClient, answer: store_pb2.StageResponse
) -> None:
    payload = answer.SerializeToString()
    client.connect()
    session = client._session()
    daemon.faults[Method.STAGE] = lambda frame: _with_payload(frame, payload)
    with pytest.raises(UnavailableError):
        client.stage(HASHES[:2])
    assert not session.is_alive


def test_callers_mistakes_are_refused_before_anything_is_sent(
    daemon: FakeDaemon, client: SyncClient
) -> None:
    client.connect()
    before = len([m for m in daemon.seen if m is not Method.HEARTBEAT])
    with pytest.raises(InvalidRequestError, match="32 bytes"):
        client.probe([BlockHash(b"short")])
    with pytest.raises(InvalidRequestError, match="65537"):
        client.probe([HASHES[0]] * 65537)
    with pytest.raises(InvalidRequestError, match="seconds"):
        client.acquire(HASHES, deadline_seconds=-1.0)
    with pytest.raises(InvalidRequestError, match="seconds"):
        client.prefetch(HASHES, float("inf"))
    assert len([m for m in daemon.seen if m is not Method.HEARTBEAT]) == before


def test_a_long_chain_travels_in_frames_larger_than_the_buffer(client: SyncClient) -> None:
    chain = [BlockHash(i.to_bytes(32, "big")) for i in range(65536)]
    assert len(client.probe(chain).tiers) == 65536


def test_threads_share_a_client(client: SyncClient) -> None:
    store(client, HASHES)
    wrong: list[str] = []

    def read() -> None:
        for _ in range(30):
            with client.acquire(HASHES) as lease:
                if bytes(lease.view(5)[:4]) != HASHES[5][:4]:
                    wrong.append("bytes")

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not wrong
    assert client.counters.errors == 0


def test_operator_asks_without_a_namespace(daemon: FakeDaemon) -> None:
    with OperatorClient(daemon.socket_path) as operator:
        assert operator.status().node_id == "fake"
        assert operator.status().counters == {"hits": 2.0}
        assert operator.check() == ["one"]
        operator.drain()
    assert daemon.seen[-1] is Method.DRAIN
    with pytest.raises(UnavailableError):
        OperatorClient(daemon.socket_path.with_name("other")).status()


def test_prefetch_and_status_pass_through(client: SyncClient) -> None:
    assert client.prefetch(HASHES, 1.0) == 8
    assert client.status().state == "serving"


def test_a_prefetch_can_be_cancelled_once(daemon: FakeDaemon, client: SyncClient) -> None:
    prefetch = client.start_prefetch(HASHES, 1.0)
    assert prefetch.scheduled_blocks == 8
    prefetch.cancel()
    prefetch.cancel()
    client.heartbeat()  # answers come in order: the cancellation was served before
    assert daemon.cancelled == daemon.prefetches


def test_cancelling_a_prefetch_of_a_daemon_that_is_away_is_no_error(
    daemon: FakeDaemon, client: SyncClient
) -> None:
    prefetch = client.start_prefetch(HASHES, 1.0)
    daemon.hang_up()
    prefetch.cancel()
    assert daemon.cancelled == []


def test_patience_sets_the_deadline_that_the_caller_does_not(
    daemon: FakeDaemon,
) -> None:
    patience = Patience(base_seconds=2.0, seconds_per_1024_tokens=8.0)
    with SyncClient(daemon.socket_path, NAMESPACE, patience=patience) as client:
        client.acquire(HASHES)  # 8 blocks of 16 tokens
        client.acquire(HASHES, deadline_seconds=0.25)
        client.acquire(HASHES, policy=AcquirePolicy.WAIT_COMPLETE)
    assert [request.deadline_seconds for request in daemon.acquired] == [3.0, 0.25, 0.0]


def test_a_block_without_a_checksum_can_be_read_but_never_passes_for_verified(
    client: SyncClient,
) -> None:
    with client.stage(HASHES[:2]) as staged:
        for i in staged.granted:
            staged.view(i)[:] = bytes(PART_BYTES)
        assert staged.commit_unsummed([0]) == 1
        assert staged.commit() == 1
    with client.acquire(HASHES[:2]) as lease:
        assert lease.view(0) == bytes(PART_BYTES)
        assert lease.checksum(0) is None
        with pytest.raises(ChecksumUnknownError, match="block 0"):
            lease.verify(0)
        lease.verify(1)
