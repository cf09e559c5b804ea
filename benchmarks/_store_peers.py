"""The peers of the store, each with its servers running, as contenders of the same figures."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import _peer_servers as servers
from benchmarks._figure import NotAvailable
from benchmarks._peers import LMCACHE, MOONCAKE, REDIS, PeerUnavailableError, installed
from benchmarks._store_copies import Contender
from benchmarks._store_paged import LAYERS, PagedPeer
from benchmarks._workers import Worker, WorkerFailedError


@dataclass(frozen=True, slots=True)
class RunningPeer:
    """A peer that serves; `client` starts one client process."""

    name: str
    client: Callable[[], Worker]
    has_pages: bool


@contextmanager
def running_peers(directory: Path | None) -> Iterator[tuple[list[RunningPeer], list[NotAvailable]]]:
    """Install and start every peer; those that cannot be had say why. None: no peers."""
    if directory is None:
        yield [], []
        return
    running: list[RunningPeer] = []
    missing: list[NotAvailable] = []
    os.environ.update(servers.QUIET)
    with ExitStack() as stack:
        for names, start in (
            (("mooncake_daemon", "mooncake_embedded"), _mooncake),
            (("lmcache",), _lmcache),
            (("redis",), _redis),
        ):
            started = _started(start, directory, stack)
            if isinstance(started, PeerUnavailableError):
                missing += [NotAvailable(name, str(started)) for name in names]
            else:
                running += started
        yield running, missing


def _started(
    start: Callable[[Path, ExitStack], list[RunningPeer]], directory: Path, stack: ExitStack
) -> list[RunningPeer] | PeerUnavailableError:
    try:
        return start(directory, stack)
    except PeerUnavailableError as error:
        return error


def _mooncake(directory: Path, stack: ExitStack) -> list[RunningPeer]:
    programs = installed(MOONCAKE, directory)
    # A master each, so that nobody's blocks land in the other's segment.
    owner, alone = (stack.enter_context(servers.mooncake_master(programs)) for _ in range(2))
    node = stack.enter_context(servers.mooncake_daemon(programs, owner))
    module = "benchmarks._peer_mooncake"
    return [
        RunningPeer("mooncake_daemon", _client(programs, module, "daemon", node), True),
        RunningPeer("mooncake_embedded", _client(programs, module, "embedded", alone), True),
    ]


def _lmcache(directory: Path, stack: ExitStack) -> list[RunningPeer]:
    programs = installed(LMCACHE, directory)
    port = stack.enter_context(servers.lmcache_server(programs))
    client = _client(programs, "benchmarks._peer_lmcache", port)
    return [RunningPeer("lmcache", client, True)]


def _redis(directory: Path, stack: ExitStack) -> list[RunningPeer]:
    programs = installed(REDIS, directory)
    place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="emberkv-bench-")))
    path = stack.enter_context(servers.redis_server(place))
    return [RunningPeer("redis", _client(programs, "benchmarks._peer_redis", path), False)]


def _client(programs: Path, module: str, *arguments: str) -> Callable[[], Worker]:
    return lambda: Worker([str(programs / "python"), "-m", module, *arguments])


@contextmanager
def contenders(peers: list[RunningPeer], clients: int) -> Iterator[list[Contender]]:
    """So many client processes of each."""
    with ExitStack() as stack:
        yield [
            Contender(peer.name, [stack.enter_context(peer.client()) for _ in range(clients)], True)
            for peer in peers
        ]


@contextmanager
def paged_peers(entered: list[Contender], peers: list[RunningPeer]) -> Iterator[list[PagedPeer]]:
    """Those that take pages, on the first client of each."""
    able = {peer.name for peer in peers if peer.has_pages}
    paged = [PagedPeer(one.name, one.clients[0], one.out) for one in entered if one.name in able]
    for peer in paged:
        if not peer.out:
            _prepare(peer)
    yield paged
    for peer in paged:
        if not peer.out:
            peer.client.ask("paged_close")


def _prepare(peer: PagedPeer) -> None:
    try:
        peer.client.ask("paged_prepare", layers=LAYERS)
    except WorkerFailedError as error:
        peer.out = str(error)
    peer.round_trip()
