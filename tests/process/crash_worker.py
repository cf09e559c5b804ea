"""A client process of the crash campaign: mixed load on a daemon until that dies, round by round.

Reads `go SOCKET ROUND CHAINS` lines, and says line by line what it did:

    b CHAIN         is about to stage this chain
    a CHAIN I,J     blocks I and J of it were acknowledged
    w CHAIN WHAT    something that must never be: wrong bytes, or an uncommitted block
    e TEXT          an error that no dead daemon explains
    done READS      the round is over; so many blocks were read

The parent keeps the journal. What a chain is, and whether it is abandoned, follows from its number.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
import traceback
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from client_sdk import SyncClient
from client_sdk.sync_client import StagedWrite
from emberkv_proto.errors import EmberError, UnavailableError
from emberkv_proto.types import BlockHash
from tests.helpers.chains import NAMESPACE, chain_of, read_chain, stage_chain

CHAIN_BLOCKS = 6
ABANDONED_FRACTION = 0.3
SHARED_FRACTION = 0.15
UNSUMMED_FRACTION = 0.4
"""Commits that leave the checksums to the daemon."""
SHARED_WORKER = 15
LEFT_STAGED = 3
"""Abandoned writes that a thread keeps open; older ones it aborts."""
ROUND_SECONDS = 20.0
"""After which a round ends though the daemon lives."""


def number_of(round_: int, worker: int, thread: int, count: int) -> int:
    return round_ << 24 | worker << 20 | thread << 16 | count


def hashes_of(number: int) -> list[BlockHash]:
    return chain_of(number, CHAIN_BLOCKS)


def is_abandoned(number: int) -> bool:
    """Whether nobody ever commits this chain."""
    return random.Random(number).random() < ABANDONED_FRACTION


class Load:
    """One thread's part of one round."""

    def __init__(self, client: SyncClient, round_: int, worker: int, thread: int) -> None:
        self._client = client
        self._place = (round_, worker, thread)
        self._rng = random.Random(number_of(round_, worker, thread, 0))
        self._count = 0
        self._written: deque[int] = deque(maxlen=200)
        self._left: deque[StagedWrite] = deque()
        self.reads = 0

    def run(self, chains: int) -> None:
        """Until the daemon dies, which is an EmberError."""
        ends = time.monotonic() + ROUND_SECONDS
        while time.monotonic() < ends:
            step = self._rng.random()
            if step < 0.6 and self._count < chains:
                self._write()
            elif step < 0.9 and self._written:
                self._read(self._rng.choice(self._written))
            elif step < 0.95 and self._written:
                self._client.prefetch(hashes_of(self._rng.choice(self._written)), 1.0)
            else:
                self._client.heartbeat()

    def close(self) -> None:
        for write in self._left:
            write.abort()

    def _write(self) -> None:
        self._count += 1
        round_, worker, thread = self._place
        is_shared = self._rng.random() < SHARED_FRACTION
        number = (
            number_of(round_, SHARED_WORKER, 0, self._count)
            if is_shared
            else number_of(round_, worker, thread, self._count)
        )
        say(f"b {number}")
        write = stage_chain(self._client, hashes_of(number))
        if is_abandoned(number):
            self._left.append(write)
            if len(self._left) > LEFT_STAGED:
                self._left.popleft().abort()
            return
        with write:
            mine = write.granted
            if mine:
                if self._rng.random() < UNSUMMED_FRACTION:
                    write.commit_unsummed()
                else:
                    write.commit()
                say(f"a {number} {','.join(map(str, mine))}")
        self._written.append(number)

    def _read(self, number: int) -> None:
        try:
            self.reads += read_chain(self._client, hashes_of(number))
        except AssertionError as error:
            say(f"w {number} {error}")


def say(line: str) -> None:
    """In one write, so that threads' lines do not mix."""
    os.write(1, line.encode() + b"\n")


def run_thread(socket_path: str, round_: int, worker: int, thread: int, chains: int) -> int:
    load: Load | None = None
    try:
        with SyncClient(socket_path, NAMESPACE, timeout_seconds=5.0) as client:
            load = Load(client, round_, worker, thread)
            try:
                load.run(chains)
            finally:
                with contextlib.suppress(EmberError):
                    load.close()
    except UnavailableError:
        pass  # the daemon was killed
    except Exception as error:
        # A dead daemon voids leases and stages, with errors of their own; anything else is news.
        if not isinstance(error, EmberError) or client_lives(socket_path):
            say("e " + traceback.format_exc().replace("\n", " | "))
    return load.reads if load is not None else 0


def client_lives(socket_path: str) -> bool:
    """Whether a daemon still answers there."""
    with contextlib.suppress(EmberError), SyncClient(socket_path, NAMESPACE) as client:
        client.connect()
        return True
    return False


def main(worker: int, threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        say("ready")
        for line in sys.stdin:
            _, socket_path, round_, chains = line.split()
            runs = [
                pool.submit(run_thread, socket_path, int(round_), worker, thread, int(chains))
                for thread in range(threads)
            ]
            say(f"done {sum(run.result() for run in runs)}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
