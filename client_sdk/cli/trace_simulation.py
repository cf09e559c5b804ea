"""`emberkv trace simulate`: reads what is wanted, runs it, and shows what came of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from client_sdk.settings import load_settings
from emberkv_proto.errors import ConfigError
from router.config import RouterSettings
from router.simulation.cluster import Outage, Troubles
from router.simulation.comparison import POLICIES, Setting, at_load, one_store_hit_rate, simulate
from router.simulation.outcome import Outcome
from router.simulation.workload import BLOCK_TOKENS, best_hit_rate, copies, read_workload

PROGRESS_STEP = 200
_OUTAGE = re.compile(r"(\d{1,4})@(\d+(?:\.\d+)?)(?:-(\d+(?:\.\d+)?))?")


@dataclass(frozen=True, slots=True)
class Wanted:
    """`requests`: of each trace, the first ones; None: all."""

    traces: tuple[Path, ...]
    requests: int | None
    copies: int
    policies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TraceResult:
    """A trace, and what came of it under each policy."""

    name: str
    requests: int
    seconds: float
    oracle_hit_rate: float
    one_store_hit_rate: float
    outcomes: Mapping[str, Outcome]


def chosen_policies(names: Sequence[str]) -> tuple[str, ...]:
    """Those named, each once; all where none is.

    Raises:
        ConfigError: there is no such policy.
    """
    for name in names:
        if name not in POLICIES:
            raise ConfigError(f"--policy {name}: there are {', '.join(POLICIES)}")
    return tuple(dict.fromkeys(names)) or POLICIES


def setting_of(
    *,
    nodes: int,
    tokens_per_node: int,
    is_pooled: bool,
    load: float,
    bound_seconds: float,
    seed: int,
    index_delay_seconds: float,
    speed_error: float,
    lost: Sequence[str],
    overrides: Sequence[str],
) -> Setting:
    """What the flags say.

    Raises:
        ConfigError: one of them cannot be.
    """
    outages = tuple(_outage(text, nodes) for text in lost)
    cfg = load_settings(RouterSettings, None, list(overrides), {})
    return Setting(
        nodes,
        tokens_per_node,
        is_pooled,
        load,
        bound_seconds,
        seed,
        cfg.router,
        Troubles(index_delay_seconds, speed_error, outages),
    )


def _outage(text: str, nodes: int) -> Outage:
    found = _OUTAGE.fullmatch(text)
    if found is None:
        raise ConfigError(f"--lose {text}: write NODE@SECOND or NODE@FROM-TO, as in 3@120-300")
    node, begins = int(found[1]), float(found[2])
    ends = float(found[3]) if found[3] else float("inf")
    if node >= nodes:
        raise ConfigError(f"--lose {text}: nodes are 0 to {nodes - 1}")
    if ends <= begins:
        raise ConfigError(f"--lose {text}: it ends before it begins")
    return Outage(node, begins, ends)


def run_simulation(wanted: Wanted, setting: Setting, console: Console) -> list[TraceResult]:
    """Play each trace with each policy; progress goes to `console` where it is a terminal.

    Raises:
        ConfigError: a trace cannot be used.
    """
    workloads = []
    for path in wanted.traces:
        workload = copies(read_workload(path, wanted.requests), wanted.copies, setting.seed)
        if max(len(item.keys) for item in workload.arrivals) * BLOCK_TOKENS > (
            setting.tokens_per_node
        ):
            raise ConfigError(f"trace {path} has a prompt that no node can hold")
        workloads.append(at_load(workload, setting))
    results = []
    total = sum(len(workload.arrivals) for workload in workloads) * len(wanted.policies)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("", total=total)
        done = 0
        for workload in workloads:
            outcomes = {}
            for name in wanted.policies:
                progress.update(task, description=f"{workload.name}: {name}")

                def advance(count: int, before: int = done) -> None:
                    if count % PROGRESS_STEP == 0:
                        progress.update(task, completed=before + count)

                outcomes[name] = simulate(workload, setting, name, advance)
                done += len(workload.arrivals)
            results.append(
                TraceResult(
                    workload.name,
                    len(workload.arrivals),
                    workload.seconds,
                    best_hit_rate(workload.arrivals),
                    one_store_hit_rate(workload, setting),
                    outcomes,
                )
            )
    return results


def result_json(setting: Setting, results: Sequence[TraceResult]) -> dict[str, Any]:
    troubles = setting.troubles
    return {
        "nodes": setting.nodes,
        "tokens_per_node": setting.tokens_per_node,
        "is_pooled": setting.is_pooled,
        "load": setting.load,
        "bound_seconds": setting.bound_seconds,
        "seed": setting.seed,
        "index_delay_seconds": troubles.index_delay_seconds,
        "speed_error": troubles.speed_error,
        "outages": [
            {
                "node": outage.node,
                "begins": outage.begins,
                "ends": None if outage.ends == float("inf") else outage.ends,
            }
            for outage in troubles.outages
        ],
        "traces": [asdict(result) for result in results],
    }


def print_result(console: Console, setting: Setting, result: TraceResult) -> None:
    """One table a trace, best 90th percentile first."""
    kind = "a pool" if setting.is_pooled else "no pool"
    console.print(
        f"{result.name}: {result.requests:,} requests in {result.seconds:,.0f} s on"
        f" {setting.nodes} nodes of {setting.tokens_per_node:,} tokens, {kind}, load"
        f" {setting.load:g}; one cache without bounds hits {100 * result.oracle_hit_rate:.1f} %,"
        f" one of all nodes' size {100 * result.one_store_hit_rate:.1f} %",
        markup=False,
        highlight=False,
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("policy")
    for title in (
        "hits %",
        "of oracle",
        "pulled %",
        "TTFT p50",
        "p90",
        "p99",
        "max/mean",
        f"good/s (≤ {setting.bound_seconds:g} s)",
        "good %",
        "retried",
        "failed",
    ):
        table.add_column(title, justify="right")
    for name, item in sorted(result.outcomes.items(), key=lambda pair: pair[1].p90_seconds):
        table.add_row(
            name,
            f"{100 * item.hit_rate:.1f}",
            f"{item.oracle_share:.3f}",
            f"{100 * item.pulled_share:.1f}",
            f"{item.p50_seconds:.2f}",
            f"{item.p90_seconds:.2f}",
            f"{item.p99_seconds:.2f}",
            f"{item.imbalance:.3f}",
            f"{item.goodput:.2f}",
            f"{100 * item.good_share:.1f}",
            f"{item.retried:,}",
            f"{item.failed:,}",
        )
    console.print(table)
