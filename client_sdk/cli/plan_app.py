"""Commands for who plans and checks an installation: `emberkv size`, `emberkv doctor k8s`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

PIPE_COLUMNS = 400
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]


def add_commands(app: typer.Typer, doctor: typer.Typer) -> None:
    app.command()(size)
    doctor.command("k8s")(doctor_k8s)


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=PIPE_COLUMNS)


def size(
    model: Annotated[
        Path, typer.Argument(help="A model's directory, or its config.json.", exists=True)
    ],
    pool_gib: Annotated[float, typer.Option("--pool-gib", min=0.001, help="Of a node.")] = 64.0,
    ssd_gib: Annotated[float, typer.Option("--ssd-gib", min=0, help="Of a node.")] = 1000.0,
    nodes: Annotated[int, typer.Option("--nodes", min=1, max=4096)] = 1,
    tokens_per_second: Annotated[
        float,
        typer.Option("--tokens-per-second", min=0.001, help="Of prompts that arrive, in all."),
    ] = 40_000.0,
    target: Annotated[
        float | None,
        typer.Option("--target", min=0, max=100, help="Also say what this hit rate (%) needs."),
    ] = None,
    block_tokens: Annotated[int, typer.Option("--block-tokens", min=1, max=65536)] = 64,
    dtype: Annotated[
        str, typer.Option("--dtype", help="Of the KV cache; auto: the model's.")
    ] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Say what a model's KV takes, how much tiers keep, which hit rate that gives, and the values.

    Hit rates are those of two public traces (docs/eviction.md): yours may be neither.
    """
    from client_sdk.cli.size_report import print_size, read_shape, size_json
    from client_sdk.cli.sizing import GIB, Sizing
    from emberkv_proto.errors import InvalidRequestError

    shape = read_shape(model, dtype)
    sizing = Sizing(
        shape, block_tokens, int(pool_gib * GIB), int(ssd_gib * GIB), nodes, tokens_per_second
    )
    if not sizing.pool_blocks:
        raise InvalidRequestError(
            f"not one block of {sizing.block_bytes:,} bytes fits into the pool: raise --pool-gib"
        )
    if as_json:
        typer.echo(json.dumps(size_json(sizing, target), indent=2))
    else:
        print_size(_console(), sizing, target)


def doctor_k8s(
    namespace: Annotated[
        str, typer.Option("--namespace", "-n", help="Of the release; default: the pod's own.")
    ] = "",
    selector: Annotated[
        str, typer.Option("--selector", "-l", help="Labels of the daemons' pods.")
    ] = "app.kubernetes.io/name=emberkv,app.kubernetes.io/component=store",
    kubeconfig: Annotated[
        Path | None, typer.Option("--kubeconfig", help="From outside; default: the pod's account.")
    ] = None,
    api: Annotated[
        str, typer.Option("--api", metavar="URL", help="As `kubectl proxy` serves it.")
    ] = "",
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="In a daemon's pod: also check its mounts."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check a release: the API and what may be asked of it, daemons, versions, nodes, mounts."""
    from client_sdk.cli.doctor import Verdict, findings_json, print_findings
    from client_sdk.cli.doctor_k8s import Release, examine_release
    from client_sdk.cli.doctor_mounts import examine_mounts

    findings = asyncio.run(examine_release(Release(namespace, selector, kubeconfig, api)))
    if config is not None:
        findings += examine_mounts(config)
    if as_json:
        typer.echo(json.dumps(findings_json(findings), indent=2))
    else:
        print_findings(_console(), findings)
    if any(finding.verdict is Verdict.FAIL for finding in findings):
        raise typer.Exit(1)
