"""Sessions that hammer a daemon at 105 % of its capacity, with every byte and every book checked.

    python -m tests.process.soak --minutes 10

Eight sessions read chains of a working set a little larger than DRAM and SSD together, the popular
ones more often, and store what they do not find. Every block that is read is compared, byte for
byte. Meanwhile the daemon checks its own integrity again and again, and at the end nothing may be
held, lost to the index, or grown: memory and descriptors of the daemon are those of its warm state.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from client_sdk import SyncClient
from emberkv_proto.errors import EmberError
from emberkv_proto.types import Tier
from tests.helpers.chains import NAMESPACE, chain_of, read_chain, write_chain
from tests.helpers.cluster import Cluster, NodeProcess, wait_until
from tests.helpers.processes import descriptors, private_bytes
from tests.helpers.server_process import ROOT

PROCESSES = 2
SESSIONS = 4
"""In each process."""
CHAIN_BLOCKS = 6
DRAM_BLOCKS = 600
SSD_BLOCKS = 1800
WORKING_SET = 1.05
LEASE_SECONDS = 30.0
"""Longer than a busy machine may keep a session from its heartbeat."""
CHECK_SECONDS = 2.0
RING_EVENTS = 1024
"""Full soon: a ring that fills is no leak, but would look like one."""
WARM_FRACTION = 0.3
"""After this part of the time the daemon is as large as it will be."""
GROWTH_BYTES = 8 << 20
FEW_DESCRIPTORS = 6
"""An open segment, those of the local index, somebody's scrape; a leak would be one a session."""
SETTLE_SECONDS = 60.0


@dataclass
class Report:
    """What a soak did and found."""

    seconds: float
    reads: int = 0
    hits: int = 0
    writes: int = 0
    evictions: int = 0
    checks: int = 0
    warm_bytes: int = 0
    end_bytes: int = 0
    findings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.seconds:.0f} s: {self.reads} blocks asked for, {self.hits} read and right,"
            f" {self.writes} stored, {self.evictions} left DRAM, {self.checks} checks; daemon"
            f" {self.warm_bytes >> 20} MiB warm, {self.end_bytes >> 20} MiB at the end;"
            f" {len(self.findings)} findings"
        )


# ---- a client process ----


def run_session(socket_path: str, seed: int, chains: int, ends_at: float) -> None:
    """One session: says `n ASKED READ STORED` at its end, `w TEXT` for what must never be."""
    rng = random.Random(seed)
    asked = read = stored = 0
    with SyncClient(socket_path, NAMESPACE, timeout_seconds=30.0) as client:
        while time.time() < ends_at:
            number = int(chains * rng.random() ** 2)  # the first ones are popular
            hashes = chain_of(number, CHAIN_BLOCKS)
            asked += CHAIN_BLOCKS
            try:
                found = read_chain(client, hashes)
                read += found
                if found < CHAIN_BLOCKS:
                    stored += len(write_chain(client, hashes))
            except AssertionError as error:
                say(f"w wrong: {error}")
            except EmberError as error:
                say(f"w client: {error!r}")
    say(f"n {asked} {read} {stored}")


def say(line: str) -> None:
    os.write(1, line.encode() + b"\n")


def run_client(socket_path: str, seed: int, chains: int, ends_at: float) -> None:
    threads = [
        threading.Thread(target=run_session, args=(socket_path, seed + i, chains, ends_at))
        for i in range(SESSIONS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# ---- the campaign ----


def run_soak(directory: Path, seconds: float, seed: int) -> Report:
    report = Report(seconds)
    settings = {
        "daemon.lease_seconds": LEASE_SECONDS,
        "daemon.event_ring_events": RING_EVENTS,
        "ssd.scrub_bytes_per_second": 1 << 20,
    }
    with Cluster(
        directory, dram_blocks=DRAM_BLOCKS, ssd_blocks=SSD_BLOCKS, settings=settings
    ) as cluster:
        (node,) = cluster.nodes
        descriptors_before = descriptors(node.pid)
        with node.operator() as operator:
            tiers = {tier.tier: tier for tier in operator.status().tiers}
        blocks = _capacity_blocks(tiers[Tier.SSD].capacity_bytes)
        chains = int(WORKING_SET * blocks / CHAIN_BLOCKS)
        with _clients(node, seed, chains, time.time() + seconds) as clients:
            _watch(node, seconds, report)
            for client in clients:
                said, _ = client.communicate(timeout=seconds + SETTLE_SECONDS)
                _take(said, report)
        _judge(cluster, node, report)
        grown = descriptors(node.pid) - descriptors_before
        if grown > FEW_DESCRIPTORS:
            report.findings.append(f"{grown} descriptors more than at the start")
    return report


def _capacity_blocks(ssd_bytes: int) -> int:
    """Blocks that the node can hold: what is in DRAM is on the SSD as well."""
    return ssd_bytes // (2 * 4096)


@contextmanager
def _clients(
    node: NodeProcess, seed: int, chains: int, ends_at: float
) -> Iterator[list[subprocess.Popen[str]]]:
    with ExitStack() as stack:
        clients = []
        for number in range(PROCESSES):
            words = (node.socket_path, seed + 100 * number, chains, ends_at)
            client = subprocess.Popen(
                [sys.executable, "-m", "tests.process.soak", "client", *map(str, words)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(client)
            stack.callback(client.kill)
            clients.append(client)
        yield clients


def _watch(node: NodeProcess, seconds: float, report: Report) -> None:
    """Check the daemon's books until the time is over."""
    began = time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        if not report.warm_bytes and passed > WARM_FRACTION * seconds:
            report.warm_bytes = private_bytes(node.pid)
        with node.operator() as operator:
            report.findings += [f"check: {problem}" for problem in operator.check()]
        report.checks += 1
        time.sleep(CHECK_SECONDS)
    report.end_bytes = private_bytes(node.pid)


def _take(said: str, report: Report) -> None:
    for line in said.splitlines():
        word, _, rest = line.partition(" ")
        if word == "w":
            report.findings.append(rest)
            continue
        asked, read, stored = map(int, rest.split())
        report.reads += asked
        report.hits += read
        report.writes += stored


def _judge(cluster: Cluster, node: NodeProcess, report: Report) -> None:
    """After the sessions have ended: nothing is held, all agrees, a new block finds room."""
    findings = report.findings
    for name in ("sessions", "leases", "staged_parts"):
        wait_until(lambda name=name: node.gauge(name) == 0, f"no {name}")  # type: ignore[misc]
    cluster.await_rest(SETTLE_SECONDS)
    with node.operator() as operator:
        counters = operator.status().counters
    report.evictions = int(counters.get("demoted_blocks", 0) + counters.get("evicted_blocks", 0))
    for name in ("corrupt_blocks", "ssd_read_errors", "failed_tasks", "policy_failures"):
        if counters.get(name):
            findings.append(f"the daemon counts {counters[name]:.0f} {name}")
    metrics = node.metrics()
    for tier in ("dram", "ssd"):
        lost = metrics[f'emberkv_store_unconserved_blocks{{tier="{tier}"}}']
        if lost:
            findings.append(f"{tier}: stored - removed - resident is {lost:.0f}")
    if report.end_bytes - report.warm_bytes > GROWTH_BYTES:
        findings.append(
            f"the daemon grew from {report.warm_bytes} to {report.end_bytes} bytes once warm"
        )
    with node.client() as client:
        if len(write_chain(client, chain_of(1 << 40, CHAIN_BLOCKS))) < CHAIN_BLOCKS:
            findings.append("no room for a new chain at rest")
    wait_until(lambda: node.gauge("sessions") == 0, "no session")


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["client"]:
        path, seed, chains, ends_at = arguments[1:]
        run_client(path, int(seed), int(chains), float(ends_at))
        return 0
    parser = argparse.ArgumentParser(prog="python -m tests.process.soak")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    options = parser.parse_args(arguments)
    directory = Path(tempfile.mkdtemp(prefix="emberkv-soak-"))
    report = run_soak(directory, 60 * options.minutes, options.seed)
    for finding in report.findings:
        print(finding)
    if report.findings:
        print(f"the cluster's files are kept in {directory}")
    else:
        shutil.rmtree(directory)
    print(f"soak {'FAILED' if report.findings else 'ok'}: seed {options.seed}, {report}")
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
