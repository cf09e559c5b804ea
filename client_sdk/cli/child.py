"""Run a module as `python -m` would, in a process that ends when its launcher ends.

`python -m client_sdk.cli.child LAUNCHER_PID MODULE [ARG...]`. The kernel sends SIGTERM when the
launcher dies, even by kill -9, so no server outlives the cluster it was started for.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    launcher, module = int(sys.argv[1]), sys.argv[2]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != launcher:
        sys.exit(f"launcher {launcher} ended before {module} began")
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
