"""What a server's processes cost, as the benchmarks count it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks._process_costs import await_quiet, costs, cpu_seconds
from tests.helpers.cluster import wait_until

pytestmark = pytest.mark.process
MIB = 1 << 20
CHILD = """
import os, sys, time
kept = bytearray(40 << 20)
kept[::4096] = bytes(len(kept[::4096]) * [1])
parent = os.getpid()
if os.fork() == 0:
    open("/proc/self/comm", "w").write("worker (of 1)")
    while os.getppid() == parent:
        time.sleep(0.02)
    os._exit(0)
print("ready", flush=True)
sys.stdin.readline()
begun = time.process_time()
while time.process_time() - begun < 0.3:
    pass
print("done", flush=True)
sys.stdin.read()
"""


def test_cpu_and_memory_are_counted_for_all_processes_of_a_session() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            assert server.stdout.readline() == "ready\n"
            await_quiet(server.pid)
            found = {cost.name: cost for cost in costs(server.pid)}
            assert len(found) == 2
            worker = found.pop("worker (of 1)")
            (server_cost,) = found.values()
            assert worker.own_bytes > 30 * MIB
            assert server_cost.own_bytes > 30 * MIB
            before = cpu_seconds(server.pid)
            server.stdin.write("go\n")
            server.stdin.flush()
            assert server.stdout.readline() == "done\n"
            await_quiet(server.pid)
            assert 0.3 <= cpu_seconds(server.pid) - before < 3.0
        finally:
            server.stdin.close()
    wait_until(lambda: not costs(server.pid), "the worker ends after its parent")
