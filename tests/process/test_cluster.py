"""The local cluster's processes and files, with servers that do nothing but start and end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from client_sdk.cli import cluster as cluster_module
from client_sdk.cli.cluster import Cluster, until_stopped
from client_sdk.cli.cluster_plan import (
    SHM,
    ClusterPlan,
    ClusterSection,
    choose_port,
    plan_cluster,
)
from client_sdk.cli.process import ProcessSpec
from emberkv_proto.errors import InvalidRequestError, UnavailableError
from tests.helpers.processes import pids_with

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[2]


def fake(spec: ProcessSpec, mode: str) -> ProcessSpec:
    return replace(
        spec,
        module="tests.helpers.fake_server",
        arguments=(mode, *spec.arguments),
        environment=(("PYTHONPATH", str(ROOT)),),
        ready_seconds=60.0,
    )


def fake_plan(base_dir: Path, engine_mode: str = "serve") -> ClusterPlan:
    plan = plan_cluster(ClusterSection(base_dir=base_dir, router_port=0, index_port=0))
    nodes = tuple(
        replace(node, daemon=fake(node.daemon, "serve"), engine=fake(node.engine, engine_mode))
        for node in plan.nodes
    )
    return replace(plan, nodes=nodes, router=fake(plan.router, "serve"))


def assert_nothing_left(plan: ClusterPlan, base_dir: Path) -> None:
    assert not pids_with(plan.run_id)
    assert not list(SHM.glob(plan.pool_prefix + "*"))
    assert not list(base_dir.iterdir())


def remaining(word: str) -> list[int]:
    """Processes with the word that are still there in 10 s."""
    deadline = time.monotonic() + 30
    while (pids := pids_with(word)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return pids


async def test_a_cluster_starts_restarts_by_name_and_leaves_nothing(tmp_path: Path) -> None:
    plan = fake_plan(tmp_path)
    async with Cluster(plan) as cluster:
        await cluster.start()
        first = cluster.pids()
        assert len(first) == 5
        assert len(list(SHM.glob(plan.pool_prefix + "*"))) == 2
        cluster.kill("engine-a")
        assert not cluster.is_running("engine-a")
        await cluster.start_one("engine-a")
        await cluster.end_one("router")
        cluster.check_integrity()
        assert len({*first, *cluster.pids()}) == 6
        with pytest.raises(InvalidRequestError, match=r"engine-z.*engine-a"):
            cluster.kill("engine-z")
    assert_nothing_left(plan, tmp_path)


async def test_a_child_that_dies_at_start_shows_its_last_words(tmp_path: Path) -> None:
    plan = fake_plan(tmp_path, engine_mode="broken")
    with pytest.raises(UnavailableError, match=r"(?s)engine-. exited with status 3.*on fire"):
        async with Cluster(plan) as cluster:
            await cluster.start()
    assert_nothing_left(plan, tmp_path)


async def test_a_child_that_never_serves_is_given_up(tmp_path: Path) -> None:
    plan = fake_plan(tmp_path)
    silent = replace(fake(plan.router, "silent"), ready_seconds=1.5)
    silent = replace(silent, arguments=("silent", *plan.router.arguments[1:]))
    plan = replace(plan, router=silent)
    with pytest.raises(UnavailableError, match="router did not serve within"):
        async with Cluster(plan) as cluster:
            await cluster.start()
    assert_nothing_left(plan, tmp_path)


async def test_a_child_that_ignores_sigterm_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "END_SECONDS", 0.5)
    plan = fake_plan(tmp_path, engine_mode="stubborn")
    async with Cluster(plan) as cluster:
        await cluster.start()
        assert len(pids_with(plan.run_id)) == 5
    assert_nothing_left(plan, tmp_path)


async def test_a_child_that_ends_by_itself_is_noticed(tmp_path: Path) -> None:
    plan = fake_plan(tmp_path)
    async with Cluster(plan) as cluster:
        await cluster.start()
        stop = asyncio.Event()
        noticing = asyncio.ensure_future(until_stopped(cluster, stop))
        await asyncio.sleep(0)
        cluster.kill("node-b")
        ended = await asyncio.wait_for(noticing, 30)
        assert ended is not None
        assert ended.startswith("node-b ended")
        stop.set()
    assert_nothing_left(plan, tmp_path)


async def test_a_server_of_others_is_asked_for_its_health_and_killed_with_its_children(
    tmp_path: Path,
) -> None:
    plan = fake_plan(tmp_path)
    port = choose_port()
    foreign = replace(
        fake(plan.nodes[0].engine, "foreign"),
        arguments=("foreign", plan.run_id, f"--port={port}"),
        health_url=f"http://127.0.0.1:{port}/health",
    )
    plan = replace(plan, extras=(replace(foreign, name="other"),))
    async with Cluster(plan) as cluster:
        await cluster.start_one("other")
        assert cluster.endpoints["other"]["url"] == f"http://127.0.0.1:{port}"
        assert len(pids_with(f"--port={port}")) == 2
        cluster.kill("other")
        assert not await asyncio.to_thread(remaining, f"--port={port}")
    assert_nothing_left(plan, tmp_path)


async def test_logs_can_be_kept(tmp_path: Path) -> None:
    plan = fake_plan(tmp_path, engine_mode="broken")
    async with Cluster(plan) as cluster:
        with pytest.raises(UnavailableError):
            await cluster.start()
        kept = Path(cluster.keep_logs())
    assert os.listdir(tmp_path) == [kept.name]
    assert "on fire" in (kept / "engine-a.log").read_text()


def test_children_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    endpoint = tmp_path / "engine.json"
    program = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-m", "client_sdk.cli.child", str(os.getpid()),
    "tests.helpers.fake_server", "serve", "engine.endpoint_file={endpoint}"])
print(child.pid, flush=True)
time.sleep(60)
"""
    launcher = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT, text=True
    )
    try:
        assert launcher.stdout is not None
        child = int(launcher.stdout.readline())
        deadline = time.monotonic() + 60
        while not endpoint.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert endpoint.exists()
        launcher.send_signal(signal.SIGKILL)
        launcher.wait(timeout=90)
        while _lives(child) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not _lives(child)
    finally:
        launcher.kill()
        launcher.wait(timeout=90)
        launcher.stdout.close()


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z" and os.getpid() != pid
