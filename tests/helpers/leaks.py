"""What a test must not leave behind: file descriptors, threads, tasks, shared-memory files."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

SHM = Path("/dev/shm")
GRACE_SECONDS = 20.0
"""Only a test that leaks waits for so long; on a busy machine a thread ends late."""
# Threads and descriptors that a library keeps for the whole process once it was used.
_LASTING_THREADS = ("grpc", "pydevd", "Numba", "torch", "Thread-pool_spawner", "pytest_timeout")

_GRPC_POLLER = "_poll_wrapper"


@dataclass(frozen=True)
class Held:
    """A process's open things at one moment."""

    fds: frozenset[tuple[int, str]]
    threads: frozenset[str]
    shm: frozenset[str]


def held_now() -> Held:
    fds = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # closed since the listing
        if not target.startswith(("/proc/", "anon_inode:[eventpoll]", "/dev/null", "/dev/urandom")):
            fds.add((int(name), target))
    threads = {
        f"{thread.name}-{thread.ident}"
        for thread in threading.enumerate()
        if not thread.name.startswith(_LASTING_THREADS) and _GRPC_POLLER not in thread.name
    }
    # Tests name their files after their own process; what others have there is not ours to judge.
    own = f"-{os.getpid()}-"
    shm = {name for name in os.listdir(SHM) if own in name} if SHM.is_dir() else set()
    return Held(frozenset(fds), frozenset(threads), frozenset(shm))


def leaked_since(before: Held) -> list[str]:
    """Describe what is still held after a grace period. Library-owned fds are not ours to judge."""
    deadline = time.monotonic() + GRACE_SECONDS
    while True:
        after = held_now()
        leaks = [f"fd {fd} -> {target}" for fd, target in sorted(after.fds - before.fds)]
        leaks = _without_grpc_poller([leak for leak in leaks if not _is_library_fd(leak)])
        leaks += [f"thread {name}" for name in sorted(after.threads - before.threads)]
        leaks += [f"/dev/shm/{name}" for name in sorted(after.shm - before.shm)]
        if not leaks or time.monotonic() > deadline:
            return leaks
        gc.collect()
        time.sleep(0.05)


def _is_library_fd(leak: str) -> bool:
    return "anon_inode" in leak or "site-packages" in leak or "/sys/" in leak


def _without_grpc_poller(leaks: list[str]) -> list[str]:
    """Leave out the socket pair that grpc.aio's poller thread keeps while it lives."""
    has_poller = any(_GRPC_POLLER in thread.name for thread in threading.enumerate())
    if has_poller and len(leaks) == 2 and all(map(_is_end_of_pair, leaks)):
        return []
    return leaks


def _is_end_of_pair(leak: str) -> bool:
    """Whether it is one of `socketpair`: connected, and neither side has a name."""
    if "-> socket:" not in leak:
        return False
    try:
        with socket.socket(fileno=os.dup(int(leak.split()[1]))) as end:
            return end.family == socket.AF_UNIX and not end.getsockname() and not end.getpeername()
    except OSError:
        return False  # it is no longer open, or not connected
