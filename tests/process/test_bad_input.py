"""Bad input from outside: a clear answer, the others served on, and nothing lost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from client_sdk import SyncClient
from client_sdk.aio import timeout
from client_sdk.status import NodeStatus
from emberkv_proto.errors import UnavailableError
from emberkv_proto.types import AcquirePolicy, BlockHash, StageState, Tier
from emberkv_proto.v1 import common_pb2, store_pb2, store_pb2_grpc
from emberkv_proto.wire import HEADER, METHODS, PROTOCOL, Method, pack_frame
from tests.helpers.daemon_process import MIB, ROOT, DaemonProcess
from tests.helpers.router_client import connected, http_post
from tests.helpers.store import chain, payload, small_namespace
from tests.process.test_router_process import router_process

pytestmark = pytest.mark.process
NAMESPACE = small_namespace()
PART_BYTES = 5000
HASHES = chain(NAMESPACE, 40)
BUFFERED = {"ssd.direct_io": False}  # tmpfs knows no O_DIRECT
Mount = Callable[[str, int], Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Makes small file systems; skips where that is not permitted."""
    mounted: list[Path] = []

    def make(name: str, size: int) -> Path:
        path = tmp_path / name
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "emberkv-test", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
        if done.returncode:
            pytest.skip(f"mount is not permitted here: {done.stderr.strip()}")
        mounted.append(path)
        return path

    yield make
    for path in mounted:
        subprocess.run(["umount", str(path)], timeout=90, check=True)


def put(daemon: DaemonProcess, hashes: Sequence[BlockHash]) -> int:
    with (
        SyncClient(daemon.socket_path, NAMESPACE, timeout_seconds=30.0) as client,
        client.stage(hashes) as staged,
    ):
        for number in staged.granted:
            staged.view(number)[:] = payload(hashes[number], 0, PART_BYTES)
        return staged.commit()


def readable(daemon: DaemonProcess, hashes: Sequence[BlockHash]) -> int:
    """How many of the blocks are there, each on its own; those that are must be byte-identical."""
    count = 0
    with SyncClient(daemon.socket_path, NAMESPACE, timeout_seconds=30.0) as client:
        for block_hash in hashes:
            with client.acquire(
                [block_hash], policy=AcquirePolicy.WAIT_COMPLETE, deadline_seconds=30
            ) as lease:
                if lease.wait(1, 30):
                    assert bytes(lease.view(0)) == payload(block_hash, 0, PART_BYTES)
                    count += 1
    return count


def status(daemon: DaemonProcess) -> NodeStatus:
    """What the daemon says of itself, after it found all its invariants to hold."""
    with daemon.operator() as operator:
        assert list(operator.check()) == []
        return operator.status()


def tier_state(daemon: DaemonProcess, tier: Tier) -> str:
    return next(found.state for found in status(daemon).tiers if found.tier is tier)


def blocks(daemon: DaemonProcess, tier: Tier) -> int:
    return next(found.blocks for found in status(daemon).tiers if found.tier is tier)


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.05)


def fill(path: Path) -> Path:
    """Take what is left of a file system."""
    hog = path / "somebody-elses"
    with hog.open("wb", buffering=0) as file:
        for size in (65536, 4096):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    return hog


# ---- at start ----


def test_a_file_system_too_small_for_the_pool_is_refused_with_the_numbers(
    tmp_path: Path, mount: Mount
) -> None:
    shm = mount("shm", MIB)
    daemon = DaemonProcess(tmp_path / "d", settings={"dram.path": shm / "pool"})
    line = daemon.refusal()
    assert "1 MiB free, dram.capacity_bytes asks 8 MiB" in line
    assert "lower it or raise the mount's size" in line
    assert list(shm.iterdir()) == []


def test_what_another_daemon_uses_is_refused_by_name_and_that_one_goes_on(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "first", ssd_bytes=8 * MIB) as first:
        assert put(first, HASHES) == 40
        for key, value, words in (
            ("daemon.data_dir", first.data_dir, f"pid {first.pid}; stop that one or set"),
            ("dram.path", first.pool_path, f"pid {first.pid}) uses the pool"),
            ("daemon.socket_path", first.socket_path, "stop it or set another"),
            ("ssd.path", first.directory / "ssd", f"pid {first.pid}; stop that one or set"),
        ):
            second = DaemonProcess(tmp_path / key, ssd_bytes=8 * MIB, settings={key: value})
            line = second.refusal()
            assert words in line
            assert key in line
            second.pool_path.unlink(missing_ok=True)
        assert readable(first, HASHES) == 40
        assert status(first).state == "serving"


def test_a_full_data_dir_is_refused_at_start_and_what_was_stored_comes_back_later(
    tmp_path: Path, mount: Mount
) -> None:
    data = mount("data", 2 * MIB)
    settings = {"daemon.data_dir": data, **BUFFERED}
    with DaemonProcess(tmp_path / "d", ssd_bytes=16 * MIB, settings=settings) as daemon:
        assert put(daemon, HASHES) == 40
        until(lambda: blocks(daemon, Tier.SSD) == 40)
        hog = fill(data)
        more = chain(NAMESPACE, 100, seed=1)
        assert put(daemon, more) == 100
        until(lambda: tier_state(daemon, Tier.SSD).startswith("degraded"))
        assert readable(daemon, [*HASHES, *more]) == 140
        newcomer = SyncClient(
            daemon.socket_path, small_namespace(model="new"), timeout_seconds=30.0
        )
        with newcomer as client, pytest.raises(UnavailableError, match="free space there"):
            client.probe(HASHES)
        assert "Traceback" not in daemon.log
        daemon.kill()
        line = daemon.refusal()
        assert "No space left on device" in line
        assert str(data) in line
        assert "daemon.data_dir" in line
        hog.unlink()
        daemon.start()
        assert readable(daemon, [*HASHES, *more]) == 140
        until(lambda: blocks(daemon, Tier.SSD) == 140)


# ---- the disk, while serving ----


def test_a_disk_that_fills_up_costs_the_copies_and_not_the_blocks(
    tmp_path: Path, mount: Mount
) -> None:
    ssd = mount("ssd", 4 * MIB)
    settings = {"ssd.path": ssd, **BUFFERED}
    with DaemonProcess(tmp_path / "d", ssd_bytes=4 * MIB, settings=settings) as daemon:
        assert put(daemon, HASHES) == 40
        until(lambda: blocks(daemon, Tier.SSD) == 40)
        hog = fill(ssd)
        more = chain(NAMESPACE, 400, seed=1)
        assert put(daemon, more) == 400
        until(lambda: tier_state(daemon, Tier.SSD).startswith("degraded"))
        assert "No space left on device" in tier_state(daemon, Tier.SSD)
        assert tier_state(daemon, Tier.DRAM) == "ok"
        until(lambda: status(daemon).counters["writeback_failed_blocks"] > 0)
        assert readable(daemon, [*HASHES, *more]) == 440
        hog.unlink()
        seeds = itertools.count(2)
        until(
            lambda: (
                put(daemon, chain(NAMESPACE, 1, seed=next(seeds))) == 1
                and tier_state(daemon, Tier.SSD) == "ok"
            )
        )
        assert readable(daemon, [*HASHES, *more]) == 440


def test_damage_in_a_segment_costs_the_damaged_block_only(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, ssd_bytes=8 * MIB, settings=BUFFERED) as daemon:
        assert put(daemon, HASHES) == 40
        until(lambda: blocks(daemon, Tier.SSD) == 40)
        daemon.kill()
        daemon.pool_path.unlink()
        segment = max((tmp_path / "ssd").iterdir(), key=lambda path: path.stat().st_size)
        with segment.open("r+b") as file:
            file.seek(200 * 1024)
            file.write(random.Random(1).randbytes(4096))
        daemon.start()
        assert readable(daemon, HASHES) == 39
        assert readable(daemon, HASHES) == 39
        assert status(daemon).counters["corrupt_blocks"] <= 1


@pytest.mark.parametrize("names", ["CURRENT", "*"])
def test_damage_in_the_local_index_costs_nothing(tmp_path: Path, names: str) -> None:
    with DaemonProcess(tmp_path, ssd_bytes=8 * MIB, settings=BUFFERED) as daemon:
        assert put(daemon, HASHES) == 40
        until(lambda: blocks(daemon, Tier.SSD) == 40)
        assert daemon.terminate() == 0
        daemon.pool_path.unlink()
        for path in (daemon.data_dir / "rocksdb").glob(names):
            path.write_bytes(random.Random(1).randbytes(path.stat().st_size))
        daemon.start()
        assert "local index was damaged" in daemon.log
        assert readable(daemon, HASHES) == 40


def test_rubbish_in_the_pool_file_costs_blocks_and_never_gives_wrong_bytes(
    tmp_path: Path,
) -> None:
    generator = random.Random(9)
    with DaemonProcess(tmp_path, capacity_bytes=2 * MIB, extent_bytes=65536) as daemon:
        for patches in (20, 2000):
            put(daemon, HASHES)
            assert readable(daemon, HASHES) == 40
            daemon.kill()
            with daemon.pool_path.open("r+b") as pool:
                size = daemon.pool_path.stat().st_size
                for _ in range(patches):
                    pool.seek(generator.randrange(size - 64))
                    pool.write(generator.randbytes(generator.randrange(1, 64)))
            daemon.start()
            readable(daemon, HASHES)
            assert status(daemon).state == "serving"


def test_a_pool_file_that_was_removed_by_hand_serves_on_until_the_end(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path) as daemon:
        put(daemon, HASHES[:20])
        daemon.pool_path.unlink()
        put(daemon, HASHES)
        assert readable(daemon, HASHES) == 40
        daemon.kill()
        daemon.start()
        assert readable(daemon, HASHES) == 0
        assert put(daemon, HASHES) == 40


# ---- clients of the daemon ----


HELLO = store_pb2.HelloRequest(protocol=PROTOCOL, namespace_json=NAMESPACE.to_json())


class RawClient:
    """A client that knows nothing but frames."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(30)
        self.sock.connect(str(path))

    def hello(self) -> RawClient:
        assert self.call(Method.HELLO, HELLO).part_bytes == PART_BYTES
        return self

    def call(self, method: Method, request: Any) -> Any:
        """The answer, or the error's detail."""
        self.sock.sendall(pack_frame(method, 1, request.SerializeToString()))
        return self.answer()

    def answer(self) -> Any:
        length, method, code, _ = HEADER.unpack(self._exactly(HEADER.size))
        body = self._exactly(length)
        if code:
            return common_pb2.ErrorDetail.FromString(body)
        return METHODS[Method(method)][1].FromString(body)

    def is_hung_up(self) -> bool:
        try:
            while self.sock.recv(65536):
                pass
        except ConnectionError:
            pass
        return True

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self.sock.recv(count - len(data))
            assert more, "hung up"
            data += more
        return data

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()


PROBE = store_pb2.ProbeRequest(hashes=b"".join(HASHES)).SerializeToString()
BROKEN_STREAMS = {
    "length of 4 GiB": HEADER.pack(2**32 - 1, Method.STAGE, 0, 1),
    "length over the limit": HEADER.pack(8 * MIB + 1, Method.PROBE, 0, 1) + bytes(100),
    "unknown method": HEADER.pack(0, 999, 0, 1),
    "an answer": HEADER.pack(0, Method.PROBE, 14, 1),
    "random bytes": random.Random(7).randbytes(5000),
    "a flood, then rubbish": pack_frame(Method.PROBE, 1, PROBE) * 200 + b"\xff" * 64,
}
WRONG_REQUESTS: list[tuple[Method, Any, str]] = [
    (Method.HELLO, store_pb2.HelloRequest(protocol=PROTOCOL), "InvalidRequestError"),
    (Method.STAGE, store_pb2.StageRequest(hashes=b"x" * 33), "InvalidRequestError"),
    (Method.STAGE, store_pb2.StageRequest(hashes=bytes(32 * 65537)), "InvalidRequestError"),
    (Method.STAGE, store_pb2.StageRequest(hashes=HASHES[0] * 2), "InvalidRequestError"),
    (
        Method.STAGE,
        store_pb2.StageRequest(hashes=HASHES[0], parent=HASHES[0]),
        "InvalidRequestError",
    ),
    (Method.COMMIT, store_pb2.CommitRequest(stage_id=2**64 - 1), "UnknownStageError"),
    (
        Method.COMMIT,
        store_pb2.CommitRequest(stage_id=1, hashes=HASHES[0], checksums=bytes(8)),
        "UnknownStageError",
    ),
    (Method.ABORT, store_pb2.AbortRequest(stage_id=1), "UnknownStageError"),
    (Method.RELEASE, store_pb2.ReleaseRequest(lease_ids=[1, 1]), "UnknownLeaseError"),
    (Method.WAIT, store_pb2.WaitRequest(lease_id=2**64 - 1), "UnknownLeaseError"),
    (
        Method.ACQUIRE,
        store_pb2.AcquireRequest(hashes=HASHES[0], deadline_seconds=float("nan")),
        "InvalidRequestError",
    ),
    (Method.PREFETCH, store_pb2.PrefetchRequest(deadline_seconds=-1.0), "InvalidRequestError"),
    (Method.PREFETCH, store_pb2.PrefetchRequest(source_node_id="n"), "InvalidRequestError"),
]


def test_hostile_clients_get_typed_errors_and_other_sessions_are_not_touched(
    tmp_path: Path,
) -> None:
    new = chain(NAMESPACE, 4, seed=1)
    with (
        DaemonProcess(tmp_path) as daemon,
        SyncClient(daemon.socket_path, NAMESPACE, timeout_seconds=30.0) as client,
    ):
        put(daemon, HASHES)
        with client.acquire(HASHES) as lease, client.stage(new) as staged:
            descriptors = len(os.listdir(f"/proc/{daemon.pid}/fd"))
            for name, raw in BROKEN_STREAMS.items():
                with RawClient(daemon.socket_path).hello() as hostile:
                    hostile.sock.sendall(raw)
                    assert hostile.is_hung_up(), name
            for _ in range(20):
                with RawClient(daemon.socket_path) as hasty:
                    hasty.sock.sendall(pack_frame(Method.HELLO, 1, HELLO.SerializeToString()))
            for method in Method:
                with RawClient(daemon.socket_path).hello() as hostile:
                    hostile.sock.sendall(HEADER.pack(5000, method, 0, 1) + bytes(100))
            with RawClient(daemon.socket_path).hello() as hostile:
                for method, request, wanted in WRONG_REQUESTS:
                    assert hostile.call(method, request).type == wanted, (method, request)
                assert hostile.call(Method.HEARTBEAT, store_pb2.HeartbeatRequest()) is not None
            for number in range(40):
                assert bytes(lease.view(number)) == payload(HASHES[number], 0, PART_BYTES)
            assert list(staged.granted) == [0, 1, 2, 3]
            for number in staged.granted:
                staged.view(number)[:] = payload(new[number], 0, PART_BYTES)
            assert staged.commit() == 4
            until(lambda: len(os.listdir(f"/proc/{daemon.pid}/fd")) <= descriptors)
        assert readable(daemon, [*HASHES, *new]) == 44
        assert status(daemon).staged_blocks == 0
        assert "Traceback" not in daemon.log


def test_forged_rings_of_parents_do_not_take_the_pool_for_ever(tmp_path: Path) -> None:
    generator = random.Random(3)
    with DaemonProcess(tmp_path, capacity_bytes=2 * MIB) as daemon:
        with RawClient(daemon.socket_path).hello() as hostile:
            for _ in range(400):
                one, two = generator.randbytes(32), generator.randbytes(32)
                for block_hash, parent in ((one, two), (two, one)):
                    answer = hostile.call(
                        Method.STAGE, store_pb2.StageRequest(hashes=block_hash, parent=parent)
                    )
                    assert answer.states == bytes([StageState.GRANTED])
                    hostile.call(
                        Method.COMMIT,
                        store_pb2.CommitRequest(
                            stage_id=answer.stage_id, hashes=block_hash, checksums=bytes(8)
                        ),
                    )
        for _ in range(2):
            assert put(daemon, HASHES) == 40
            assert readable(daemon, HASHES) == 40
            assert status(daemon).state == "serving"
            daemon.kill()
            daemon.start()
            assert readable(daemon, HASHES) == 40
            put(daemon, chain(NAMESPACE, 300, seed=4))  # and HASHES are evicted in their turn
            assert readable(daemon, HASHES) < 40


def test_a_stopped_client_loses_its_leases_in_time_and_then_there_is_room(tmp_path: Path) -> None:
    holder_code = (
        "import sys, time\n"
        "from tests.process.test_bad_input import *\n"
        "client = SyncClient(sys.argv[1], NAMESPACE, timeout_seconds=30.0)\n"
        "lease = client.acquire(chain(NAMESPACE, 1000, seed=1))\n"
        "print(lease.ready_blocks, flush=True)\n"
        "time.sleep(60)\n"
    )
    settings = {"daemon.lease_seconds": 4.0, "daemon.heartbeat_seconds": 0.2}
    with DaemonProcess(tmp_path, capacity_bytes=1 * MIB, settings=settings) as daemon:
        put(daemon, chain(NAMESPACE, 1000, seed=1))
        with subprocess.Popen(
            [sys.executable, "-c", holder_code, str(daemon.socket_path)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
        ) as holder:
            try:
                assert holder.stdout is not None
                assert int(holder.stdout.readline()) > 50
                assert put(daemon, HASHES) < 40
                holder.send_signal(signal.SIGSTOP)
                until(lambda: status(daemon).leases == 0)
                put(daemon, HASHES)
                assert readable(daemon, HASHES) == 40
            finally:
                holder.kill()


def test_sigterm_ends_it_in_time_with_sessions_leases_waits_and_half_frames(
    tmp_path: Path,
) -> None:
    with DaemonProcess(tmp_path, settings={"daemon.drain_seconds": 2.0}) as daemon:
        put(daemon, HASHES)
        with (
            RawClient(daemon.socket_path).hello() as waiting,
            RawClient(daemon.socket_path).hello() as half,
            RawClient(daemon.socket_path),
        ):
            lease = waiting.call(
                Method.ACQUIRE, store_pb2.AcquireRequest(hashes=b"".join(HASHES), policy=2)
            )
            wait = store_pb2.WaitRequest(
                lease_id=lease.lease_id, from_block=40, timeout_seconds=60
            ).SerializeToString()
            waiting.sock.sendall(pack_frame(Method.WAIT, 2, wait) * 300)
            half.sock.sendall(HEADER.pack(5000, Method.STAGE, 0, 1) + bytes(100))
            began = time.monotonic()
            assert daemon.terminate() == 0
            assert time.monotonic() - began < 30.0
        assert "Traceback" not in daemon.log
        daemon.start()
        assert readable(daemon, HASHES) == 40


def test_a_peer_that_asks_for_an_unknown_namespace_or_sends_rubbish_is_refused(
    tmp_path: Path,
) -> None:
    generator = random.Random(5)
    with DaemonProcess(tmp_path) as daemon:
        put(daemon, HASHES)
        for key in ("grpc_address", "transport_address", "metrics_address"):
            host, _, port = daemon.endpoints[key].rpartition(":")
            for size in (1, 24, 4000):
                with socket.create_connection((host, int(port)), 5) as sock:
                    sock.sendall(generator.randbytes(size))
        with grpc.insecure_channel(daemon.endpoints["grpc_address"]) as channel:
            stub: Any = store_pb2_grpc.PeerStub(channel)  # type: ignore[no-untyped-call]
            for changes, code in (
                ({"namespace_id": b"n" * 16}, grpc.StatusCode.NOT_FOUND),
                ({"namespace_id": b""}, grpc.StatusCode.INVALID_ARGUMENT),
                ({"hashes": HASHES[0] * 9}, grpc.StatusCode.INVALID_ARGUMENT),
                ({"hashes": bytes(32 * 65537)}, grpc.StatusCode.INVALID_ARGUMENT),
                ({"hashes": bytes(32 * MIB)}, grpc.StatusCode.RESOURCE_EXHAUSTED),
                ({"lease_seconds": -1.0}, grpc.StatusCode.INVALID_ARGUMENT),
            ):
                good = {
                    "namespace_id": NAMESPACE.id,
                    "hashes": b"".join(HASHES),
                    "lease_seconds": 5.0,
                    "requester": "node-b",
                }
                with pytest.raises(grpc.RpcError) as caught:
                    stub.Acquire(store_pb2.PeerAcquireRequest(**{**good, **changes}), timeout=90)
                assert caught.value.code() is code
            granted = stub.Acquire(store_pb2.PeerAcquireRequest(**good), timeout=90)
            assert granted.usable_blocks == 40
            stub.Release(store_pb2.PeerReleaseRequest(lease_id=granted.lease_id), timeout=90)
        assert readable(daemon, HASHES) == 40
        assert status(daemon).leases == 0


# ---- clients of the router and the engine ----

TINY = {
    "layers": 1,
    "d_model": 32,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 8,
    "ffn": 32,
    "num_blocks": 32,
    "block_tokens": 8,
    "max_model_len": 128,
    "max_batch_tokens": 64,
    "port": 0,
}
BAD_BODIES: list[tuple[bytes, int, str]] = [
    (b'{"prompt": [' + b"1," * 200 + b'1], "max_tokens": 1}', 400, "may have 128"),
    (b'{"prompt": [1, -1], "max_tokens": 1}', 400, "prompt"),
    (b'{"prompt": [99999999999999999999], "max_tokens": 1}', 400, "prompt"),
    (b'{"prompt": [1], "max_tokens": -1}', 400, "max_tokens"),
    (b'{"prompt": [1], "max_tokens": NaN}', 400, ""),
    (b'{"prompt": [1], "max_tokens": ' + b"9" * 5000 + b"}", 400, "JSON"),
    (b'{"prompt": "\\ud800", "max_tokens": 1}', 400, ""),
    (b'{"prompt": {"a": 1}, "max_tokens": 1}', 400, "prompt"),
    (b'{"prompt": ', 400, "JSON"),
    (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, 400, "JSON"),
    (b"\xff\xfe\x00", 400, "JSON"),
]


async def test_what_the_engine_cannot_serve_is_refused_through_the_router_and_good_goes_on(
    tmp_path: Path,
) -> None:
    endpoint, config = tmp_path / "engine.json", tmp_path / "engine.yaml"
    config.write_text(json.dumps({"engine": {**TINY, "endpoint_file": str(endpoint)}}))
    engine = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "client_sdk.engine.torch_engine", "--config", str(config)),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    try:
        async with timeout(120):
            while not endpoint.exists():
                assert engine.returncode is None, "the engine ended before it served"
                await asyncio.sleep(0.05)
        url = json.loads(endpoint.read_text())["url"]
        good = {"prompt": [1, 2, 3], "max_tokens": 4, "return_token_ids": True}
        async with (
            router_process(tmp_path, f"router.engines=[{{url: '{url}'}}]") as router,
            connected(router.port) as client,
        ):
            for body, wanted, words in BAD_BODIES:
                client.send(http_post("/v1/completions", body))
                got = await client.read()
                assert got.status == wanted, (body[:60], got.body)
                assert words in got.json["error"]["message"], body[:60]
            client.send(http_post("/v1/completions", good))
            got = await client.read()
            assert got.status == 200
            assert len(got.json["choices"][0]["token_ids"]) == 4
            client.send(
                b"POST /v1/completions HTTP/1.1\r\nContent-Length: 4\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /health HTTP/1.1\r\n\r\n"
            )
            assert (await client.read()).status == 400
            assert await client.is_closed(), "what follows such a head is not a request"
    finally:
        engine.terminate()
        await asyncio.wait_for(engine.wait(), 20)
        engine._transport.close()  # type: ignore[attr-defined]
