"""One daemon in full, as it says itself: tiers, drives, pins, tenants, engines."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from client_sdk.cli.operate import Daemon, quotas
from client_sdk.cli.remote import daemon_status
from client_sdk.cli.status import daemon_json, mebibytes
from client_sdk.status import NodeStatus


async def read_node(daemon: Daemon) -> tuple[NodeStatus, list[dict[str, Any]]]:
    """Its status and its tenants. Raises EmberError."""
    status = await daemon_status(daemon.address, daemon.access)
    if status.state == "recovering":
        return status, []
    return status, await quotas(daemon)


def node_json(address: str, status: NodeStatus, tenants: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "address": address,
        "node_id": status.node_id,
        "incarnation": status.incarnation,
        **daemon_json(status),
        "tenants": tenants,
        "engines": [engine.engine_id for engine in status.engines],
    }


def print_node(
    console: Console, address: str, status: NodeStatus, tenants: list[dict[str, Any]]
) -> None:
    console.print(
        f"{status.node_id} at {address}: {status.state}, emberkv {status.version}, up"
        f" {status.uptime_seconds:.0f} s, incarnation {status.incarnation}",
        markup=False,
    )
    if status.state == "recovering":
        return
    console.print(
        f"{status.sessions} sessions, {status.leases} leases, {status.staged_blocks} staged blocks,"
        f" engines: {', '.join(engine.engine_id for engine in status.engines) or 'none'}",
        markup=False,
    )
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("tier or drive", "state", "blocks", "MiB", "of", "MiB written, ever"):
        right = heading not in ("tier or drive", "state")
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    for tier in status.tiers:
        sizes = mebibytes(tier.used_bytes), mebibytes(tier.capacity_bytes)
        table.add_row(tier.tier.name, tier.state, str(tier.blocks), *sizes, "")
    for drive in status.drives:
        sizes = mebibytes(drive.used_bytes), mebibytes(drive.capacity_bytes)
        worn = mebibytes(drive.written_bytes_total)
        table.add_row(f"  {drive.path}", drive.state, "", *sizes, worn)
    console.print(table)
    pins = status.pins
    console.print(
        f"pins: {pins.hard_blocks} hard ({mebibytes(pins.hard_bytes)} of"
        f" {mebibytes(pins.limit_bytes)} MiB), {pins.soft_blocks} soft"
    )
    limited = [t for t in tenants if t["dram_limit_bytes"] or t["ssd_limit_bytes"]]
    console.print(f"tenants: {len(tenants)}, {len(limited)} with a quota (see `emberkv quota`)")
