"""Blocks between two nodes: a peer's pull beside the raw transport, iperf3 and other systems.

32 blocks of 1 MiB, fresh each time, from one daemon to another on loopback: index, lease, transfer,
checksums and landing are all in the figure. The raw transport reads the same kind of batch from
the same daemon and does nothing else. With `--peers`: Mooncake's Transfer Engine and a remote get
of Mooncake Store over TCP, and Redis over its unix socket.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import _peer_servers as servers
from benchmarks._daemon import running_daemon
from benchmarks._figure import MIB, Figure, Line, NotAvailable, Options, main, median_values
from benchmarks._peers import MOONCAKE, REDIS, PeerUnavailableError, installed
from benchmarks._store_client import BATCH
from benchmarks._workers import Worker, WorkerFailedError, end_process, gigabytes_per_second
from client_sdk.cli.cluster_plan import choose_port

BLOCK_BYTES = MIB
DRAM_BYTES = 640 * MIB
EXTENT_BYTES = 64 * MIB
AT_LEAST_OF_RAW = 0.90
AT_LEAST_OF_PEERS = 1.0
IPERF_SECONDS = 2
UNIT = f"GB/s, {BATCH} blocks of {BLOCK_BYTES // MIB} MiB"
Rate = Callable[[], float]
"""Measure once, in GB/s."""


def measure(options: Options) -> Iterator[Line]:
    repeats = options.repeats(15, 7)
    with ExitStack() as stack:
        rates: dict[str, Rate] = {}
        for kind in ("tcp", "ucx"):
            if kind == "ucx" and find_spec("nixl_cu12") is None:
                yield NotAvailable("pull_ucx", "NIXL is not installed: pip install 'emberkv[ucx]'")
                continue
            pull, raw = stack.enter_context(_pull_and_raw(kind))
            rates |= {f"pull_{kind}": pull, f"raw_{kind}": raw}
        others: dict[str, Rate] = {}
        for name, start in _others(options).items():
            try:
                others[name] = start(stack)
            except (PeerUnavailableError, WorkerFailedError) as error:  # noqa: PERF203
                yield NotAvailable(name, str(error))
        names = [*rates, *others]
        values = median_values([*rates.values(), *others.values()], repeats)
        found = dict(zip(names, values, strict=True))
        for kind in ("tcp", "ucx"):
            if f"pull_{kind}" in found:
                yield from _figures(kind, found, list(others), repeats)


def _figures(kind: str, found: dict[str, float], others: list[str], repeats: int) -> Iterator[Line]:
    pull = found[f"pull_{kind}"]
    raw = f"the raw {kind} transport from the same daemon"
    name = f"pull_{kind}_1MiB"
    yield Figure(name, pull, UNIT, raw, found[f"raw_{kind}"], repeats, at_least=AT_LEAST_OF_RAW)
    for other in others:
        # What only moves bytes is there to compare with; a store does the same work.
        is_store = other in ("mooncake_store_remote_get", "redis_mget")
        target = AT_LEAST_OF_PEERS if is_store else None
        yield Figure(f"{name}_{other}", pull, UNIT, other, found[other], repeats, at_least=target)


@contextmanager
def _pull_and_raw(kind: str) -> Iterator[tuple[Rate, Rate]]:
    with ExitStack() as stack:
        ports = [choose_port() for _ in range(2)]
        nodes = [f"127.0.0.1:{port}" for port in ports]
        index = stack.enter_context(_running_index(nodes))
        owner, reader = (
            stack.enter_context(
                running_daemon(
                    DRAM_BYTES,
                    EXTENT_BYTES,
                    settings={
                        "node.id": f"bench-{kind}-{place}",
                        "daemon.grpc_port": port,
                        "daemon.index_address": index,
                        "daemon.heartbeat_seconds": 0.2,
                        "transport.kind": kind,
                        "transport.rdma": '"off"',
                        # Nothing that was pulled has to make room for what is.
                        "peers.replica_share": 1.0,
                    },
                )
            )
            for place, port in enumerate(ports)
        )
        sockets = [str(owner.socket_path), str(reader.socket_path)]
        puller = stack.enter_context(
            Worker([sys.executable, "-m", "benchmarks._transport_puller", *sockets])
        )
        raw = stack.enter_context(
            Worker([sys.executable, "-m", "benchmarks._transport_raw", kind, nodes[0]])
        )
        for worker in (puller, raw):
            worker.ask("prepare", block_bytes=BLOCK_BYTES)
            stack.callback(worker.ask, "close")

        def pull_once() -> float:
            puller.ask("put")
            rate = gigabytes_per_second([puller.ask("pull")])
            puller.ask("check")
            return rate

        def raw_once() -> float:
            return gigabytes_per_second([raw.ask("read", hashes=puller.ask("put"))])

        pull_once()
        raw_once()
        yield pull_once, raw_once


@contextmanager
def _running_index(nodes: list[str]) -> Iterator[str]:
    port = choose_port()
    values = {
        "index.port": port,
        "index.metrics_port": 0,
        "index.nodes": json.dumps(nodes),
        "index.backend": "python",
    }
    arguments = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    with TemporaryDirectory(prefix="emberkv-bench-") as directory:
        process = subprocess.Popen(
            [sys.executable, "-m", "global_index", *arguments],
            env=None,
            stderr=(Path(directory) / "index.log").open("wb"),
        )
        try:
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            end_process(process)


def _others(options: Options) -> dict[str, Callable[[ExitStack], Rate]]:
    found: dict[str, Callable[[ExitStack], Rate]] = {"iperf3": _iperf3}
    if options.peers_dir is not None:
        directory = options.peers_dir
        found["mooncake_engine_read"] = partial(_mooncake_engine, directory)
        found["mooncake_store_remote_get"] = partial(_mooncake_store, directory)
        found["redis_mget"] = partial(_redis, directory)
    return found


def _iperf3(stack: ExitStack) -> Rate:
    """One stream over loopback."""
    program = shutil.which("iperf3")
    if program is None:
        raise PeerUnavailableError("iperf3 is not on the PATH; Debian: apt-get install iperf3")
    port = choose_port()
    server = subprocess.Popen(
        [program, "--server", "--bind", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL,
    )
    stack.callback(end_process, server)
    stack.callback(server.terminate)
    command = [program, "--client", "127.0.0.1", "--port", str(port), "--json"]
    command += ["--time", str(IPERF_SECONDS), "--connect-timeout", "5000"]

    def run() -> float:
        done = subprocess.run(command, capture_output=True, check=False, timeout=60)
        answer = json.loads(done.stdout)
        if "error" in answer:
            raise WorkerFailedError(f"iperf3: {answer['error']}")
        return float(answer["end"]["sum_received"]["bits_per_second"]) / 8e9

    return run


def _mooncake_engine(directory: Path, stack: ExitStack) -> Rate:
    programs = installed(MOONCAKE, directory)
    owner, reader = (
        stack.enter_context(
            Worker(
                [str(programs / "python"), "-m", "benchmarks._peer_mooncake_engine"], servers.QUIET
            )
        )
        for _ in range(2)
    )
    there = owner.ask("prepare", block_bytes=BLOCK_BYTES)
    reader.ask("prepare", block_bytes=BLOCK_BYTES)

    def read() -> float:
        return gigabytes_per_second([reader.ask("read", **there)])

    read()
    if reader.ask("digest") != owner.ask("digest"):
        raise WorkerFailedError("the engine gave other bytes than there were")
    return read


def _mooncake_store(directory: Path, stack: ExitStack) -> Rate:
    """Gets of one process of what another put into its own segment."""
    programs = installed(MOONCAKE, directory)
    master = stack.enter_context(servers.mooncake_master(programs))
    command = [str(programs / "python"), "-m", "benchmarks._peer_mooncake", "embedded", master]
    return _remote_get([stack.enter_context(Worker(command, servers.QUIET)) for _ in range(2)])


def _redis(directory: Path, stack: ExitStack) -> Rate:
    programs = installed(REDIS, directory)
    place = Path(stack.enter_context(TemporaryDirectory(prefix="emberkv-bench-")))
    path = stack.enter_context(servers.redis_server(place))
    command = [str(programs / "python"), "-m", "benchmarks._peer_redis", path]
    return _remote_get([stack.enter_context(Worker(command)) for _ in range(2)])


def _remote_get(workers: list[Worker]) -> Rate:
    owner, reader = workers
    for worker in workers:
        worker.ask("prepare", block_bytes=BLOCK_BYTES, kept_chains=2, region_bytes=0)
    owner.ask("keep")
    kept = owner.ask("kept")
    reader.ask("adopt", keys=kept["keys"])

    def get() -> float:
        return gigabytes_per_second([reader.ask("get", batches=1)])

    get()
    if reader.ask("digest") != kept["digest"]:
        raise WorkerFailedError("the peer gave other bytes than were put")
    return get


if __name__ == "__main__":
    main("transport", measure)
