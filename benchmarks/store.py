"""The store beside what it is made of, and with `--peers` beside other stores.

Put and get beside plain memcpy, round trips beside a bare unix echo, paged tensors beside plain
copies, promote and writeback beside raw O_DIRECT.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

from benchmarks._daemon import running_daemon
from benchmarks._figure import MIB, Line, Options, main
from benchmarks._round_trips import round_trips
from benchmarks._store_client import fresh_chain, namespace_of
from benchmarks._store_copies import Contender, copies
from benchmarks._store_paged import paged
from benchmarks._store_peers import RunningPeer, contenders, paged_peers, running_peers
from benchmarks._store_ssd import moves
from benchmarks._workers import Worker

DRAM_BYTES = 640 * MIB
EXTENT_BYTES = 64 * MIB
CLIENTS = (1, 2)
COPY_THREADS = (1, 2)
REGION_BYTES = 256 * MIB
"""Plain memory that is compared with: several times what a cache holds, as the pool is."""


def measure(options: Options) -> Iterable[Line]:
    yield from moves(options)
    trips = namespace_of(4096, "bench-round-trips")
    with running_daemon(DRAM_BYTES, EXTENT_BYTES) as serving:
        yield from round_trips(serving, trips, fresh_chain, options)
        with running_peers(options.peers_dir) as (peers, missing):
            yield from missing
            for count in CLIENTS:
                yield from _with_clients(serving.socket_path, peers, count, options)


def _with_clients(
    socket_path: Path, peers: list[RunningPeer], count: int, options: Options
) -> Iterator[Line]:
    with ExitStack() as stack:
        clients = [stack.enter_context(store_client(socket_path)) for _ in range(count)]
        others = stack.enter_context(contenders(peers, count))
        yield from copies(Contender("emberkv", clients), others, REGION_BYTES, options)
        if count == 1:
            paged_others = stack.enter_context(paged_peers(others, peers))
            for threads in COPY_THREADS:
                yield from paged(clients[0], threads, paged_others, options)


def store_client(socket_path: Path) -> Worker:
    return Worker([sys.executable, "-m", "benchmarks._store_client", str(socket_path)])


if __name__ == "__main__":
    main("store", measure)
