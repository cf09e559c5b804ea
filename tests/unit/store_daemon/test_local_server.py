from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import pytest_asyncio
from google.protobuf.message import Message

from client_sdk.aio import timeout
from emberkv_proto.errors import ERROR_TYPES, IntegrityError, PreflightError
from emberkv_proto.hashing import checksum
from emberkv_proto.types import Incarnation, NodeId
from emberkv_proto.v1 import common_pb2, store_pb2
from emberkv_proto.wire import HEADER, MAX_FRAME_BYTES, METHODS, PROTOCOL, Method, pack_frame
from store_daemon import local_server
from store_daemon.config import DaemonSection
from store_daemon.local_server import LocalServer, remove_stale_socket
from store_daemon.servicer import NodeIdentity, Servicer
from tests.helpers.store import SmallStore, chain, payload, small_namespace

NAMESPACE = small_namespace()
HASHES = chain(NAMESPACE, 6)
PACKED = b"".join(HASHES)


class RawClient:
    """A client that knows nothing but frames."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.setblocking(False)
        self.sock.connect(str(path))
        self.fds: list[int] = []
        self._loop = asyncio.get_running_loop()
        self._buffer = b""

    async def send(self, raw: bytes) -> None:
        await asyncio.wait_for(self._loop.sock_sendall(self.sock, raw), 50)

    async def frame(self) -> tuple[Method, int, int, bytes]:
        """Method, status, request id and payload of the next answer."""
        while len(self._buffer) < HEADER.size or len(self._buffer) < self._wanted():
            chunk = await asyncio.wait_for(self._receive(), 30)
            if not chunk:
                raise EOFError
            self._buffer += chunk
        length, method, status, request_id = HEADER.unpack(self._buffer[: HEADER.size])
        body = self._buffer[HEADER.size : HEADER.size + length]
        self._buffer = self._buffer[HEADER.size + length :]
        return Method(method), status, request_id, body

    def _wanted(self) -> int:
        return HEADER.size + int(HEADER.unpack(self._buffer[: HEADER.size])[0])

    async def _receive(self) -> bytes:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self.sock, 65536, 4)
            except BlockingIOError:
                await asyncio.sleep(0.002)
                continue
            self.fds += fds
            return data

    async def call(self, method: Method, request: Message, request_id: int = 7) -> Message:
        """The answer, or the error the daemon sent."""
        await self.send(pack_frame(method, request_id, request.SerializeToString()))
        answered, status, answered_id, body = await self.frame()
        assert (answered, answered_id) == (method, request_id)
        if status:
            detail = common_pb2.ErrorDetail.FromString(body)
            raise ERROR_TYPES[detail.type](detail.message)
        return METHODS[method][1].FromString(body)

    async def hello(self, namespace_json: str = NAMESPACE.to_json()) -> store_pb2.HelloResponse:
        answer = await self.call(
            Method.HELLO,
            store_pb2.HelloRequest(protocol=PROTOCOL, client="raw", namespace_json=namespace_json),
        )
        assert isinstance(answer, store_pb2.HelloResponse)
        return answer

    async def is_hung_up(self) -> bool:
        try:
            while True:
                await self.frame()
        except (EOFError, ConnectionError):
            return True

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()
        self.sock.close()


@dataclass
class Served:
    small: SmallStore
    server: LocalServer
    path: Path
    clients: list[RawClient]

    def connect(self) -> RawClient:
        self.clients.append(RawClient(self.path))
        return self.clients[-1]


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    path = tmp_path / "s.sock"
    settings = DaemonSection(socket_path=path, data_dir=tmp_path / "data")
    small = SmallStore(tmp_path, settings=settings)
    servicer = Servicer(
        small.store,
        NodeIdentity(NodeId("node-1"), Incarnation(3)),
        settings,
        lambda: 0,
        lambda: None,
        lambda: None,
    )
    server = LocalServer(settings, servicer)
    await server.start()
    served = Served(small, server, path, [])
    yield served
    small.check_integrity()
    for client in served.clients:
        client.close()
    await server.close()
    assert not path.exists()
    assert small.store.sessions == {}
    await small.close()


async def sessions_left(served: Served, count: int) -> None:
    async with timeout(30):
        while len(served.small.store.sessions) > count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_block_goes_in_and_out_through_the_mapped_file(served: Served) -> None:
    client = served.connect()
    hello = await client.hello()
    assert (hello.node_id, hello.incarnation, hello.part_bytes) == ("node-1", 3, 5000)
    (pool_fd,) = client.fds
    assert os.fstat(pool_fd).st_size == hello.pool_bytes
    staged = await client.call(Method.STAGE, store_pb2.StageRequest(hashes=PACKED))
    assert isinstance(staged, store_pb2.StageResponse)
    sums = b""
    for number, block_hash in enumerate(HASHES):
        content = payload(block_hash, 0, 5000)
        at = int.from_bytes(staged.offsets[number * 8 : number * 8 + 8], "little")
        os.pwrite(pool_fd, content, at)
        sums += checksum(content).to_bytes(8, "little")
    committed = await client.call(
        Method.COMMIT,
        store_pb2.CommitRequest(stage_id=staged.stage_id, hashes=PACKED, checksums=sums),
    )
    assert committed == store_pb2.CommitResponse(committed_blocks=6)
    lease = await client.call(Method.ACQUIRE, store_pb2.AcquireRequest(hashes=PACKED))
    assert isinstance(lease, store_pb2.AcquireResponse)
    assert (lease.ready_blocks, lease.offsets, lease.checksums) == (6, staged.offsets, sums)
    waited = await client.call(
        Method.WAIT, store_pb2.WaitRequest(lease_id=lease.lease_id, from_block=4)
    )
    assert isinstance(waited, store_pb2.WaitResponse)
    assert waited.offsets == lease.offsets[32:]
    await client.call(Method.RELEASE, store_pb2.ReleaseRequest(lease_ids=[lease.lease_id]))


async def test_a_client_that_dies_gives_everything_back(served: Served) -> None:
    client = served.connect()
    await client.hello()
    await client.call(Method.STAGE, store_pb2.StageRequest(hashes=PACKED))
    client.close()
    await sessions_left(served, 0)
    assert served.small.store.holdings.pool.slots.used_bytes == 0


async def test_frames_may_arrive_in_any_pieces(served: Served) -> None:
    client = served.connect()
    hello = store_pb2.HelloRequest(protocol=PROTOCOL, namespace_json=NAMESPACE.to_json())
    beat = pack_frame(Method.HEARTBEAT, 8, b"")
    raw = pack_frame(Method.HELLO, 7, hello.SerializeToString()) + beat * 2
    for start in range(0, len(raw), 5):
        await client.send(raw[start : start + 5])
        await asyncio.sleep(0)
    assert [(await client.frame())[2] for _ in range(3)] == [7, 8, 8]


@pytest.mark.parametrize(
    "raw",
    [
        HEADER.pack(MAX_FRAME_BYTES + 1, Method.PROBE, 0, 9),
        HEADER.pack(0, 999, 0, 9),
        HEADER.pack(0, Method.PROBE, 5, 9),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["too long", "unknown method", "status in a request", "another protocol"],
)
async def test_a_broken_frame_is_answered_and_ends_the_session(served: Served, raw: bytes) -> None:
    client = served.connect()
    await client.hello()
    await client.send(raw)
    received = b""
    while chunk := await asyncio.wait_for(client._receive(), 30):
        received += chunk
    _, _, status, _ = HEADER.unpack(received[: HEADER.size])
    detail = common_pb2.ErrorDetail.FromString(received[HEADER.size :])
    assert (status, detail.type) == (3, "FrameError")


@pytest.mark.parametrize(
    ("method", "request_message", "error"),
    [
        (Method.PROBE, store_pb2.ProbeRequest(hashes=b"x" * 33), "InvalidRequestError"),
        (Method.STAGE, store_pb2.StageRequest(hashes=PACKED, parent=b"x"), "InvalidRequestError"),
        (Method.COMMIT, store_pb2.CommitRequest(stage_id=5, hashes=PACKED), "UnknownStageError"),
        (Method.ABORT, store_pb2.AbortRequest(stage_id=5), "UnknownStageError"),
        (Method.WAIT, store_pb2.WaitRequest(lease_id=5, timeout_seconds=1), "UnknownLeaseError"),
        (
            Method.WAIT,
            store_pb2.WaitRequest(lease_id=5, timeout_seconds=-1),
            "InvalidRequestError",
        ),
        (Method.RELEASE, store_pb2.ReleaseRequest(lease_ids=[5]), "UnknownLeaseError"),
        (
            Method.ACQUIRE,
            store_pb2.AcquireRequest(hashes=PACKED, deadline_seconds=float("inf")),
            "InvalidRequestError",
        ),
        (
            Method.ACQUIRE,
            store_pb2.AcquireRequest(hashes=PACKED, policy=9),  # type: ignore[arg-type]
            "InvalidRequestError",
        ),
        (Method.HELLO, store_pb2.HelloRequest(protocol=PROTOCOL), "InvalidRequestError"),
    ],
    ids=lambda value: value.name if isinstance(value, Method) else None,
)
async def test_a_wrong_request_is_answered_and_the_session_stays(
    served: Served, method: Method, request_message: Message, error: str
) -> None:
    client = served.connect()
    await client.hello()
    with pytest.raises(ERROR_TYPES[error]):
        await client.call(method, request_message)
    assert await client.call(Method.HEARTBEAT, store_pb2.HeartbeatRequest())


async def test_bytes_that_are_no_message_are_a_wrong_request(served: Served) -> None:
    client = served.connect()
    await client.hello()
    await client.send(pack_frame(Method.PROBE, 1, b"\xff\xff\xff"))
    _, status, _, body = await client.frame()
    assert (status, common_pb2.ErrorDetail.FromString(body).type) == (3, "InvalidRequestError")


async def test_an_operator_may_ask_but_not_store(served: Served) -> None:
    client = served.connect()
    await client.hello("")
    assert client.fds == []
    status = await client.call(Method.STATUS, store_pb2.StatusRequest())
    assert isinstance(status, store_pb2.StatusResponse)
    assert status.sessions == 1
    assert await client.call(Method.CHECK, store_pb2.CheckRequest()) == store_pb2.CheckResponse()
    with pytest.raises(ERROR_TYPES["InvalidRequestError"], match="operator"):
        await client.call(Method.STAGE, store_pb2.StageRequest(hashes=PACKED))


async def test_a_session_begins_with_a_good_hello_or_not_at_all(served: Served) -> None:
    for method, request_message in (
        (Method.PROBE, store_pb2.ProbeRequest()),
        (Method.HELLO, store_pb2.HelloRequest(protocol=99)),
        (Method.HELLO, store_pb2.HelloRequest(protocol=PROTOCOL, namespace_json="{}")),
    ):
        client = served.connect()
        with pytest.raises(tuple(ERROR_TYPES.values())):
            await client.call(method, request_message)
        assert await client.is_hung_up()


async def test_another_user_is_refused_by_uid(served: Served) -> None:
    with mock.patch.object(served.server, "admits", return_value=False):
        client = served.connect()
        with pytest.raises(ERROR_TYPES["AccessDeniedError"], match=f"uid {os.geteuid()}"):
            await client.hello()
        assert await client.is_hung_up()
    assert served.path.stat().st_mode & 0o777 == 0o600


async def test_a_client_that_does_not_read_is_cut_off_and_others_are_served(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_server, "UNREAD_SECONDS", 0.2)
    monkeypatch.setattr(local_server, "WRITE_BUFFER_BYTES", 4096)
    greedy, other = served.connect(), served.connect()
    await greedy.hello()
    await other.hello()
    many = b"".join(chain(NAMESPACE, 30_000))
    frame = pack_frame(Method.PROBE, 1, store_pb2.ProbeRequest(hashes=many).SerializeToString())
    with pytest.raises((ConnectionError, TimeoutError, asyncio.TimeoutError)):  # noqa: PT012
        for _ in range(200):
            await asyncio.wait_for(greedy.send(frame), 30)
            assert await other.call(Method.HEARTBEAT, store_pb2.HeartbeatRequest())
    await sessions_left(served, 1)


async def test_a_flood_of_calls_is_answered_in_order_and_leaves_turns_to_others(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_server, "TURN_SECONDS", 0.0)
    greedy, other = served.connect(), served.connect()
    await greedy.hello()
    await other.hello()
    checks = 0
    check = Servicer.check

    def counted(servicer: Servicer) -> store_pb2.CheckResponse:
        nonlocal checks
        checks += 1
        return check(servicer)

    monkeypatch.setattr(Servicer, "check", counted)
    await greedy.send(b"".join(pack_frame(Method.CHECK, number, b"") for number in range(3000)))
    await other.call(Method.HEARTBEAT, store_pb2.HeartbeatRequest())
    assert checks < 3000
    assert [(await greedy.frame())[2] for _ in range(3000)] == list(range(3000))


async def test_what_was_asked_while_answers_were_unread_is_answered_later(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_server, "WRITE_BUFFER_BYTES", 4096)
    client = served.connect()
    await client.hello()
    request = store_pb2.ProbeRequest(hashes=b"".join(chain(NAMESPACE, 1000))).SerializeToString()
    frames = [pack_frame(Method.PROBE, number, request) for number in range(600)]
    sending = asyncio.create_task(client.send(b"".join(frames)))
    await asyncio.sleep(0.2)
    assert not sending.done(), "the daemon reads on though nobody takes its answers"
    assert [(await client.frame())[2] for _ in frames] == list(range(600))
    await sending


@pytest.mark.timeout(400)
async def test_a_client_that_reads_a_little_of_its_last_answers_cannot_hold_up_the_end(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_server, "WRITE_BUFFER_BYTES", 1 << 22)
    client = served.connect()
    await client.hello()
    request = store_pb2.ProbeRequest(hashes=b"".join(chain(NAMESPACE, 60_000))).SerializeToString()
    frame = pack_frame(Method.PROBE, 1, request)
    sending = asyncio.create_task(client.send(frame * 100))
    (connection,) = served.server.connections
    async with timeout(60):
        while not connection._is_unread:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    closing = asyncio.create_task(served.server.close())
    async with timeout(60):
        while connection._is_unread:
            await client._receive()
    await asyncio.wait_for(closing, 20)
    with pytest.raises(ConnectionError):
        await sending


async def test_connections_that_say_nothing_are_limited(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_server, "MAX_CONNECTIONS", 3)
    clients = [served.connect() for _ in range(4)]
    assert await clients[3].is_hung_up()
    await clients[0].hello()


async def test_a_client_whose_hello_failed_is_cut_off_in_time(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_server, "HELLO_SECONDS", 0.2)
    client = served.connect()
    broken = mock.patch.object(Servicer, "open_session", side_effect=OSError("broken"))
    with broken, pytest.raises(IntegrityError):
        await client.hello()
    assert await client.is_hung_up()


async def test_a_silent_writer_is_cut_off(served: Served) -> None:
    client = served.connect()
    await client.hello()
    await client.call(Method.STAGE, store_pb2.StageRequest(hashes=PACKED))
    now = asyncio.get_running_loop().time()
    served.server.cut_silent(now)
    assert len(served.small.store.sessions) == 1
    served.server.cut_silent(now + 61)
    assert await client.is_hung_up()


def test_a_stale_socket_is_removed_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "s"
    remove_stale_socket(path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        with pytest.raises(PreflightError, match="listens on"):
            remove_stale_socket(path)
    remove_stale_socket(path)
    assert not path.exists()
    path.write_text("mine")
    with pytest.raises(PreflightError, match="not a socket"):
        remove_stale_socket(path)
    assert path.read_text() == "mine"
