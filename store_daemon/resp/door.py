"""Listens for Redis clients, on a unix socket, on loopback, or both (docs/resp.md)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from client_sdk.operator_gate import read_token
from emberkv_proto.errors import PreflightError
from store_daemon.config import DaemonSettings, RespSection
from store_daemon.local_server import listen_on, peer_credentials
from store_daemon.resp.commands import Conversation, DoorCounts, Work
from store_daemon.resp.connection import Connection
from store_daemon.resp.values import ValueShelf
from store_daemon.store import BlockStore
from store_daemon.tenants import Quota

log = logging.getLogger(__name__)
TOKEN_SETTING = "resp.token_file"  # noqa: S105 - the name of a setting
CHECK_SECONDS = 1.0
AHEAD_SHARE = 0.25
"""Part of the pool that replies which wait to be sent may hold, all connections together."""


@dataclass(frozen=True, slots=True)
class DoorAddress:
    """Where Redis clients connect; empty: not there."""

    socket: str = ""
    tcp: str = ""


class RespDoor:
    """One for a daemon. Created and closed on the loop that serves.

    The socket is for its owner only, unless other users are allowed: then also for its group. On
    loopback there is no such check, so clients must send the token.
    """

    def __init__(self, settings: DaemonSettings, store: BlockStore) -> None:
        """Raises ConfigError when the token cannot be read."""
        resp = self._settings = settings.resp
        token = resp.token_file
        self._token = read_token(token, TOKEN_SETTING) if token is not None else None
        self._uids = {*settings.daemon.allowed_uids, os.geteuid()}
        self._store = store
        self.shelf = ValueShelf(store, resp.namespace, _quota(settings), resp.max_value_bytes)
        self.counts = DoorCounts()
        self.address = DoorAddress()
        self.connections: set[Connection] = set()
        self._all_gone = asyncio.Event()
        self._servers: list[asyncio.Server] = []
        self._inode: int | None = None
        self._checks: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises PreflightError when an address cannot be listened on."""
        resp, loop = self._settings, asyncio.get_running_loop()
        path, tcp = "", ""
        try:
            if resp.socket_path is not None:
                path = os.fspath(resp.socket_path)
                listener = listen_on(resp.socket_path, "resp.socket_path", len(self._uids) > 1)
                self._inode = resp.socket_path.stat().st_ino
                self._servers.append(
                    await loop.create_unix_server(lambda: self._connection(), sock=listener)
                )
            if resp.port is not None:
                server = await loop.create_server(lambda: self._connection(), resp.host, resp.port)
                self._servers.append(server)
                tcp = f"{resp.host}:{server.sockets[0].getsockname()[1]}"
        except OSError as error:
            await self.close()
            raise PreflightError(
                f"cannot listen for Redis clients on {resp.host}:{resp.port}: {error.strerror}"
            ) from None
        except BaseException:
            await self.close()
            raise
        self.address = DoorAddress(path, tcp)
        self._checks = loop.create_task(self._check(), name="resp")
        log.info("redis clients may connect: socket=%s tcp=%s", path or "-", tcp or "-")

    def stop_listening(self) -> None:
        """Refuse new connections and remove the socket file, if it is still ours."""
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()
        path = self._settings.socket_path
        if servers and path is not None and self._inode is not None:
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == self._inode:
                    path.unlink()

    async def close(self) -> None:
        """Hang up on everybody."""
        self.stop_listening()
        if self._checks is not None:
            self._checks.cancel()
            await asyncio.gather(self._checks, return_exceptions=True)
            self._checks = None
        for connection in list(self.connections):
            connection.abort()
        if self.connections:
            self._all_gone.clear()
            await self._all_gone.wait()  # in the next turn of the loop

    def check_integrity(self) -> None:
        """Assert every invariant of the door and its parts."""
        self.shelf.check_integrity()
        assert self.counts.connections == len(self.connections)
        assert len(self.connections) <= self._settings.max_connections
        for connection in self.connections:
            connection.check_integrity()

    # ---- inner steps ----

    def _connection(self) -> Connection:
        self.counts.connections_total += 1
        number = self.counts.connections_total

        def converse(work: Callable[[Work], None]) -> Conversation:
            return Conversation(self.shelf, number, self._token, self.counts, work)

        pool_bytes = self._store.holdings.pool.slots.total_bytes
        ahead_bytes = int(AHEAD_SHARE * pool_bytes / self._settings.max_connections)
        return Connection(self.shelf, converse, ahead_bytes, self._made, self._lost)

    def _made(self, connection: Connection) -> bool:
        """Whether it may stay."""
        self.connections.add(connection)
        self.counts.connections = len(self.connections)
        if len(self.connections) > self._settings.max_connections:
            log.warning("redis client refused: %d are connected", len(self.connections) - 1)
            self._store.holdings.counters["resp_refused_connections"] += 1
            return False
        sock = connection.transport.get_extra_info("socket")
        if sock.family != socket.AF_UNIX:
            return True
        with socket.socket(fileno=os.dup(sock.fileno())) as own:
            peer = peer_credentials(own)
        if peer.uid not in self._uids:
            log.warning("redis client refused: uid %d; see daemon.allowed_uids", peer.uid)
            self._store.holdings.counters["resp_refused_connections"] += 1
            return False
        return True

    def _lost(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self.counts.connections = len(self.connections)
        if not self.connections:
            self._all_gone.set()

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            now = time.monotonic()
            self.shelf.keep_leases()
            for connection in list(self.connections):
                connection.check(now)


def is_wanted(resp: RespSection) -> bool:
    """Whether the door is open at all."""
    return resp.socket_path is not None or resp.port is not None


def _quota(settings: DaemonSettings) -> Quota:
    ssd_bytes = sum(drive.capacity_bytes for drive in settings.ssd.drives)
    return Quota(
        int(settings.resp.dram_share * settings.dram.capacity_bytes),
        int(settings.resp.ssd_share * ssd_bytes) or None,
    )
