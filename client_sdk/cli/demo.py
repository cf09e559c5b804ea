"""`emberkv demo`: kill engines and daemons under load and compare every answer."""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from rich.console import Console

from client_sdk.cli import demo_phases as phases
from client_sdk.cli.cluster import Cluster
from client_sdk.cli.cluster_plan import LOOPBACK, SHM, ClusterPlan, ClusterSection, plan_cluster
from client_sdk.cli.demo_run import DemoRun
from client_sdk.cli.demo_settings import (
    FULL,
    QUICK,
    REFERENCE,
    TORCH_ENGINE,
    DemoEngine,
    DemoPrompt,
    DemoSize,
    read_prompts,
    store_settings,
    torch_engine_settings,
    with_reference,
)
from client_sdk.cli.demo_vllm import (
    VLLM_ENGINE,
    VLLM_SIZE,
    require_vllm,
    with_vllm,
    write_tiny_model,
)
from client_sdk.cli.report import DemoReport, print_report, write_json
from client_sdk.cli.trace import default_trace_path
from emberkv_proto.errors import ConfigError, EmberError

INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class DemoOptions:
    json_file: Path | None = None
    quick: bool = False
    keep: bool = False
    trace: Path | None = None
    base_dir: Path | None = None
    vllm: Path | None = None
    """The Python of an environment with vLLM: its servers instead of the reference engine."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What one run is made of."""

    plan: ClusterPlan
    engine: DemoEngine
    size: DemoSize
    prompts: tuple[DemoPrompt, ...]


def run_demo(console: Console, options: DemoOptions) -> int:
    """Run it. Returns 0 when everything held, 1 when not, 130 after Ctrl-C.

    Raises:
        ConfigError: nothing was started: no trace, or a place that cannot be written to.
    """
    if options.json_file is not None and not options.json_file.absolute().parent.is_dir():
        raise ConfigError(f"--json {options.json_file}: there is no such directory")
    trace = options.trace or default_trace_path()
    section = ClusterSection(router_port=0, index_port=0, base_dir=options.base_dir)
    if options.vllm is None:
        size, engine = QUICK if options.quick else FULL, TORCH_ENGINE
        settings = (*torch_engine_settings(size), *store_settings(size))
        plan = with_reference(plan_cluster(section, overrides=settings))
        prompts = tuple(read_prompts(trace, size, engine))
        return asyncio.run(_interruptible(console, options, Setting(plan, engine, size, prompts)))
    size, engine = VLLM_SIZE, VLLM_ENGINE
    prompts = tuple(read_prompts(trace, size, engine))
    require_vllm(options.vllm)
    with tempfile.TemporaryDirectory(prefix="emberkv-model-") as directory:
        console.print("  writing a tiny model")
        write_tiny_model(options.vllm, Path(directory))
        plain = plan_cluster(section, overrides=store_settings(size))
        plan = with_vllm(plain, size, options.vllm, Path(directory))
        return asyncio.run(_interruptible(console, options, Setting(plan, engine, size, prompts)))


async def _interruptible(console: Console, options: DemoOptions, setting: Setting) -> int:
    task = asyncio.current_task()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, lambda: task.cancel() if task is not None else None)
    try:
        return await _demo(console, options, setting)
    except asyncio.CancelledError:
        console.print("interrupted; every process and file is gone")
        return INTERRUPTED


async def _demo(console: Console, options: DemoOptions, setting: Setting) -> int:
    report = DemoReport()
    began = time.monotonic()
    logs = ""
    cluster = Cluster(setting.plan, lambda text: console.print(f"  {text}"))
    async with cluster, aiohttp.ClientSession() as session:
        run = DemoRun(
            console=console,
            cluster=cluster,
            session=session,
            engine=setting.engine,
            prompts=setting.prompts,
            size=setting.size,
            report=report,
        )
        try:
            await _play_all(run)
        except EmberError as error:
            report.expect("all phases ran", False, str(error))
        report.expect_identical()
        if options.keep or not report.ok:
            logs = cluster.keep_logs()
        await session.close()
        pids = cluster.pids()
        await cluster.close()
    expect_nothing_left(report, setting.plan, pids)
    report.seconds = time.monotonic() - began
    print_report(console, report)
    if logs:
        console.print(f"logs: {logs}", highlight=False)
    if options.json_file is not None:
        write_json(report, options.json_file)
    return 0 if report.ok else 1


async def _play_all(run: DemoRun) -> None:
    run.console.print(f"  starting {REFERENCE}")
    run.cluster.spawn(REFERENCE)
    await run.cluster.start()
    await run.cluster.wait_ready(REFERENCE)
    url = run.cluster.endpoints[REFERENCE]["url"]
    await phases.reference_phase(run, run.client(url))
    await run.cluster.end_one(REFERENCE)
    await run.cluster.wait_routed()
    await phases.chat_phase(run)
    await phases.trace_phase(run)
    await phases.engine_back_phase(run)
    before = await phases.daemon_down_phase(run)
    await phases.daemon_back_phase(run, before)
    await phases.peer_phase(run)
    await phases.audit_phase(run)


def expect_nothing_left(report: DemoReport, plan: ClusterPlan, pids: list[int]) -> None:
    """After the cluster was closed: no process, no directory, no pool."""
    left = [f"pid {pid}" for pid in pids if Path(f"/proc/{pid}").exists()]
    left += [str(plan.run_dir)] if plan.run_dir.exists() else []
    left += [str(pool) for pool in SHM.glob(plan.pool_prefix + "*")]
    report.expect("nothing is left behind", not left, ", ".join(left) or f"on {LOOPBACK}, nothing")
