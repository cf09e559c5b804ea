"""kill -9 of a daemon under mixed load, again and again, and what must hold after each time.

    python -m tests.process.crash_campaign --loops 500 --seed 7

Client processes write, read and prefetch chains; some 30 % of the writes are staged and never
committed. Every acknowledgement is journaled here, in the parent. The daemon is killed at a random
moment, or kills itself at a point named in EMBERKV_FAULTS. Then it is started and asked:

* corrupt: a byte of an acknowledged block that is still there differs, or the daemon itself found
  a checksum that does not match, or its own check has a complaint,
* phantom: a block is readable, or known to the index, that was never committed,
* lost: an acknowledged block is gone though there was room for all,
* astray: the index that followed all of it is not equal to the daemon's catalog.

Ten loops share a cluster, then a new one begins: in turn one with room for everything and one that
evicts all the time. The moments are those of the seed; what happens at them is the machine's.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from emberkv_proto.errors import EmberError
from tests.helpers.agreement import wrong_hits
from tests.helpers.chains import read_chain
from tests.helpers.cluster import Cluster, NodeProcess
from tests.helpers.server_process import ROOT
from tests.process.crash_worker import CHAIN_BLOCKS, hashes_of, is_abandoned

LOOPS_A_LIFE = 10
WORKERS = 2
THREADS = 2
FAULT_FRACTION = 0.4
LOAD_SECONDS = 0.5
"""Longest time from the start of the load to the kill."""
EXIT_SECONDS = 2.0
"""How long a fault may take to happen; then the daemon is killed."""
SETTLE_SECONDS = 90.0
MANY = 1 << 15
ROOMY_CHAINS = 40
"""Chains that a thread writes in a round where there is room for all."""
SAMPLE = 60
"""Older chains that are looked at again after each kill."""
EXITS = {
    "before_commit": 60,
    "before_ack": 60,
    "event_publish": 80,
    "evict": 60,
    "writeback": 12,
    "segment_create": 3,
    "segment_write": 12,
    "mid_segment_write": 12,
    "segment_sync": 12,
    "rocks_write": 14,
    "promote": 20,
    "segment_read": 20,
    "recovered": 1,
}
"""Where a daemon kills itself, and at which hit of the point at the latest."""


@dataclass(frozen=True, slots=True)
class Blow:
    """How one life of the daemon ends: at `seconds`, or at a fault (then `seconds` is for ever)."""

    seconds: float
    fault: str = ""


def blow_of(seed: int, loop: int) -> Blow:
    rng = random.Random(f"{seed}/{loop}")
    if rng.random() < FAULT_FRACTION:
        point, latest = rng.choice(list(EXITS.items()))
        return Blow(EXIT_SECONDS, f"{point}=exit@{rng.randint(1, latest)}")
    return Blow(rng.uniform(0.0, LOAD_SECONDS))


@dataclass
class Journal:
    """What the clients were told. A commit whose answer was lost may or may not have happened."""

    begun: list[int] = field(default_factory=list)
    acknowledged: dict[int, set[int]] = field(default_factory=dict)
    """Chain -> numbers of its blocks."""
    findings: list[str] = field(default_factory=list)

    @property
    def abandoned(self) -> list[int]:
        return [number for number in self.begun if is_abandoned(number)]

    def leading(self, number: int) -> int:
        """How many leading blocks of a chain were acknowledged."""
        mine = self.acknowledged.get(number, set())
        return next(i for i in range(CHAIN_BLOCKS + 1) if i not in mine)


@dataclass
class Report:
    """What a campaign did and found."""

    seed: int
    loops: int = 0
    kills: int = 0
    exits: Counter[str] = field(default_factory=Counter)
    acknowledged_blocks: int = 0
    abandoned_chains: int = 0
    read_blocks: int = 0
    checked_blocks: int = 0
    findings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.loops} loops ({self.kills} kills,"
            f" {sum(self.exits.values())} exits at {len(self.exits)} points),"
            f" {self.acknowledged_blocks} blocks acknowledged, {self.abandoned_chains} chains"
            f" abandoned, {self.read_blocks} blocks read under load, {self.checked_blocks} after"
            f" restarts; {len(self.findings)} findings"
        )


class Worker:
    """A client process and the thread that journals what it says."""

    def __init__(self, number: int) -> None:
        self.journal = Journal()
        self.reads = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.process.crash_worker", str(number), str(THREADS)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._is_idle = threading.Event()
        self._listener = threading.Thread(target=self._listen, name=f"journal-{number}")
        self._listener.start()

    def go(self, socket_path: Path, round_: int, chains: int) -> None:
        assert self._is_idle.wait(SETTLE_SECONDS), "a client process does not end its round"
        self._is_idle.clear()
        assert self._process.stdin is not None
        self._process.stdin.write(f"go {socket_path} {round_} {chains}\n")
        self._process.stdin.flush()

    def await_idle(self) -> None:
        """Wait until the round is over and all of it is in the journal."""
        assert self._is_idle.wait(SETTLE_SECONDS), "a client process does not end its round"
        assert self._process.poll() is None, "a client process has died"

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(SETTLE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if line.endswith("\n"):
                    self._take(*line.rstrip("\n").partition(" ")[::2])
        self._is_idle.set()  # it is gone; whoever waits sees that

    def _take(self, word: str, rest: str) -> None:
        journal = self.journal
        if word == "b":
            journal.begun.append(int(rest))
        elif word == "a":
            number, _, blocks = rest.partition(" ")
            journal.acknowledged.setdefault(int(number), set()).update(map(int, blocks.split(",")))
        elif word == "done":
            self.reads += int(rest)
            self._is_idle.set()
        elif word == "ready":
            self._is_idle.set()
        else:
            journal.findings.append({"w": "corrupt: chain ", "e": "client: "}[word] + rest)


class Life:
    """One cluster and the loops on it."""

    def __init__(
        self, directory: Path, is_roomy: bool, workers: Sequence[Worker], seed: str
    ) -> None:
        self.is_roomy = is_roomy
        self._workers = workers
        self._rng = random.Random(seed)
        blocks = (16_000, 20_000) if is_roomy else (240, 480)
        settings = {"daemon.lease_seconds": 1.0, "ssd.direct_io": False}
        self.cluster = Cluster(
            directory, dram_blocks=blocks[0], ssd_blocks=blocks[1], settings=settings
        )
        self._node: NodeProcess = self.cluster.nodes[0]
        for worker in workers:
            worker.journal = Journal()
        self._verified_begun: set[int] = set()
        self.checked_blocks = 0

    def strike(self, loop: int, blow: Blow) -> bool:
        """Load and kill; True if the daemon ended by the fault itself."""
        node = self._node
        if blow.fault:
            node.faults = blow.fault
            if node.is_running:
                node.kill()
            node.spawn()
            if not self._serves_or_dies():
                node.faults = ""
                return True
        chains = ROOMY_CHAINS if self.is_roomy else MANY
        for worker in self._workers:
            worker.go(node.socket_path, loop + 1, chains)
        code = node.await_end(blow.seconds)
        if code is None:
            node.kill()
        for worker in self._workers:
            worker.await_idle()
        node.faults = ""
        if code is not None and not (blow.fault and code == -9):
            raise AssertionError(f"the daemon ended by itself with {code}:\n{node.log}")
        return code is not None

    def verify(self, is_last: bool) -> list[str]:
        """Start the daemon, unless it runs, and look at everything that happened since."""
        node = self._node
        if not node.is_running:
            node.start()
        journal = self._merged()
        fresh = [n for n in dict.fromkeys(journal.begun) if n not in self._verified_begun]
        older = sorted(self._verified_begun)
        looked_at = older if is_last else self._rng.sample(older, min(SAMPLE, len(older)))
        self._verified_begun.update(fresh)
        numbers = [*looked_at, *fresh]
        findings = journal.findings + self._look(journal, numbers)
        try:
            (catalog,) = self.cluster.await_rest(SETTLE_SECONDS)
        except AssertionError as error:
            return [*findings, f"astray: {error}"]
        chosen = numbers if is_last else self._rng.sample(numbers, min(SAMPLE, len(numbers)))
        wrong = wrong_hits(self.cluster.index.address, catalog, [hashes_of(n) for n in chosen])
        return findings + [f"astray: {words}" for words in wrong]

    def _serves_or_dies(self) -> bool:
        node = self._node
        try:
            node.await_serving()
        except AssertionError:
            code = node.await_end(0.0)
            if code != -9:
                raise
            return False
        return True

    def _look(self, journal: Journal, numbers: Sequence[int]) -> list[str]:
        findings: list[str] = []
        with self._node.client() as client:
            for number in numbers:
                hashes = hashes_of(number)
                if is_abandoned(number):
                    if any(client.probe(hashes).tiers):
                        findings.append(f"phantom: chain {number} was never committed")
                    continue
                try:
                    found = read_chain(client, hashes, SETTLE_SECONDS)
                except (AssertionError, EmberError) as error:
                    findings.append(f"corrupt: chain {number}: {error!r}")
                    continue
                self.checked_blocks += found
                wanted = journal.leading(number)
                if self.is_roomy and found < wanted:
                    findings.append(f"lost: chain {number} has {found} of {wanted} blocks")
        with self._node.operator() as operator:
            findings += [f"corrupt: check says {problem}" for problem in operator.check()]
            counters = operator.status().counters
        for name in ("corrupt_blocks", "ssd_read_errors", "failed_tasks"):
            if counters.get(name):
                findings.append(f"corrupt: the daemon counts {counters[name]:.0f} {name}")
        return findings

    def _merged(self) -> Journal:
        merged = Journal()
        for worker in self._workers:
            merged.begun += worker.journal.begun
            merged.findings += worker.journal.findings
            worker.journal.findings = []
            for number, blocks in worker.journal.acknowledged.items():
                merged.acknowledged.setdefault(number, set()).update(blocks)
        return merged


def run_campaign(
    directory: Path, loops: int, seed: int, first_loop: int = 0, say: bool = False
) -> Report:
    """Run loops `first_loop` to `first_loop + loops - 1`; stops after a life with a finding."""
    report = Report(seed)
    began = time.monotonic()
    with _workers() as workers:
        for start in range(first_loop, first_loop + loops, LOOPS_A_LIFE):
            stop = min(start + LOOPS_A_LIFE, first_loop + loops)
            life_directory = directory / f"loops-{start}"
            _run_life(life_directory, workers, range(start, stop), report)
            report.read_blocks = sum(worker.reads for worker in workers)
            if say:
                each = (time.monotonic() - began) / report.loops
                print(f"{report}; {each:.2f} s a loop", flush=True)
            if report.findings:
                break
            shutil.rmtree(life_directory)
    return report


def _run_life(directory: Path, workers: Sequence[Worker], loops: range, report: Report) -> None:
    is_roomy = loops.start // LOOPS_A_LIFE % 2 == 0
    life = Life(directory, is_roomy, workers, f"{report.seed}/{loops.start}")
    with life.cluster:
        for loop in loops:
            blow = blow_of(report.seed, loop)
            if not blow.fault:
                _note(report, loop, life.verify(is_last=False))
            if life.strike(loop, blow):
                report.exits[blow.fault.partition("=")[0]] += 1
            else:
                report.kills += 1
            report.loops += 1
        _note(report, loops[-1], life.verify(is_last=True))
    for worker in workers:
        report.acknowledged_blocks += sum(map(len, worker.journal.acknowledged.values()))
        report.abandoned_chains += len(worker.journal.abandoned)
    report.checked_blocks += life.checked_blocks


def _note(report: Report, loop: int, findings: Sequence[str]) -> None:
    report.findings += [f"loop {loop}: {finding}" for finding in findings]


@contextmanager
def _workers() -> Iterator[list[Worker]]:
    with ExitStack() as stack:
        workers = []
        for number in range(WORKERS):
            workers.append(Worker(number))
            stack.callback(workers[-1].close)
        yield workers


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.process.crash_campaign")
    parser.add_argument("--loops", type=int, default=500)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one")
    parser.add_argument("--first-loop", type=int, default=0, help="a multiple of 10, to replay")
    options = parser.parse_args()
    seed = random.randrange(1 << 31) if options.seed is None else options.seed
    directory = Path(tempfile.mkdtemp(prefix="emberkv-crash-"))
    print(f"seed {seed}, in {directory}", flush=True)
    report = run_campaign(directory, options.loops, seed, options.first_loop, say=True)
    for finding in report.findings:
        print(finding)
    if not report.findings:
        shutil.rmtree(directory)
        print(f"crash campaign ok: {report}")
        return 0
    first = max(0, report.loops - 1) // LOOPS_A_LIFE * LOOPS_A_LIFE
    print(f"crash campaign FAILED: {report}")
    print(
        f"the cluster's files are kept in {directory}; to replay: make crash"
        f" LOOPS={LOOPS_A_LIFE} SEED={seed} FIRST={options.first_loop + first}"
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
