"""The nodes that an index knows: once, or as they change."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from rich.console import Console
from rich.table import Table

from client_sdk.cli.remote import CALL_SECONDS, indexed_nodes
from client_sdk.index_client import IndexClient, IndexedNode, WatchedNodes
from client_sdk.tls import Tls

Show = Callable[[WatchedNodes], None]


async def run_nodes(address: str, tls: Tls | None, show: Show) -> None:
    """Show the nodes as the index knows them now. Raises UnavailableError, DeadlineError."""
    client = IndexClient(address, timeout_seconds=CALL_SECONDS, tls=tls)
    try:
        show(WatchedNodes(True, tuple(await indexed_nodes(client)), ()))
    finally:
        await client.close()


async def run_watch(address: str, tls: Tls | None, show: Show) -> None:
    """Show the nodes, then every change, until the index goes: UnavailableError, DeadlineError."""
    client = IndexClient(address, timeout_seconds=CALL_SECONDS, tls=tls)
    try:
        changes: AsyncGenerator[WatchedNodes, None] = client.watch()
        async with aclosing(changes):
            async for change in changes:
                if change.is_whole or change.nodes or change.removed:
                    show(change)
    finally:
        await client.close()


def nodes_json(change: WatchedNodes) -> dict[str, Any]:
    return {
        "is_whole": change.is_whole,
        "nodes": [_node_json(node) for node in change.nodes],
        "removed": list(change.removed),
    }


def show_json_lines(write: Callable[[str], None]) -> Show:
    """One line of JSON a change, for a program that follows."""
    return lambda change: write(json.dumps(nodes_json(change)))


def show_text(console: Console) -> Show:
    """A table of all nodes, then a line for each node that changed."""

    def show(change: WatchedNodes) -> None:
        if change.is_whole:
            _print_table(console, change.nodes)
            return
        at = time.strftime("%H:%M:%S")
        for node in change.nodes:
            console.print(f"{at} {_line(node)}", markup=False, soft_wrap=True)
        for node_id in change.removed:
            console.print(f"{at} {node_id} is known no longer", markup=False, soft_wrap=True)

    return show


def _node_json(node: IndexedNode) -> dict[str, Any]:
    return {
        "node_id": node.node_id,
        "state": node.state,
        "exactness": node.exactness,
        "incarnation": node.incarnation,
        "seq": node.seq,
        "grpc_address": node.grpc_address,
        "blocks": {digest.tier.name.lower(): digest.blocks for digest in node.tiers},
        "lag_seconds": round(node.lag_seconds, 3),
        "engines": [
            {
                "engine_id": engine.engine_id,
                "url": engine.url,
                "model": engine.model,
                "role": engine.role,
                "dp_rank": engine.dp_rank,
            }
            for engine in node.engines
        ],
    }


def _line(node: IndexedNode) -> str:
    engines = ", ".join(f"{engine.engine_id} ({engine.model})" for engine in node.engines)
    return f"{node.node_id} {node.state} {node.exactness}; engines: {engines or 'none'}"


def _print_table(console: Console, nodes: Sequence[IndexedNode]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("node", "state", "index", "life", "address", "blocks", "engines"):
        table.add_column(heading, no_wrap=heading != "engines")
    for node in nodes:
        blocks = ", ".join(f"{digest.tier.name} {digest.blocks}" for digest in node.tiers)
        engines = ", ".join(f"{engine.engine_id} ({engine.model})" for engine in node.engines)
        table.add_row(
            node.node_id,
            node.state,
            node.exactness,
            str(node.incarnation),
            node.grpc_address,
            blocks,
            engines or "none",
        )
    console.print(table if nodes else "the index knows no node", markup=False)
