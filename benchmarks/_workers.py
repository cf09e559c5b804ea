"""Child processes that take orders: a JSON line in, a JSON line out.

The children of peers run in venvs of their own, so this file needs the standard library only.
"""

from __future__ import annotations

import json
import mmap
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ANSWER_SECONDS = 120.0
END_SECONDS = 10.0


class WorkerFailedError(Exception):
    """A child died, answered an error or did not answer in time."""


@dataclass(frozen=True, slots=True)
class Timed:
    """What a child moved, and when: monotonic seconds, which all processes of a machine share."""

    byte_count: int
    begun: float
    ended: float


def timed(byte_count: int, work: Callable[[], None]) -> dict[str, Any]:
    """Do the work; a `Timed` as it travels."""
    begun = time.monotonic()
    work()
    return {"byte_count": byte_count, "begun": begun, "ended": time.monotonic()}


def page_memory(byte_count: int) -> memoryview:
    """Memory that begins on a page, as a pool's blocks do.

    An array of numpy begins 16 bytes into one, and copies from a page's begin to there are what
    glibc before 2.39 does several times slower than others on AMD's Zen: they would say nothing of
    a store.
    """
    return memoryview(mmap.mmap(-1, byte_count))


def serve(verbs: Mapping[str, Callable[..., Any]]) -> None:
    """The child's side: obey until stdin ends. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = {"ok": verbs[order.pop("verb")](**order)}
        except Exception as error:  # whatever it is, the parent raises it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


class Worker:
    """The parent's side of one child."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
        )
        self._pending = b""

    def tell(self, verb: str, **arguments: object) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"verb": verb, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerFailedError(f"{verb}: the child is gone") from None

    def answer(self, timeout_seconds: float = ANSWER_SECONDS) -> Any:
        """What the child answered to the oldest order. Raises WorkerFailedError."""
        line = self._line(time.monotonic() + timeout_seconds)
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerFailedError(answer["error"])
        return answer["ok"]

    def ask(self, verb: str, **arguments: object) -> Any:
        self.tell(verb, **arguments)
        return self.answer()

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def close(self) -> None:
        """End the child: by itself, else by signals."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        end_process(self._process)
        self._process.stdout.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(max(deadline - time.monotonic(), 0.0)):
                    raise WorkerFailedError("no answer in time")
                data = os.read(descriptor, 1 << 16)
                if not data:
                    code = self._process.wait(END_SECONDS)
                    raise WorkerFailedError(f"the child ended with code {code}")
                self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return line


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Wait for a child that was told to end; then SIGTERM, then SIGKILL."""
    for number in (0, signal.SIGTERM, signal.SIGKILL):
        process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
            return


def at_once(workers: Sequence[Worker], verb: str, **arguments: object) -> list[Any]:
    """Give all the same order at the same time; what each answered."""
    for worker in workers:
        worker.tell(verb, **arguments)
    return [worker.answer() for worker in workers]


def gigabytes_per_second(answers: Sequence[Mapping[str, Any]]) -> float:
    """What all moved together, from the first one's begin to the last one's end."""
    all_timed = [Timed(**answer) for answer in answers]
    seconds = max(t.ended for t in all_timed) - min(t.begun for t in all_timed)
    return sum(t.byte_count for t in all_timed) / seconds / 1e9
