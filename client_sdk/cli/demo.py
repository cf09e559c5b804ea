"""`emberkv demo`: kill engines and daemons under load and compare every answer."""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
from rich.console import Console

from client_sdk.cli import demo_phases as phases
from client_sdk.cli.cluster import Cluster
from client_sdk.cli.cluster_plan import (
    LOOPBACK,
    SHM,
    ClusterPlan,
    ClusterSection,
    choose_port,
    plan_cluster,
)
from client_sdk.cli.demo_run import DemoPrompt, DemoRun
from client_sdk.cli.process import ProcessSpec
from client_sdk.cli.report import DemoReport, print_report, write_json
from client_sdk.cli.trace import (
    TokenRange,
    TraceRequest,
    default_trace_path,
    load_trace,
    prompt_token_ids,
)
from emberkv_proto.errors import ConfigError, EmberError

MODEL = "ember-demo"
BLOCK_TOKENS = 16
VOCAB = 4096
MAX_TOKENS = 8
REFERENCE = "reference"
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class DemoOptions:
    json_file: Path | None = None
    quick: bool = False
    keep: bool = False
    trace: Path | None = None
    base_dir: Path | None = None


@dataclass(frozen=True, slots=True)
class DemoSize:
    """How much is sent, and how small the tiers are, so that each of them has to work."""

    requests: int
    longest_blocks: int
    """Longer requests of the trace are left out."""
    engine_blocks: int
    dram_bytes: int


MIB = 1 << 20
FULL = DemoSize(requests=150, longest_blocks=1000, engine_blocks=320, dram_bytes=20 * MIB)
QUICK = DemoSize(requests=24, longest_blocks=20, engine_blocks=64, dram_bytes=4 * MIB)


def run_demo(console: Console, options: DemoOptions) -> int:
    """Run it. Returns 0 when everything held, 1 when not, 130 after Ctrl-C.

    Raises:
        ConfigError: nothing was started: no trace, or a place that cannot be written to.
    """
    if options.json_file is not None and not options.json_file.absolute().parent.is_dir():
        raise ConfigError(f"--json {options.json_file}: there is no such directory")
    size = QUICK if options.quick else FULL
    prompts = read_prompts(options.trace or default_trace_path(), size)
    section = ClusterSection(router_port=0, index_port=0, base_dir=options.base_dir)
    plan = with_reference(plan_cluster(section, overrides=demo_settings(size)))
    return asyncio.run(_interruptible(console, options, plan, prompts))


def read_prompts(path: Path, size: DemoSize) -> list[DemoPrompt]:
    requests = load_trace(path, 10 * size.requests)
    fitting = [r for r in requests if len(r.block_ids) <= size.longest_blocks]
    return [_prompt(request) for request in fitting[: size.requests]]


def _prompt(request: TraceRequest) -> DemoPrompt:
    tokens = prompt_token_ids(request, BLOCK_TOKENS, TokenRange(0, VOCAB))
    return DemoPrompt(f"trace request {request.number}", tuple(tokens))


def demo_settings(size: DemoSize) -> tuple[str, ...]:
    """Small tiers: HBM holds less than DRAM, DRAM less than the trace, SSD all of it."""
    return (
        f"engine.model={MODEL}",
        f"engine.vocab={VOCAB}",
        f"engine.block_tokens={BLOCK_TOKENS}",
        f"engine.num_blocks={size.engine_blocks}",
        f"dram.capacity_bytes={size.dram_bytes}",
        f"dram.extent_bytes={2 * MIB}",
        f"ssd.capacity_bytes={512 * MIB}",
        f"ssd.segment_bytes={8 * MIB}",
        "index.capacity_blocks=65536",
    )


def with_reference(plan: ClusterPlan) -> ClusterPlan:
    """Add the engine without any cache: no store, and no blocks kept for later requests."""
    node = plan.nodes[0].engine
    endpoint = plan.run_dir / f"{REFERENCE}.json"
    own = (
        f"engine.engine_id={REFERENCE}",
        "engine.socket_path=''",
        "engine.prefix_cache=false",
        f"engine.port={choose_port()}",
        f"engine.endpoint_file={endpoint}",
    )
    arguments = list(node.arguments)
    for override in own:
        arguments += ["--set", override]
    log = plan.log_dir / f"{REFERENCE}.log"
    spec: ProcessSpec = replace(
        node, name=REFERENCE, arguments=tuple(arguments), endpoint_file=endpoint, log_file=log
    )
    return replace(plan, extras=(spec,))


async def _interruptible(
    console: Console, options: DemoOptions, plan: ClusterPlan, prompts: list[DemoPrompt]
) -> int:
    task = asyncio.current_task()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: task.cancel() if task is not None else None)
    try:
        return await _demo(console, options, plan, prompts)
    except asyncio.CancelledError:
        console.print("interrupted; every process and file is gone")
        return INTERRUPTED


async def _demo(
    console: Console, options: DemoOptions, plan: ClusterPlan, prompts: list[DemoPrompt]
) -> int:
    report = DemoReport()
    began = time.monotonic()
    logs = ""
    cluster = Cluster(plan, lambda text: console.print(f"  {text}"))
    async with cluster, aiohttp.ClientSession() as session:
        run = DemoRun(console, cluster, session, prompts, MODEL, BLOCK_TOKENS, MAX_TOKENS, report)
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
    expect_nothing_left(report, plan, pids)
    report.seconds = time.monotonic() - began
    print_report(console, report)
    if logs:
        console.print(f"logs: {logs}", highlight=False)
    if options.json_file is not None:
        write_json(report, options.json_file)
    return 0 if report.ok else 1


async def _play_all(run: DemoRun) -> None:
    run.console.print(f"  starting {REFERENCE}")
    await run.cluster.start_one(REFERENCE)
    url = run.cluster.endpoints[REFERENCE]["url"]
    await phases.reference_phase(run, run.client(url))
    await run.cluster.end_one(REFERENCE)
    await run.cluster.start()
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
