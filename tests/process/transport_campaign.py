"""Kill and stop either side of a transport under load, again and again; what must hold each time.

    python -m tests.process.transport_campaign --runs 200 --transport ucx --seed 7

A reader process fills slots from an owner process, three reads at once, some with a handshake.
At a random moment one side is killed (-9), or stopped for a while and continued: the daemon's
process with its agents, or only an agent. Then:

* late: a byte of a slot changed after its read had ended, in the reader or in the pool it left,
* guard: a byte between slots changed,
* wrong: a read that succeeded gave other bytes,
* leak: descriptors or threads that were not there before, or bytes still in quarantine,
* hang: a read took longer than its deadline, the stop, and what the machine may take by itself,
* dead: reads do not succeed again, over this transport.

The moments are those of the seed; what happens at them is the machine's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.helpers.anonymous_pool import AnonymousPool
from tests.helpers.processes import children_of
from tests.helpers.serve_region import ROOT, ServingProcess, serving_process
from tests.process.transport_reader import (
    POOL_BYTES,
    broken_guards,
    fill_pool,
    late_writes,
)

SOURCE_BYTES = 4 << 20
LOAD_SECONDS = 0.6
ANSWER_SECONDS = 90.0
RECOVERY_SECONDS = 60.0
SLACK_SECONDS = 8.0
"""What a busy machine may add to a deadline."""
CALM_SECONDS = 0.2
IDLE_LINKS = 4
"""Connections to one owner that may be kept, two for each way; more would be a leak."""
OWN_COUNTS = {
    "tcp": None,
    "ucx": "pushed_bytes",
    "ucx-read": "one_sided_bytes",
    "ucp": "pushed_bytes",
}
"""Which of the transport's counts grows when it works as meant; None: reads succeed."""


@dataclass(frozen=True, slots=True)
class Blow:
    """What happens to whom, and when."""

    victim: str
    deed: str
    moment: float
    pause: float

    @staticmethod
    def of(choice: random.Random, has_agents: bool) -> Blow:
        deeds = ["kill", "stop"] + (["kill agent", "stop agent"] if has_agents else [])
        return Blow(
            choice.choice(("owner", "reader")),
            choice.choice(deeds),
            choice.uniform(0.0, LOAD_SECONDS * 0.8),
            choice.choice((0.05, 0.5, 1.5, 3.0)),
        )


@dataclass
class Verdicts:
    """Over all runs."""

    runs: int = 0
    blows: Counter[str] = field(default_factory=Counter)
    good: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    longest_overrun: float = 0.0
    slowest_fence: float = 0.0
    """Seconds from a reader's death to that of its last agent."""


class Campaign:
    """One owner and one reader, started again whenever they were killed."""

    def __init__(self, kind: str, seed: int, stack: ExitStack) -> None:
        self._kind = kind
        self._seed = seed
        self._pool = stack.enter_context(AnonymousPool(POOL_BYTES))
        fill_pool(self._pool.view)
        self._owner_life = stack.enter_context(ExitStack())
        self._reader_life = stack.enter_context(ExitStack())
        self._owner: ServingProcess = self._start_owner()
        self._reader: subprocess.Popen[str] = self._start_reader()
        self._usual = self._ask_read(CALM_SECONDS, 0)
        self.verdicts = Verdicts()
        self.last: Blow | None = None

    def run(self, number: int) -> None:
        choice = random.Random(self._seed * 1_000_003 + number)
        blow = Blow.of(choice, self._kind != "tcp")
        verdicts = self.verdicts
        verdicts.runs += 1
        self.last = blow
        verdicts.blows[f"{blow.deed} of {blow.victim}"] += 1
        self._say(f"read {LOAD_SECONDS} {number}")
        time.sleep(blow.moment)
        self._strike(blow, choice)
        where = f"run {number} ({blow.deed} of {blow.victim} at {blow.moment:.3f} s)"
        if blow.victim == "reader" and blow.deed == "kill":
            self._judge_dead_reader(where)
        else:
            # Only a stop of the reader itself holds its clock's user up.
            stood = blow.pause if (blow.victim, blow.deed) == ("reader", "stop") else 0.0
            self._judge(where, self._answer(), stood)
        if blow.victim == "owner" and blow.deed == "kill":
            self._owner = self._start_owner()
            self._introduce()
        self._await_recovery(where, number)

    def _strike(self, blow: Blow, choice: random.Random) -> None:
        pid = self._owner.process.pid if blow.victim == "owner" else self._reader.pid
        agents = children_of(pid)
        match blow.deed:
            case "kill":
                os.kill(pid, signal.SIGKILL)
            case "stop":
                with _stopped([-os.getpgid(pid)]):
                    time.sleep(blow.pause)
            case "kill agent" if agents:
                _signal(choice.choice(agents), signal.SIGKILL)
            case "stop agent" if agents:
                with _stopped([choice.choice(agents)]):
                    time.sleep(blow.pause)

    def _judge(self, where: str, tally: dict[str, Any], pause: float) -> None:
        verdicts = self.verdicts
        verdicts.good += tally["good"]
        verdicts.failed.update(tally["failed"])
        overrun = tally["longest_overrun"] - pause
        verdicts.longest_overrun = max(verdicts.longest_overrun, overrun)
        for name in ("late_writes", "broken_guards", "wrong_bytes", "quarantined_bytes"):
            if tally[name]:
                verdicts.problems.append(f"{where}: {name} {tally[name]}")
        if overrun > SLACK_SECONDS:
            verdicts.problems.append(f"{where}: a read took {overrun:.1f} s beyond its deadline")

    def _judge_dead_reader(self, where: str) -> None:
        """Its pool is the next life's once its agents are gone, which must happen by itself."""
        agents = self._agents
        self._reader.wait(ANSWER_SECONDS)
        begun = time.monotonic()
        while any(_is_running(pid) for pid in agents):
            if time.monotonic() - begun > ANSWER_SECONDS:
                self.verdicts.problems.append(f"{where}: agents outlive their daemon")
                break
            time.sleep(0.002)
        self.verdicts.slowest_fence = max(self.verdicts.slowest_fence, time.monotonic() - begun)
        broken = broken_guards(self._pool.view)
        fill_pool(self._pool.view)
        time.sleep(0.3)
        late = late_writes(self._pool.view)
        if broken or late:
            self.verdicts.problems.append(f"{where}: {broken} guards, {late} late after death")
        self._reader = self._start_reader()

    def _await_recovery(self, where: str, number: int) -> None:
        """Until reads succeed over this transport, with no more descriptors than ever."""
        name = OWN_COUNTS[self._kind]
        deadline = time.monotonic() + RECOVERY_SECONDS
        before: int | None = None
        while True:
            tally = self._ask_read(CALM_SECONDS, number)
            self._judge(f"{where}, afterwards", tally, 0.0)
            count = tally["good"] if name is None else tally["moved"][name]
            grew = count > 0 if name is None or before is None else count > before
            before = count
            leaks = [
                f"{what} {tally[what]}, at first {self._usual[what]}"
                for what in ("descriptors", "threads")
                if tally[what] > self._usual[what] + IDLE_LINKS
            ]
            if tally["good"] and grew and not leaks and not tally["failed"]:
                return
            if time.monotonic() > deadline:
                trouble = leaks or [f"{tally['good']} reads, {tally['failed']}, {tally['moved']}"]
                self.verdicts.problems.append(f"{where}: no recovery: {'; '.join(trouble)}")
                return

    # ---- processes ----

    def _start_owner(self) -> ServingProcess:
        self._owner_life.close()
        return self._owner_life.enter_context(
            serving_process(self._kind, self._seed, SOURCE_BYTES, 0.0)
        )

    def _start_reader(self) -> subprocess.Popen[str]:
        self._reader_life.close()
        process = self._reader_life.enter_context(
            _reading_process(self._kind, self._pool, self._seed)
        )
        self._reader = process
        self._answer()
        self._introduce()
        return process

    def _introduce(self) -> None:
        address = self._owner.address
        self._say(f"peer {address.transport} {address.address} {address.incarnation}")

    def _ask_read(self, seconds: float, seed: int) -> dict[str, Any]:
        self._say(f"read {seconds} {seed}")
        return self._answer()

    def _say(self, line: str) -> None:
        self._agents = children_of(self._reader.pid)
        assert self._reader.stdin is not None
        self._reader.stdin.write(line + "\n")
        self._reader.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._reader.stdout is not None
        ready, _, _ = select.select([self._reader.stdout], [], [], ANSWER_SECONDS)
        assert ready, f"the reader does not answer within {ANSWER_SECONDS} s: a read hangs"
        line = self._reader.stdout.readline()
        assert line, f"the reader ended by itself: {self._reader.poll()}"
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def _reading_process(kind: str, pool: AnonymousPool, seed: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.process.transport_reader", kind]
    with subprocess.Popen(
        [*command, str(pool.descriptor), str(seed), str(SOURCE_BYTES)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[pool.descriptor],
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            _signal(-process.pid, signal.SIGKILL)


@contextmanager
def _stopped(targets: list[int]) -> Iterator[None]:
    for target in targets:
        _signal(target, signal.SIGSTOP)
    try:
        yield
    finally:
        for target in targets:
            _signal(target, signal.SIGCONT)


def _signal(target: int, number: signal.Signals) -> None:
    """To a process, or a group by its negative number; one that has just ended needs none."""
    try:
        if target < 0:
            os.killpg(-target, number)
        else:
            os.kill(target, number)
    except ProcessLookupError:
        return


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def run_campaign(
    kind: str, seed: int, runs: int, first: int = 0, *, says_each: bool = False
) -> Verdicts:
    with ExitStack() as stack:
        campaign = Campaign(kind, seed, stack)
        for number in range(first, first + runs):
            begun = time.monotonic()
            campaign.run(number)
            if says_each:
                taken = time.monotonic() - begun
                print(f"run {number}: {taken:.1f} s, {campaign.last}", file=sys.stderr)
        return campaign.verdicts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.process.transport_campaign")
    parser.add_argument("--transport", choices=sorted(OWN_COUNTS), default="tcp")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    args = parser.parse_args()
    begun = time.monotonic()
    verdicts = run_campaign(args.transport, args.seed, args.runs, args.first, says_each=True)
    print(f"{args.transport}: {verdicts.runs} runs in {time.monotonic() - begun:.0f} s")
    print(f"  blows: {dict(sorted(verdicts.blows.items()))}")
    print(f"  reads: {verdicts.good} good, failed {dict(verdicts.failed)}")
    print(
        f"  longest beyond a deadline {verdicts.longest_overrun:.2f} s;"
        f" agents of a killed reader gone after {verdicts.slowest_fence * 1000:.0f} ms"
    )
    for problem in verdicts.problems:
        print(f"  PROBLEM {problem}")
    if verdicts.problems:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
