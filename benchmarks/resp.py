"""`python -m benchmarks.resp`: the daemon's door for Redis clients beside Redis, in the same run.

One plain client drives both over unix sockets, a batch of values pipelined at a time: SETs out of
one buffer, GETs into one. What is got is compared with what was set, outside of the timed part.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks._daemon import cpu_seconds, running_daemon
from benchmarks._figure import (
    MIB,
    Figure,
    Line,
    NotAvailable,
    Options,
    main,
    median_values,
    size_name,
)
from client_sdk import SyncClient
from emberkv_proto.hashing import block_hashes
from emberkv_proto.layout import Group, GroupKind, Namespace
from emberkv_proto.types import BlockHash

SIZES = (4 << 10, 64 << 10, 256 << 10, MIB, 4 * MIB)
TARGET_FROM = 256 << 10
"""From this size on the door must keep up with Redis; shorter values are not what it is for."""
BATCH = 32
REPEATS, QUICK_REPEATS = 15, 5
PROBES = 300
START_SECONDS = 20.0


class PlainClient:
    """The least that speaks the protocol: pipelined SETs and GETs of equal lengths."""

    def __init__(self, path: Path) -> None:
        self._link = socket.socket(socket.AF_UNIX)
        self._link.settimeout(60)
        self._link.connect(os.fspath(path))

    def close(self) -> None:
        self._link.close()

    def set(self, keys: Sequence[bytes], source: memoryview) -> None:
        size = len(source) // len(keys)
        before = b""
        for number, key in enumerate(keys):
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, size)
            self._link.sendall(before + head)
            self._link.sendall(source[number * size : (number + 1) * size])
            before = b"\r\n"
        self._link.sendall(before)
        self._expect(b"+OK\r\n" * len(keys))

    def get(self, keys: Sequence[bytes], target: memoryview) -> None:
        size = len(target) // len(keys)
        asked = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key) for key in keys]
        self._link.sendall(b"".join(asked))
        after = b""
        for number in range(len(keys)):
            self._expect(after + b"$%d\r\n" % size)
            self._read(target[number * size : (number + 1) * size])
            after = b"\r\n"
        self._expect(after)

    def delete(self, keys: Sequence[bytes]) -> None:
        words = b"".join(b"$%d\r\n%b\r\n" % (len(key), key) for key in keys)
        self._link.sendall(b"*%d\r\n$3\r\nDEL\r\n%b" % (len(keys) + 1, words))
        self._expect(b":%d\r\n" % len(keys))

    def _expect(self, reply: bytes) -> None:
        found = bytearray(len(reply))
        self._read(memoryview(found))
        if found != reply:
            raise SystemExit(f"wanted {reply[:40]!r}, got {bytes(found[:80])!r}")

    def _read(self, target: memoryview) -> None:
        while target:
            count = self._link.recv_into(target)
            if not count:
                raise SystemExit("the server hung up")
            target = target[count:]


@dataclass(frozen=True, slots=True)
class Server:
    """One of the two."""

    client: PlainClient
    pid: int


def measure(options: Options) -> Iterator[Line]:
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        yield NotAvailable("resp_beside_redis", "no redis-server on the PATH")
        return
    repeats = options.repeats(REPEATS, QUICK_REPEATS)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="emberkv-resp-")))
        door_path, redis_path = directory / "door.sock", directory / "redis.sock"
        settings = {"resp.socket_path": door_path, "resp.dram_share": 1.0}
        daemon = stack.enter_context(running_daemon(1024 * MIB, 64 * MIB, settings=settings))
        redis_pid = stack.enter_context(_redis(program, redis_path))
        ours, theirs = (
            Server(stack.enter_context(_client(path)), pid)
            for path, pid in ((door_path, daemon.pid), (redis_path, redis_pid))
        )
        for size in SIZES:
            yield from _throughput(ours, theirs, size, repeats)
        yield from _beside_an_engine(daemon.socket_path, door_path, repeats)


def _throughput(ours: Server, theirs: Server, size: int, repeats: int) -> Iterator[Line]:
    keys = [b"bench-model@%08x@0@%032x" % (size, number) for number in range(BATCH)]
    source = memoryview(bytearray(os.urandom(size * BATCH)))
    target = memoryview(bytearray(size * BATCH))

    def setting(server: Server) -> float:
        server.client.delete(keys)
        return _rate(len(source), lambda: server.client.set(keys, source))

    def getting(server: Server) -> float:
        target[:] = bytes(len(target))
        rate = _rate(len(target), lambda: server.client.get(keys, target))
        if target != source:
            raise SystemExit("a value came back changed")
        return rate

    for server in (ours, theirs):
        server.client.set(keys, source)
    at_least = 1.0 if size >= TARGET_FROM else None
    for verb, run in (("set", setting), ("get", getting)):
        began = [cpu_seconds(server.pid) for server in (ours, theirs)]
        rates = median_values([lambda: run(ours), lambda: run(theirs)], repeats)  # noqa: B023
        cpu = [cpu_seconds(s.pid) - b for s, b in zip((ours, theirs), began, strict=True)]
        name = f"resp_{verb}_{BATCH}x{size_name(size)}"
        yield Figure(name, rates[0], "GB/s", "redis", rates[1], repeats, at_least=at_least)
        gigabytes = repeats * len(source) / 1e9
        yield Figure(
            f"{name}_server_cpu",
            cpu[0] / gigabytes,
            "s/GB",
            "redis",
            max(cpu[1] / gigabytes, 1e-9),
            repeats,
        )
    for server in (ours, theirs):
        server.client.delete(keys)


def _beside_an_engine(socket_path: Path, door_path: Path, repeats: int) -> Iterator[Line]:
    """How long an engine waits for an answer while a client fills and empties the door."""
    namespace = Namespace("m", "w", "float16", "0" * 32, 16, (Group(GroupKind.FULL, 1, 4096),))
    hashes = block_hashes(namespace.id, list(range(16 * 128)), 16)
    source = memoryview(bytearray(os.urandom(MIB * BATCH)))
    target = memoryview(bytearray(MIB * BATCH))
    keys = [b"beside-%d" % number for number in range(BATCH)]
    is_over = threading.Event()

    def load() -> None:
        with _client(door_path) as client:
            while not is_over.is_set():
                client.set(keys, source)
                client.get(keys, target)

    with SyncClient(socket_path, namespace) as engine:
        engine.probe(hashes)
        quiet = _probe_seconds(engine, hashes)
        loader = threading.Thread(target=load)
        loader.start()
        try:
            time.sleep(0.2)
            loaded = _probe_seconds(engine, hashes)
        finally:
            is_over.set()
            loader.join()
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        number = int(share * (PROBES - 1))
        yield Figure(
            f"probe_128_{name}_while_the_door_is_busy",
            1e3 * loaded[number],
            "ms",
            "the same while it is idle",
            1e3 * quiet[number],
            PROBES,
        )


def _probe_seconds(engine: SyncClient, hashes: Sequence[BlockHash]) -> list[float]:
    taken = []
    for _ in range(PROBES):
        began = time.perf_counter()
        engine.probe(hashes)
        taken.append(time.perf_counter() - began)
    return sorted(taken)


def _rate(byte_count: int, run: Callable[[], object]) -> float:
    """GB/s."""
    began = time.perf_counter()
    run()
    return byte_count / (time.perf_counter() - began) / 1e9


@contextmanager
def _client(path: Path) -> Iterator[PlainClient]:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            client = PlainClient(path)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise SystemExit(f"{path} cannot be connected to: {error}") from None
            time.sleep(0.05)
    try:
        yield client
    finally:
        client.close()


@contextmanager
def _redis(program: str, path: Path) -> Iterator[int]:
    process = subprocess.Popen(
        [
            *(program, "--port", "0", "--unixsocket", os.fspath(path), "--save", ""),
            *("--appendonly", "no", "--dir", os.fspath(path.parent), "--loglevel", "warning"),
        ],
        stdout=subprocess.DEVNULL,
    )
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait(START_SECONDS)


if __name__ == "__main__":
    main("resp", measure)
