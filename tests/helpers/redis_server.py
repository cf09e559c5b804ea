"""Real Redis (or Valkey) servers for tests: own folder, loopback, ended by pid."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import redis.asyncio
from redis.asyncio.cluster import RedisCluster

from tests.helpers.ports import free_pair

START_SECONDS = 60.0
PORTS_TRIED = 3
BUS_ABOVE = 10_000
"""So far above its own port a server of a cluster listens to the others."""
_NAMES = ("redis-server", "valkey-server")


def server_binary() -> str:
    """EMBERKV_REDIS_SERVER, or what the PATH has.

    Where there is none the test is skipped, or fails under EMBERKV_REQUIRE_REDIS=1.
    """
    named = os.environ.get("EMBERKV_REDIS_SERVER")
    found = [named] if named else [path for path in map(shutil.which, _NAMES) if path]
    if found:
        return found[0]
    reason = "no redis-server or valkey-server on the PATH (make redis-server installs one)"
    if os.environ.get("EMBERKV_REQUIRE_REDIS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@dataclass
class RedisServer:
    """A running server. `kill`, `stop` and `go_on` are what tests do to it."""

    process: subprocess.Popen[bytes]
    port: int
    command: list[str]

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def is_in_cluster(self) -> bool:
        return "--cluster-enabled" in self.command

    def client(self) -> Any:
        """A new asyncio client of the server, or of its whole cluster."""
        if self.is_in_cluster:
            return RedisCluster(host="127.0.0.1", port=self.port, socket_timeout=20)
        return redis.asyncio.Redis(port=self.port, socket_timeout=20)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)

    def stop(self) -> None:
        """SIGSTOP: connections stay, nothing answers."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def start_again(self) -> None:
        """A new process on the same port; it has no data."""
        self.process = _start(self.command, self.port)


@contextmanager
def redis_server(*options: str) -> Iterator[RedisServer]:
    """A server without persistence, ready inside the block."""
    with tempfile.TemporaryDirectory(prefix="ekredis") as folder:
        program = server_binary()
        for attempt in range(PORTS_TRIED):
            port = free_pair(BUS_ABOVE)
            command = [
                *(program, "--port", str(port), "--bind", "127.0.0.1"),
                *("--save", "", "--appendonly", "no", "--dir", folder, "--loglevel", "warning"),
                *options,
            ]
            try:
                server = RedisServer(_start(command, port), port, command)
                break
            except AssertionError:  # somebody took the port, or a cluster's second one, meanwhile
                if attempt == PORTS_TRIED - 1:
                    raise
        try:
            yield server
        finally:
            if server.process.poll() is None:
                server.go_on()
                server.kill()


@contextmanager
def redis_cluster(masters: int = 3) -> Iterator[list[RedisServer]]:
    """A cluster without replicas, its slots split evenly."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                redis_server("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf")
            )
            for _ in range(masters)
        ]
        cuts = [round(16384 * n / masters) for n in range(masters + 1)]
        for n, server in enumerate(servers):
            _call(server, "CLUSTER", "ADDSLOTSRANGE", str(cuts[n]), str(cuts[n + 1] - 1))
            _call(server, "CLUSTER", "SET-CONFIG-EPOCH", str(n + 1))
        for server in servers[1:]:
            _call(server, "CLUSTER", "MEET", "127.0.0.1", str(servers[0].port))
        deadline = time.monotonic() + START_SECONDS
        for server in servers:
            while not _knows_all(server, masters):
                assert time.monotonic() < deadline, "the cluster does not come together"
                time.sleep(0.05)
        yield servers


def _knows_all(server: RedisServer, masters: int) -> bool:
    info = _call(server, "CLUSTER", "INFO")
    return b"cluster_state:ok" in info and b"cluster_known_nodes:%d" % masters in info


def _start(command: list[str], port: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=90) as link:
                link.sendall(b"PING\r\n")
                if link.recv(16).startswith((b"+PONG", b"-")):
                    return process
        except OSError:
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise AssertionError(f"{command[0]} did not start (exit {process.returncode})")
        time.sleep(0.02)


def _call(server: RedisServer, *words: str) -> bytes:
    """One command over a socket of its own; the reply as it comes."""
    parts = [word.encode() for word in words]
    frame = b"*%d\r\n" % len(parts)
    frame += b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
    with socket.create_connection(("127.0.0.1", server.port), timeout=90) as link:
        link.sendall(frame)
        reply = link.recv(65536)
    assert not reply.startswith(b"-"), f"{words}: {reply!r}"
    return reply
