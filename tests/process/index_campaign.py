"""Daemons, routers, index and Redis hurt one by one under load, and what must hold after each.

    python -m tests.process.index_campaign --pause 30 --seed 7 --redis

Three daemons, two routers with an index each, and an index alone; with --redis the three share
the daemons through a real Redis, so that each answers for nodes that others follow. Each is killed
(-9) and started again, and stopped (SIGSTOP) for a while and let go on, and Redis is emptied, while
engines write and read on every node and requests go through both routers. After each blow, counted
from the moment when what was hurt is back:

* astray: within BOUND_SECONDS every index is exact about every node, its digests and the hits of
  sample chains are those of the node's own catalog, and so are the rows in Redis,
* unserved: no request failed, but for those at a router that was down (the other one took them),
* corrupt: no read brought other bytes than were written.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.helpers.agreement import await_agreement, wrong_hits
from tests.helpers.cluster import Cluster, NodeProcess, RouterProcess, wait_until
from tests.helpers.redis_rows import flush, redis_differences
from tests.helpers.redis_server import RedisServer, redis_server
from tests.helpers.server_process import ServerProcess
from tests.process.index_load import NodeLoad, RequestLoad, chain_of_node, fake_engines

BOUND_SECONDS = 10.0
"""Stated in docs/index.md."""
NODES = 3
ROUTERS = 2
LOAD_SECONDS = 0.5
"""Of load before each blow, and between a kill and the start after it."""
SAMPLE = 8
"""Chains of each node that every index is asked for."""


@dataclass(frozen=True, slots=True)
class Blow:
    name: str
    strike: Callable[[], None]
    seconds: float
    heal: Callable[[], None]
    router: RouterProcess | None = None


@dataclass
class Report:
    blows: int = 0
    requests: int = 0
    elsewhere: int = 0
    calls: int = 0
    agreed_seconds: dict[str, float] = field(default_factory=dict)
    """By blow: until every index was exact about every node."""
    findings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        slowest = max(self.agreed_seconds.values(), default=0.0)
        return (
            f"{self.blows} blows, {self.requests} requests ({self.elsewhere} at the other router),"
            f" {self.calls} calls of engines; exact again after {slowest:.1f} s at most;"
            f" {len(self.findings)} findings"
        )


def run_campaign(
    directory: Path,
    *,
    pause_seconds: float,
    seed: int,
    bound_seconds: float = BOUND_SECONDS,
    is_short: bool = False,
    redis: RedisServer | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Report:
    """Hurt each server in turn. A short one spares the lone index and stops one of a kind."""
    report = Report()
    with _cluster(directory, redis) as (cluster, loads, requests):
        blows = _blows(cluster, pause_seconds, is_short)
        if redis is not None:
            blows += _blows_on_redis(redis, pause_seconds)
        random.Random(seed).shuffle(blows)
        for blow in blows:
            time.sleep(LOAD_SECONDS)
            if blow.router:
                requests.strike(blow.router)
            blow.strike()
            time.sleep(blow.seconds)
            blow.heal()
            if blow.router:
                requests.heal(blow.router)
            healed = time.monotonic()
            for load in loads:
                load.hold()
            try:
                found = _await_views(cluster, redis, bound_seconds)
            except AssertionError as error:
                found = [f"astray: {error}"]
            seconds = report.agreed_seconds[blow.name] = time.monotonic() - healed
            report.blows += 1
            report.findings += [f"after {blow.name}: {finding}" for finding in found]
            say(f"{blow.name}: exact again after {seconds:.1f} s {found or ''}")
            for load in loads:
                load.go_on()
    report.findings += [f"unserved: {failure}" for failure in requests.served.failed]
    report.findings += [f"corrupt: {wrong}" for load in loads for wrong in load.wrong]
    report.requests, report.elsewhere = requests.served.requests, requests.served.elsewhere
    report.calls = sum(load.done for load in loads)
    return report


@contextmanager
def _cluster(
    directory: Path, redis: RedisServer | None
) -> Iterator[tuple[Cluster, list[NodeLoad], RequestLoad]]:
    """A cluster under load, which ends first."""
    with ExitStack() as stack:
        engines = stack.enter_context(fake_engines(NODES))
        cluster = stack.enter_context(
            Cluster(
                directory,
                nodes=NODES,
                routers=ROUTERS,
                dram_blocks=60,
                ssd_blocks=90,
                index_settings={
                    "index.suspect_seconds": 1.0,
                    "index.gone_seconds": 3.0,
                    **(_redis_settings(redis) if redis is not None else {}),
                },
                router_settings={
                    "router.engines": json.dumps([{"url": engine.url} for engine in engines]),
                },
            )
        )
        requests = RequestLoad(cluster.routers, NODES, 1)
        stack.callback(requests.close)
        loads: list[NodeLoad] = []
        for place, (node, engine) in enumerate(zip(cluster.nodes, engines, strict=True)):
            loads.append(NodeLoad(node, place, engine.url, place))
            stack.callback(loads[-1].close)
        yield cluster, loads, requests


def _redis_settings(redis: RedisServer) -> dict[str, object]:
    return {
        "index.redis_url": redis.url,
        "index.redis_lease_seconds": 1.0,
        "index.redis_query_seconds": 0.25,  # the machine may be busy
    }


def _blows(cluster: Cluster, pause_seconds: float, is_short: bool) -> list[Blow]:
    servers: list[ServerProcess] = [*cluster.nodes, *cluster.routers]
    paused: list[ServerProcess] = [cluster.nodes[0], cluster.routers[0]]
    if not is_short:
        servers.append(cluster.index)
        paused = servers
    blows = [
        Blow(f"kill of {_name(s)}", s.kill, LOAD_SECONDS, s.start, _router(s)) for s in servers
    ]
    blows += [
        Blow(f"stop of {_name(s)}", s.pause, pause_seconds, s.resume, _router(s)) for s in paused
    ]
    return blows


def _blows_on_redis(redis: RedisServer, pause_seconds: float) -> list[Blow]:
    return [
        Blow("kill of Redis", redis.kill, LOAD_SECONDS, redis.start_again),
        Blow("stop of Redis", redis.stop, pause_seconds, redis.go_on),
        Blow("emptying of Redis", lambda: flush(redis.url), 0.0, lambda: None),
    ]


def _name(server: ServerProcess) -> str:
    return server.node_id if isinstance(server, NodeProcess) else server.name


def _router(server: ServerProcess) -> RouterProcess | None:
    return server if isinstance(server, RouterProcess) else None


def _await_views(cluster: Cluster, redis: RedisServer | None, seconds: float) -> list[str]:
    """Wait until every index, and Redis, agrees with every node; return what does not in time.

    Raises AssertionError with the differences of an index's counts.
    """
    deadline = time.monotonic() + seconds
    for node in cluster.nodes:
        wait_until(node.is_at_rest, f"{node.name} is at rest", seconds)
    views = [cluster.index.address, *(r.endpoint["index_address"] for r in cluster.routers)]
    while True:
        wrong: list[str] = []
        for place, node in enumerate(cluster.nodes):
            chains = [chain_of_node(number, place) for number in range(SAMPLE)]
            for view in views:
                left = max(0.1, deadline - time.monotonic())
                catalog = await_agreement(view, node.grpc_address, left)
                wrong += wrong_hits(view, catalog, chains)
            if redis is not None:
                wrong += redis_differences(redis.url, catalog)
        if not wrong or time.monotonic() > deadline:
            return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pause", type=float, default=30.0, help="seconds of each SIGSTOP")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--redis", action="store_true", help="share the index through Redis")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended too
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server()) if options.redis else None
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="emberkv-index-"))
        report = run_campaign(
            Path(directory),
            pause_seconds=options.pause,
            seed=options.seed,
            redis=redis,
            say=lambda line: print(line, flush=True),
        )
    print(report)
    for finding in report.findings:
        print(finding)
    return bool(report.findings)


if __name__ == "__main__":
    sys.exit(main())
