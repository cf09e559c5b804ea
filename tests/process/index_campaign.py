"""Daemons, routers and an index hurt one after the other under load, and what must hold after each.

    python -m tests.process.index_campaign --pause 30 --seed 7

Three daemons, two routers with an index each, and an index alone. Each is killed (-9) and started
again, and stopped (SIGSTOP) for a while and let go on, while engines write and read on every node
and requests go through both routers. After each blow, counted from the moment when what was hurt
is back:

* astray: within BOUND_SECONDS every index is exact about every node, its digests and the hits of
  sample chains are those of the node's own catalog,
* unserved: no request failed, but for those at a router that was down (the other one took them),
* corrupt: no read brought other bytes than were written.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.helpers.agreement import await_agreement, wrong_hits
from tests.helpers.cluster import Cluster, NodeProcess, RouterProcess, wait_until
from tests.helpers.server_process import ServerProcess
from tests.process.index_load import CHAINS, NodeLoad, RequestLoad, chain_of_node, fake_engines

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
    say: Callable[[str], None] = lambda line: None,
) -> Report:
    """Hurt each server in turn. A short one spares the lone index and stops one of a kind."""
    report = Report()
    with _cluster(directory) as (cluster, loads, requests):
        _await_views(cluster, 60.0)
        for blow in _blows(cluster, pause_seconds, is_short, random.Random(seed)):
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
                found = _await_views(cluster, bound_seconds)
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
def _cluster(directory: Path) -> Iterator[tuple[Cluster, list[NodeLoad], RequestLoad]]:
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
                index_settings={"index.gone_seconds": 3.0},
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


def _blows(
    cluster: Cluster, pause_seconds: float, is_short: bool, choose: random.Random
) -> list[Blow]:
    servers: list[ServerProcess] = [*cluster.nodes, *cluster.routers]
    paused: list[ServerProcess] = [choose.choice(cluster.nodes), choose.choice(cluster.routers)]
    if not is_short:
        servers.append(cluster.index)
        paused = servers
    blows = [
        Blow(f"kill of {_name(s)}", s.kill, LOAD_SECONDS, s.start, _router(s)) for s in servers
    ]
    blows += [
        Blow(f"stop of {_name(s)}", s.pause, pause_seconds, s.resume, _router(s)) for s in paused
    ]
    choose.shuffle(blows)
    return blows


def _name(server: ServerProcess) -> str:
    return server.node_id if isinstance(server, NodeProcess) else server.name


def _router(server: ServerProcess) -> RouterProcess | None:
    return server if isinstance(server, RouterProcess) else None


def _await_views(cluster: Cluster, seconds: float) -> list[str]:
    """Wait until every index agrees with every node; return hits that are wrong all the same.

    Raises AssertionError with the last differences.
    """
    deadline = time.monotonic() + seconds
    for node in cluster.nodes:
        wait_until(node.is_at_rest, f"{node.name} is at rest", seconds)
    wrong: list[str] = []
    views = [cluster.index.address, *(r.endpoint["index_address"] for r in cluster.routers)]
    for place, node in enumerate(cluster.nodes):
        chains = [chain_of_node(number, place) for number in range(CHAINS)][:SAMPLE]
        for view in views:
            left = max(0.1, deadline - time.monotonic())
            catalog = await_agreement(view, node.grpc_address, left)
            wrong += wrong_hits(view, catalog, chains)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pause", type=float, default=30.0, help="seconds of each SIGSTOP")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="emberkv-index-") as directory:
        report = run_campaign(
            Path(directory),
            pause_seconds=options.pause,
            seed=options.seed,
            say=lambda line: print(line, flush=True),
        )
    print(report)
    for finding in report.findings:
        print(finding)
    return bool(report.findings)


if __name__ == "__main__":
    sys.exit(main())
