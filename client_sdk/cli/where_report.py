"""What `emberkv where` prints: for people, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from client_sdk.cli.chain_story import TierRun
from client_sdk.cli.where import Where

MAX_RUNS_SHOWN = 12


def where_json(where: Where) -> dict[str, Any]:
    return {
        "model": where.model,
        "prompt_tokens": where.prompt_tokens,
        "block_tokens": where.block_tokens,
        "blocks": [block.hex() for block in where.hashes],
        "nodes": [
            {
                "node_id": node.node_id,
                "hit_blocks": node.hit_blocks,
                "hit_tokens": node.hit_blocks * where.block_tokens,
                "dram_blocks": node.dram_blocks,
                "ssd_blocks": node.ssd_blocks,
                "reason": node.reason.value,
                "ends_because": node.ends_because,
                "runs": _runs_json(node.runs),
            }
            for node in where.nodes
        ],
        "engines": [
            {
                "engine_id": engine.engine_id,
                "dp_rank": engine.dp_rank,
                "node_id": engine.node_id,
                "state": engine.state,
                "hit_blocks": engine.hit_blocks,
                "hit_tokens": engine.hit_blocks * where.block_tokens,
                "hbm_blocks": engine.hbm_blocks,
                "reason": engine.reason.value,
                "ends_because": engine.ends_because,
                "runs": _runs_json(engine.runs),
            }
            for engine in where.engines
        ],
        "hint": where.hint,
        "route": where.route,
        "route_problem": where.route_problem,
    }


def _runs_json(runs: Sequence[TierRun]) -> list[dict[str, Any]]:
    return [
        {"first": run.first, "last": run.last, "tiers": [tier.name.lower() for tier in run.tiers]}
        for run in runs
    ]


def print_where(console: Console, where: Where) -> None:
    blocks = len(where.hashes)
    if where.model:
        console.print(
            f"{where.prompt_tokens} tokens of {where.model}: {blocks} full blocks of"
            f" {where.block_tokens}, {where.prompt_tokens % where.block_tokens} tokens in the last,"
            " unstored one",
            soft_wrap=True,
            markup=False,
        )
    else:
        console.print(f"{blocks} blocks by their hashes")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("node", "hit blocks", "DRAM", "SSD"):
        table.add_column(heading, no_wrap=True)
    table.add_column("the hit ends because")
    for node in where.nodes:
        table.add_row(
            node.node_id,
            f"{node.hit_blocks}/{blocks}",
            str(node.dram_blocks),
            str(node.ssd_blocks),
            Text(node.ends_because),
        )
    console.print(table)
    if where.engines:
        _print_engines(console, where)
    _print_runs(console, where)
    if where.hint:
        console.print(f"\n{where.hint}", markup=False, soft_wrap=True)
    if where.route is None:
        console.print(f"\nno word from the router: {where.route_problem}", markup=False)
    else:
        _print_route(console, where.route)


def _print_engines(console: Console, where: Where) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("engine", "on node", "hit blocks", "HBM"):
        table.add_column(heading, no_wrap=True)
    table.add_column("the hit ends because")
    for engine in where.engines:
        rank = f" rank {engine.dp_rank}" if engine.dp_rank else ""
        table.add_row(
            f"{engine.engine_id}{rank}",
            engine.node_id or "-",
            f"{engine.hit_blocks}/{len(where.hashes)}",
            str(engine.hbm_blocks),
            Text(engine.ends_because),
        )
    console.print()
    console.print(table)


def _print_runs(console: Console, where: Where) -> None:
    """Which blocks are in which tiers, where that is more than one word."""
    places = [(str(node.node_id), node.runs) for node in where.nodes]
    places += [(f"{e.engine_id}/{e.dp_rank} with its node", e.runs) for e in where.engines]
    told = [(name, runs) for name, runs in places if any(run.tiers for run in runs)]
    if told:
        console.print()
    for name, runs in told:
        shown = ", ".join(str(run) for run in runs[:MAX_RUNS_SHOWN])
        rest = len(runs) - MAX_RUNS_SHOWN
        more = f", and {rest} more runs (--json has all)" if rest > 0 else ""
        console.print(f"{name}: blocks {shown}{more}", markup=False, soft_wrap=True)


def _print_route(console: Console, route: dict[str, Any]) -> None:
    """The router's terms for each engine. Its answer is another version's to change: ask gently."""
    console.print(f"\nthe router would choose {route.get('chosen') or 'none'}", markup=False)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("engine", no_wrap=True)
    for heading in ("total ms", "queue", "fetch", "prefill", "tokens to compute"):
        table.add_column(heading, justify="right", no_wrap=True)
    for engine in route.get("engines", ()):
        parts = ("total_seconds", "queue_seconds", "fetch_seconds", "prefill_seconds")
        times = [f"{1000 * float(engine.get(part, 0.0)):.1f}" for part in parts]
        name = str(engine.get("engine", "?"))
        table.add_row(name, *times, str(engine.get("uncached_tokens", "?")))
    console.print(table)
