"""`emberkv up`: a local cluster until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from client_sdk.cli.cluster import Cluster, until_stopped
from client_sdk.cli.cluster_plan import ClusterSettings, plan_cluster, require_free_ports
from client_sdk.cli.config_show import combined_settings
from client_sdk.settings import load_settings


def run_up(console: Console, config: Path | None, overrides: Sequence[str]) -> int:
    """Start, print the addresses, wait for SIGINT or SIGTERM, and clean up.

    Returns 0 when it was stopped, 1 when a process ended by itself.

    Raises:
        ConfigError, PreflightError: before anything is started.
        UnavailableError: a process did not start.
    """
    load_settings(combined_settings(), config, overrides)  # all sections, before any process
    section = load_settings(ClusterSettings, config, overrides).cluster
    require_free_ports(section)
    cluster = Cluster(plan_cluster(section, config, overrides), console.print)
    return asyncio.run(_serve(console, cluster))


async def _serve(console: Console, cluster: Cluster) -> int:
    stop = asyncio.Event()
    task = asyncio.current_task()
    loop = asyncio.get_running_loop()
    started = False

    def on_signal() -> None:
        if started and not stop.is_set():
            stop.set()
        elif task is not None:
            task.cancel()  # while starting; or a second time, while ending

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    try:
        async with cluster:
            await cluster.start()
            await cluster.wait_routed()
            started = True
            _print_addresses(console, cluster)
            ended = await until_stopped(cluster, stop)
            if ended is not None:
                console.print(ended, markup=False)
            console.print("stopping")
    except asyncio.CancelledError:
        return 130
    return 0 if ended is None else 1


def _print_addresses(console: Console, cluster: Cluster) -> None:
    plan = cluster.plan
    console.print(
        f"router   {plan.router_url}/v1/chat/completions", highlight=False, soft_wrap=True
    )
    console.print(f"page     {plan.router_url}/ui", highlight=False, soft_wrap=True)
    console.print(f"index    {plan.index_address}", highlight=False, soft_wrap=True)
    for node in plan.nodes:
        console.print(
            f"{node.node_id}   {node.socket_path}   gRPC {node.grpc_address}"
            f"   engine {node.engine_url}",
            highlight=False,
            soft_wrap=True,
        )
    console.print(f"logs     {plan.log_dir}", highlight=False, soft_wrap=True)
    console.print(
        f"try      emberkv status --index {plan.index_address}\n"
        "Ctrl-C ends everything and removes its files",
        highlight=False,
        soft_wrap=True,
    )
