"""The state of a running cluster: the index's view and each daemon's own, side by side."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from client_sdk.cli.remote import CALL_SECONDS, LOCAL, Access, daemon_status, indexed_nodes
from client_sdk.index_client import IndexClient, IndexedNode, RedisState
from client_sdk.status import NodeStatus
from emberkv_proto.errors import EmberError
from emberkv_proto.types import Tier


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node: what the index says, and what its daemon says or why it does not."""

    indexed: IndexedNode
    daemon: NodeStatus | None
    problem: str

    @property
    def index_matches(self) -> bool | None:
        """Whether the index counts the daemon's blocks, tier by tier; None while it cannot know."""
        if self.daemon is None:
            return None
        return all(
            indexed_blocks(self.indexed, tier.tier) == tier.blocks for tier in self.daemon.tiers
        )

    @property
    def hit_rate(self) -> float | None:
        """Blocks found over blocks asked for, since the daemon's start; None before any request."""
        if self.daemon is None:
            return None
        counters = self.daemon.counters
        local = counters.get("hit_blocks_dram", 0.0) + counters.get("hit_blocks_ssd", 0.0)
        asked = local + counters.get("missed_blocks", 0.0)  # some of these come from peers
        return (local + counters.get("hit_blocks_peer", 0.0)) / asked if asked else None


async def read_status(index_address: str, access: Access = LOCAL) -> list[NodeView]:
    """Ask the index for its nodes, and each node's daemon for itself.

    Raises:
        UnavailableError, DeadlineError: the index does not answer. A daemon that does not is
        reported as its node's problem.
    """
    index = IndexClient(index_address, timeout_seconds=CALL_SECONDS, tls=access.tls)
    try:
        nodes = await indexed_nodes(index)
    finally:
        await index.close()
    return list(await asyncio.gather(*(_view(node, access) for node in nodes)))


async def read_redis(index_address: str, access: Access = LOCAL) -> RedisState | None:
    """How the index stands to Redis; None when it is not shared. Raises as `read_status`."""
    index = IndexClient(index_address, timeout_seconds=CALL_SECONDS, tls=access.tls)
    try:
        return await index.redis()
    finally:
        await index.close()


def redis_line(state: RedisState) -> str:
    """One sentence for people."""
    if not state.is_up:
        return f"Redis is away: {state.problem}; this index answers from its own rows"
    return (
        f"shared through Redis by {state.writers}: {state.leases} daemons followed here,"
        f" {state.exact_nodes} of their nodes exact in Redis, {state.queued_rows} rows queued"
    )


async def _view(node: IndexedNode, access: Access) -> NodeView:
    try:
        return NodeView(node, await daemon_status(node.grpc_address, access), "")
    except EmberError as error:
        return NodeView(node, None, str(error))


def indexed_blocks(node: IndexedNode, tier: Tier) -> int:
    """How many blocks the index counts in a tier of a node."""
    return sum(digest.blocks for digest in node.tiers if digest.tier is tier)


def status_json(index_address: str, nodes: list[NodeView]) -> dict[str, Any]:
    return {"index_address": index_address, "nodes": [_node_json(node) for node in nodes]}


def _node_json(node: NodeView) -> dict[str, Any]:
    indexed, daemon = node.indexed, node.daemon
    return {
        "node_id": indexed.node_id,
        "incarnation": indexed.incarnation,
        "state": indexed.state,
        "exactness": indexed.exactness,
        "grpc_address": indexed.grpc_address,
        "index_lag_seconds": indexed.lag_seconds,
        "index_seq": indexed.seq,
        "index_blocks": {tier.tier.name.lower(): tier.blocks for tier in indexed.tiers},
        "index_matches_daemon": node.index_matches,
        "gaps": indexed.gaps,
        "snapshots": indexed.snapshots,
        "engines": [
            {"engine_id": e.engine_id, "url": e.url, "model": e.model, "role": e.role}
            for e in indexed.engines
        ],
        "daemon": None if daemon is None else {**daemon_json(daemon), "hit_rate": node.hit_rate},
        "problem": node.problem,
    }


def daemon_json(status: NodeStatus) -> dict[str, Any]:
    """All that a daemon says of itself, but for the engines' sessions, JSON-ready."""
    return {
        "state": status.state,
        "version": status.version,
        "uptime_seconds": status.uptime_seconds,
        "seq": status.seq,
        "sessions": status.sessions,
        "leases": status.leases,
        "staged_blocks": status.staged_blocks,
        "tiers": [{**asdict(t), "tier": t.tier.name.lower()} for t in status.tiers],
        "drives": [asdict(drive) for drive in status.drives],
        "pins": asdict(status.pins),
        "counters": status.counters,
    }


def print_status(console: Console, index_address: str, nodes: list[NodeView]) -> None:
    title = f"EmberKV, as the index at {index_address} sees it"
    table = Table(title=title, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("node", "state", "index", "lag s", "tier", "blocks", "MiB", "of", "hits"):
        right = heading in ("lag s", "blocks", "MiB", "of", "hits")
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    table.add_column("engines")
    for node in nodes:
        _add_rows(table, node)
    console.print(table)
    for node in nodes:
        if node.problem:
            console.print(f"{node.indexed.node_id}: {node.problem}", style="yellow", markup=False)
    if not nodes:
        console.print("no nodes yet")


def _add_rows(table: Table, node: NodeView) -> None:
    indexed, daemon = node.indexed, node.daemon
    engines = ", ".join(engine.engine_id for engine in indexed.engines) or "-"
    rate = "-" if node.hit_rate is None else f"{node.hit_rate:.0%}"
    state = daemon.state if daemon is not None and indexed.state == "ok" else indexed.state
    first = [indexed.node_id, state, indexed.exactness, f"{indexed.lag_seconds:.1f}"]
    if daemon is None:
        tiers = (Tier.DRAM, Tier.SSD)
        rows = [[tier.name, str(indexed_blocks(indexed, tier)), "-", "-"] for tier in tiers]
    else:
        rows = [
            [t.tier.name, str(t.blocks), mebibytes(t.used_bytes), mebibytes(t.capacity_bytes)]
            for t in daemon.tiers
        ]
    for number, row in enumerate(rows):
        lead, tail = (first, [rate, engines]) if number == 0 else ([""] * 4, ["", ""])
        table.add_row(*lead, *row, *tail)


def mebibytes(count: int) -> str:
    return f"{count / (1 << 20):.1f}"
