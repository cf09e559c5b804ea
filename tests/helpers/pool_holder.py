"""Runs as a process of its own: locks a file, and leaves the lock to a child for a while.

python -m tests.helpers.pool_holder PATH SECONDS
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys


def main() -> None:
    path, seconds = sys.argv[1:]
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    subprocess.Popen(
        ["sleep", seconds],
        pass_fds=[descriptor],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    print("held by a child", flush=True)


if __name__ == "__main__":
    main()
