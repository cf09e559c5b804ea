"""An engine as the daemon sees one: a process that writes a chain, leases it and stages another.

`python -m tests.helpers.engine_process hold SOCKET CHAIN` says "holding"; then, for each line that
it is sent, it copies what it leased and says how that was: "right", "wrong" or the error's name.

`... crash SOCKET TIMES` is as many engines, one after the other, that do all that and kill
themselves (-9); it says their number every STEP engines and waits to be told to go on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from client_sdk import SyncClient
from client_sdk.sync_borrowed import Lease, StagedWrite
from emberkv_proto.errors import EmberError
from tests.helpers.chains import NAMESPACE, chain_of, payload_of, stage_chain, write_chain
from tests.helpers.server_process import ROOT

BLOCKS = 6
STEP = 40
CHAINS = 8
"""Different chains that crashing engines write; so the store's content does not grow."""
WAIT_SECONDS = 60.0


class EngineProcess:
    """Either of these as a process; killed at the end of its `with` block."""

    def __init__(self, mode: str, socket_path: Path, number: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.engine_process", mode, socket_path, str(number)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def heard(self) -> str:
        """The next line it says; empty when it has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def ask(self) -> str:
        """Send a line; return what it says to that."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self.heard()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait(WAIT_SECONDS)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def borrow(client: SyncClient, chain: int) -> tuple[Lease, StagedWrite]:
    """Write a chain, lease it, and leave the next one staged."""
    hashes = chain_of(chain, BLOCKS)
    write_chain(client, hashes)
    return client.acquire(hashes), stage_chain(client, chain_of(chain + 1, BLOCKS))


def read_again(lease: Lease, chain: int) -> str:
    hashes = chain_of(chain, BLOCKS)
    try:
        copies = [bytes(lease.view(i)) for i in range(lease.ready_blocks)]
        lease.require_valid()
    except EmberError as error:
        return type(error).__name__
    return "right" if copies == [payload_of(h) for h in hashes] else "wrong"


def hold(socket_path: str, chain: int) -> None:
    with SyncClient(socket_path, NAMESPACE, timeout_seconds=30.0) as client:
        lease, staged = borrow(client, chain)
        print("holding", flush=True)
        for _ in sys.stdin:
            print(read_again(lease, chain), flush=True)
        staged.abort()
        lease.release()


def crash(socket_path: str, times: int) -> None:
    for number in range(1, times + 1):
        pid = os.fork()
        if pid == 0:
            borrow(SyncClient(socket_path, NAMESPACE, timeout_seconds=30.0), 2 * (number % CHAINS))
            os.kill(os.getpid(), signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert status == signal.SIGKILL, f"an engine ended with {status}"
        if number % STEP == 0:
            print(number, flush=True)
            sys.stdin.readline()


if __name__ == "__main__":
    {"hold": hold, "crash": crash}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
