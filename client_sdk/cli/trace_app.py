"""Commands about request traces: `emberkv trace simulate`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

PIPE_COLUMNS = 400

trace_app = typer.Typer(help="What request traces tell about a cluster that is not there yet.")


@trace_app.callback()
def _trace() -> None:
    """A group, also while it has one command."""


@trace_app.command(
    epilog="Example: emberkv trace simulate chats.jsonl --nodes 16 --policy cost --policy lmetric"
    " --load 0.7 --plot chats.png"
)
def simulate(
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE...",
            help="JSON lines as Mooncake's: timestamp (ms), input_length, output_length (tokens),"
            " hash_ids (one for each 512 tokens).",
        ),
    ],
    nodes: Annotated[int, typer.Option("--nodes", min=1, max=1024)] = 8,
    tokens_per_node: Annotated[
        int, typer.Option("--tokens-per-node", min=512, help="What a node's store holds.")
    ] = 3_000_000,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", help="Repeatable; default: all, and Dynamo's formula (dynamo)."),
    ] = None,
    pool: Annotated[
        bool, typer.Option("--pool/--no-pool", help="Whether nodes read from each other.")
    ] = True,
    load: Annotated[
        float,
        typer.Option(
            "--load",
            min=0.01,
            max=10,
            help="Offered work, as a share of what the cluster could do if one cache without"
            " bounds served all. Requests come so much quicker or slower.",
        ),
    ] = 0.87,
    slo: Annotated[
        float, typer.Option("--slo", min=0.001, help="Seconds to the first token that are good.")
    ] = 10.0,
    requests: Annotated[
        int | None, typer.Option("--requests", min=2, help="Only the first ones of each trace.")
    ] = None,
    copies: Annotated[
        int,
        typer.Option("--copies", min=1, max=64, help="So many such user groups at once."),
    ] = 1,
    seed: Annotated[int, typer.Option("--seed", help="Equal seeds give equal results.")] = 1,
    index_delay: Annotated[
        float, typer.Option("--index-delay", min=0, help="Seconds by which events come late.")
    ] = 0.0,
    speed_error: Annotated[
        float,
        typer.Option(
            "--speed-error",
            min=1,
            max=10,
            help="Engines are up to about so many times as quick or slow as the router believes.",
        ),
    ] = 1.0,
    lose: Annotated[
        list[str] | None,
        typer.Option(
            "--lose",
            metavar="NODE@FROM[-TO]",
            help="Node 0.. is away from that second (to that one). Repeatable.",
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="router.KEY=VALUE", help="Of the router. Repeatable."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw it as well.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON for a program to read.")
    ] = False,
) -> None:
    """Play traces against every routing policy, on a cluster that exists only as events.

    Policies, scoring, ledger and index are the router's own; docs/simulation.md says what is not.
    """
    from client_sdk.cli.trace_plot import draw, require_plotting
    from client_sdk.cli.trace_simulation import (
        Wanted,
        chosen_policies,
        print_result,
        result_json,
        run_simulation,
        setting_of,
    )

    if plot is not None:
        require_plotting(plot)
    wanted = Wanted(tuple(traces), requests, copies, chosen_policies(policy or ()))
    setting = setting_of(
        nodes=nodes,
        tokens_per_node=tokens_per_node,
        is_pooled=pool,
        load=load,
        bound_seconds=slo,
        seed=seed,
        index_delay_seconds=index_delay,
        speed_error=speed_error,
        lost=lose or (),
        overrides=set_ or (),
    )
    results = run_simulation(wanted, setting, Console(stderr=True))
    if as_json:
        typer.echo(json.dumps(result_json(setting, results), indent=2))
    else:
        console = Console() if sys.stdout.isatty() else Console(width=PIPE_COLUMNS)
        for result in results:
            print_result(console, setting, result)
    if plot is not None:
        draw(results, plot)
