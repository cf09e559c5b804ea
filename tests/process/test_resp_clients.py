"""Clients of Redis against a real daemon: redis-py, redis-benchmark, the bytes of LMCache's."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from client_sdk import SyncClient
from emberkv_proto.hashing import block_hashes
from emberkv_proto.layout import Group, GroupKind, Namespace
from tests.helpers.daemon_process import MIB, DaemonProcess
from tests.helpers.resp import TOKEN, request, value_of

pytestmark = pytest.mark.process
NEVER = Retry(NoBackoff(), 0)
SIZES = [0, 1, 4096, 100_000, MIB, 3 * MIB]


def open_daemon(directory: Path) -> DaemonProcess:
    token = directory / "token"
    token.touch(0o600)
    token.write_text(TOKEN)
    return DaemonProcess(
        directory,
        capacity_bytes=64 * MIB,
        extent_bytes=4 * MIB,
        ssd_bytes=256 * MIB,
        settings={
            "resp.socket_path": directory / "resp.sock",
            "resp.port": 0,
            "resp.token_file": token,
            "ssd.segment_bytes": 16 * MIB,
            "ssd.direct_io": False,
        },
    )


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """For tests that leave it as it is."""
    with open_daemon(tmp_path_factory.mktemp("resp")) as process:
        yield process


@pytest.fixture
def own_daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """For tests that end it."""
    with open_daemon(tmp_path) as process:
        yield process


def tcp_address(daemon: DaemonProcess) -> tuple[str, int]:
    until(lambda: (daemon.data_dir / "endpoints.json").exists())
    host, _, port = daemon.endpoints["resp_address"].rpartition(":")
    return host, int(port)


def connect(daemon: DaemonProcess, *, over_tcp: bool = False, **options: Any) -> redis.Redis:
    """A redis-py client; its defaults are what users have."""
    options = {"password": TOKEN, "socket_timeout": 20, **options}
    if over_tcp:
        return redis.Redis(*tcp_address(daemon), **options)
    return redis.Redis(unix_socket_path=os.fspath(daemon.directory / "resp.sock"), **options)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@pytest.mark.parametrize("over_tcp", [False, True])
@pytest.mark.parametrize("protocol", [2, 3])
def test_redis_py_stores_and_finds_values(
    daemon: DaemonProcess, over_tcp: bool, protocol: int
) -> None:
    with connect(daemon, over_tcp=over_tcp, protocol=protocol) as client:
        assert client.ping()
        for size in SIZES:
            assert client.set(f"k{size}", value_of(size, size)) is True
            assert client.get(f"k{size}") == value_of(size, size)
        assert client.exists(*(f"k{size}" for size in SIZES), "no") == len(SIZES)
        assert client.mget("k1", "no", f"k{MIB}") == [value_of(1, 1), None, value_of(MIB, MIB)]
        with client.pipeline(transaction=False) as pipeline:
            for size in SIZES:
                pipeline.set(f"p{size}", value_of(size, size))
            for size in SIZES:
                pipeline.get(f"p{size}")
            assert pipeline.execute() == [True] * len(SIZES) + [value_of(s, s) for s in SIZES]
        assert client.delete("k0", "k1", "no") == 2
        assert client.get("k1") is None
        assert client.info()["server_name"] == "emberkv"
        assert client.config_get("save") == {"save": ""}
        with pytest.raises(redis.ResponseError, match="unknown command"):
            client.flushall()
        with pytest.raises(redis.ResponseError, match="syntax error"):
            client.set("k", "v", ex=10)


def test_who_has_no_token_gets_nothing(daemon: DaemonProcess) -> None:
    for over_tcp in (False, True):
        for password in (None, "wrong"):
            with (
                connect(daemon, over_tcp=over_tcp, password=password, retry=NEVER) as client,
                pytest.raises(redis.AuthenticationError),
            ):
                client.get("k")
    assert daemon.metrics()['emberkv_store_resp_errors_total{kind="password"}'] >= 2


def test_values_outlive_the_kill_of_the_daemon(own_daemon: DaemonProcess) -> None:
    with connect(own_daemon) as client:
        for size in SIZES:
            client.set(f"k{size}", b"old")
            client.set(f"k{size}", value_of(size, size))
        client.set("gone", b"x")
        until(lambda: own_daemon.metrics()['emberkv_store_blocks{tier="ssd"}'] == len(SIZES) + 1)
        client.delete("gone")
    own_daemon.kill()
    own_daemon.start()
    with connect(own_daemon) as client:
        assert client.mget(*(f"k{s}" for s in SIZES)) == [value_of(s, s) for s in SIZES]
        assert client.get("gone") is None


@pytest.mark.timeout(180)
def test_what_is_deleted_while_its_copy_is_being_written_does_not_outlive_a_kill(
    tmp_path: Path,
) -> None:
    process = open_daemon(tmp_path)
    process.faults = "segment_sync=delay:0.5"  # the records are in the file by then
    with process as daemon:
        with connect(daemon) as client:
            client.set("kept", b"x")
            until(lambda: daemon.metrics()['emberkv_store_blocks{tier="ssd"}'] == 1)
            client.set("gone", value_of("gone", 3000))
            until(lambda: any(value_of("gone", 3000)[:64] in raw for raw in segments(daemon)))
            assert client.delete("gone") == 1
        daemon.kill()
        daemon.pool_path.unlink()
        daemon.faults = ""
        daemon.start()
        with connect(daemon) as client:
            assert client.mget("kept", "gone") == [b"x", None]


def segments(daemon: DaemonProcess) -> list[bytes]:
    """What is in the files of the SSD tier."""
    return [path.read_bytes() for path in (daemon.directory / "ssd").rglob("*") if path.is_file()]


def test_values_come_back_from_ssd_after_the_pool_is_lost(own_daemon: DaemonProcess) -> None:
    with connect(own_daemon) as client:
        for size in SIZES:
            client.set(f"k{size}", value_of(size, size))
        until(lambda: own_daemon.metrics()['emberkv_store_blocks{tier="ssd"}'] == len(SIZES))
        client.delete("k1")
    own_daemon.kill()
    own_daemon.pool_path.unlink()
    own_daemon.start()
    with connect(own_daemon) as client:
        found = client.mget(*(f"k{s}" for s in SIZES))
        assert found == [None if s == 1 else value_of(s, s) for s in SIZES]


def test_one_gibibyte_is_refused_and_takes_no_memory(daemon: DaemonProcess) -> None:
    def resident_kib() -> int:
        status = Path(f"/proc/{daemon.pid}/status").read_text().splitlines()
        return sum(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

    before = resident_kib()
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(20)
        link.connect(os.fspath(daemon.directory / "resp.sock"))
        link.sendall(request("AUTH", TOKEN))
        assert link.recv(100) == b"+OK\r\n"
        link.sendall(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1073741824\r\n")
        assert link.recv(100) == b"-ERR Protocol error: invalid bulk length\r\n"
        assert link.recv(100) == b""
    with connect(daemon) as client:
        with pytest.raises(redis.ResponseError, match="exceeds maximum allowed size"):
            client.set("k", bytes(100 * MIB))
        assert client.get("k") is None
    assert resident_kib() < before + 16 * 1024


def test_engines_and_redis_clients_share_a_daemon_and_see_nothing_of_each_other(
    daemon: DaemonProcess,
) -> None:
    namespace = Namespace("m", "w", "float16", "0" * 32, 4, (Group(GroupKind.FULL, 1, MIB),))
    with (
        SyncClient(daemon.socket_path, namespace, timeout_seconds=30.0) as engine,
        connect(daemon) as client,
    ):
        hashes = block_hashes(namespace.id, list(range(64)), 4)
        client.set("k", value_of("k", MIB))
        with engine.stage(hashes) as staged:
            for number in staged.granted:
                staged.view(number)[:] = value_of(number, MIB)
            staged.commit()
        assert engine.probe(hashes).hit_blocks == len(hashes)
        assert [client.get(block_hash) for block_hash in hashes] == [None] * len(hashes)
        assert client.get("k") == value_of("k", MIB)


LMCACHE_KEY = b"Qwen/Qwen3-8B@1@0@%032x@bfloat16"


def test_lmcaches_own_requests_are_answered(daemon: DaemonProcess) -> None:
    """The bytes that the native client of LMCache 0.5.6 writes: SET, GET, EXISTS, DEL, pipelined.

    It reads replies as `+OK`, `$<n>` with the value, `$-1` and `:<n>`, in RESP2, and sends AUTH
    with one word first.
    """
    keys = [LMCACHE_KEY % number for number in range(8)]
    values = [value_of(key, MIB // 2) for key in keys]
    with socket.create_connection(tcp_address(daemon), 20) as link, link.makefile("rb") as replies:
        link.sendall(request("AUTH", TOKEN))
        assert replies.readline() == b"+OK\r\n"
        for key, value in zip(keys, values, strict=True):
            link.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(value)))
            link.sendall(value)
            link.sendall(b"\r\n")
        assert [replies.readline() for _ in keys] == [b"+OK\r\n"] * len(keys)
        link.sendall(b"".join(request("EXISTS", key) for key in [*keys, b"no"]))
        assert [replies.readline() for _ in [*keys, b"no"]] == [b":1\r\n"] * len(keys) + [b":0\r\n"]
        link.sendall(b"".join(request("GET", key) for key in [*keys, b"no"]))
        for value in values:
            assert replies.readline() == b"$%d\r\n" % len(value)
            assert replies.read(len(value) + 2) == value + b"\r\n"
        assert replies.readline() == b"$-1\r\n"
        link.sendall(request("DEL", keys[0]))
        assert replies.readline() == b":1\r\n"


def benchmark_binary() -> str:
    found = shutil.which("redis-benchmark")
    if found is None:
        if os.environ.get("EMBERKV_REQUIRE_REDIS") == "1":
            pytest.fail("no redis-benchmark on the PATH (make redis-server installs one)")
        pytest.skip("no redis-benchmark on the PATH (make redis-server installs one)")
    return found


@pytest.mark.parametrize("options", [("-P", "16"), ("-d", "100000", "-n", "300"), ("-3",)])
def test_redis_benchmark_runs(daemon: DaemonProcess, options: tuple[str, ...]) -> None:
    host, port = tcp_address(daemon)
    before = daemon.metrics()["emberkv_store_resp_values_stored_total"]
    command = [
        *(benchmark_binary(), "-h", host, "-p", str(port), "-a", TOKEN, "-n", "3000", "-c", "8"),
        *("-t", "ping,set,get", "-r", "50", "--csv", *options),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert '"SET"' in done.stdout
    assert '"GET"' in done.stdout
    assert daemon.metrics()["emberkv_store_resp_values_stored_total"] >= before + 300


async def test_many_connections_at_once_get_their_own_bytes(daemon: DaemonProcess) -> None:
    async def work(number: int) -> None:
        path = os.fspath(daemon.directory / "resp.sock")
        async with redis.asyncio.Redis(unix_socket_path=path, password=TOKEN) as client:
            for turn in range(12):
                size = SIZES[1 + (turn + number) % 5]
                key, value = f"{number}-{turn % 3}", value_of((number, turn), size)
                try:
                    await client.set(key, value)
                except redis.exceptions.OutOfMemoryError:
                    continue  # all slots are held
                assert await client.get(key) in (value, None)

    await asyncio.gather(*(work(number) for number in range(16)))
    with daemon.operator() as operator:
        assert operator.check() == []
