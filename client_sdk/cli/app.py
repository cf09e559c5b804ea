"""The commands of `emberkv`. Server packages are imported inside the commands that need them."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import runpy
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from client_sdk.cli.operator_app import TokenOption
from client_sdk.cli.operator_app import add_commands as add_operator_commands
from client_sdk.cli.plan_app import add_commands as add_plan_commands
from client_sdk.cli.router_key import router_key_app
from client_sdk.cli.trace_app import trace_app
from emberkv_proto import __version__

if TYPE_CHECKING:
    from client_sdk.cli.operate import Daemon

app = typer.Typer(
    name="emberkv",
    help="A KV-cache store for LLM inference: the cache keeps glowing after the engine goes out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="The configuration that the parts would run with.")
add_operator_commands(app)
app.add_typer(config_app, name="config", no_args_is_help=True)
doctor_app = typer.Typer()
app.add_typer(router_key_app, name="router-key", no_args_is_help=True)
app.add_typer(trace_app, name="trace", no_args_is_help=True)
app.add_typer(doctor_app, name="doctor", invoke_without_command=True)
add_plan_commands(app, doctor_app)

ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="YAML file with sections for all parts.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one value. Repeatable."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
IndexOption = Annotated[
    str, typer.Option("--index", help="host:port of the index; default: from the configuration.")
]
PIPE_COLUMNS = 400
DAEMON_NEEDS = ("grpc", "rocksdict", "uvloop")
INDEX_NEEDS = ("grpc", "numba", "uvloop")
ROUTER_NEEDS = ("grpc", "numba", "uvloop", "httptools")
ENGINE_NEEDS = ("torch", "aiohttp", "uvloop")
CLUSTER_NEEDS = (*DAEMON_NEEDS, *ROUTER_NEEDS, *ENGINE_NEEDS)
"""Modules of the extras, by the part that imports them."""


def _console() -> Console:
    """For tables: as wide as the terminal; wide enough not to cut words where there is none."""
    return Console() if sys.stdout.isatty() else Console(width=PIPE_COLUMNS)


def invoke(arguments: list[str]) -> None:
    """Run the command line. Ends with SystemExit (usage errors: 2); EmberError passes through."""
    app(arguments, prog_name="emberkv")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"emberkv {__version__}")
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print and exit."),
    ] = False,
) -> None:
    pass


@app.command()
def up(config: ConfigOption = None, set_: SetOption = None) -> None:
    """Start the cluster of a config on this machine: daemons, router and engines; until Ctrl-C."""
    _require(CLUSTER_NEEDS)
    from client_sdk.cli.up import run_up

    raise typer.Exit(run_up(Console(), config, tuple(set_ or ())))


@app.command()
def daemon(config: ConfigOption = None, set_: SetOption = None) -> None:
    """Run the store daemon of a node."""
    _become("store_daemon", DAEMON_NEEDS, config, set_)


@app.command()
def index(config: ConfigOption = None, set_: SetOption = None) -> None:
    """Run the global index as a service of its own."""
    _become("global_index", INDEX_NEEDS, config, set_)


@app.command()
def router(config: ConfigOption = None, set_: SetOption = None) -> None:
    """Run the router."""
    _become("router", ROUTER_NEEDS, config, set_)


@app.command()
def engine(config: ConfigOption = None, set_: SetOption = None) -> None:
    """Run the reference engine (for demos and tests; it serves nobody)."""
    _become("client_sdk.engine.torch_engine", ENGINE_NEEDS, config, set_)


@app.command()
def demo(
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result there as well.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer requests.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the logs.")] = False,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Mooncake trace; default: the excerpt.")
    ] = None,
    base_dir: Annotated[
        Path | None, typer.Option("--base-dir", help="Where to make the run's directory.")
    ] = None,
    vllm: Annotated[
        Path | None,
        typer.Option("--vllm", help="Run vLLM servers, with this Python of vLLM's environment."),
    ] = None,
) -> None:
    """Kill engines and daemons under load and show that the cache survives, answer for answer."""
    _require(CLUSTER_NEEDS)
    from client_sdk.cli.demo import DemoOptions, run_demo

    raise typer.Exit(
        run_demo(Console(), DemoOptions(json_file, quick, keep, trace, base_dir, vllm))
    )


@app.command()
def status(
    config: ConfigOption = None,
    set_: SetOption = None,
    index: IndexOption = "",
    address: Annotated[
        str, typer.Option("--address", metavar="HOST:PORT", help="Show this daemon only, in full.")
    ] = "",
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show nodes, tiers, blocks, hit rate, index lag and engines of a running cluster.

    With --address: one daemon's state, tiers, drives, pins and tenants.
    """
    from client_sdk.cli.operate import find_daemon
    from client_sdk.cli.status import (
        print_status,
        read_redis,
        read_status,
        redis_line,
        status_json,
    )

    daemon = find_daemon(address, token_file, config, set_ or ())
    if address:
        _show_daemon(daemon, as_json)
        return
    address = index or _cluster_addresses(config, set_)[0]
    nodes = asyncio.run(read_status(address, daemon.access))
    redis = asyncio.run(read_redis(address, daemon.access))
    if as_json:
        shown = status_json(address, nodes)
        _print_json(shown if redis is None else {**shown, "redis": asdict(redis)})
    else:
        print_status(_console(), address, nodes)
        if redis is not None:
            _console().print(redis_line(redis), markup=False)
    if not nodes or any(node.problem for node in nodes):
        raise typer.Exit(1)


@app.command()
def nodes(
    config: ConfigOption = None,
    set_: SetOption = None,
    index: IndexOption = "",
    watch: Annotated[
        bool, typer.Option("--watch", help="Go on, and tell of each change; until Ctrl-C.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the nodes that the index knows, and with --watch how they come, change and go.

    With --watch and --json: one line of JSON for each change.
    """
    from client_sdk.cli.nodes import nodes_json, run_nodes, run_watch, show_json_lines, show_text
    from client_sdk.cli.operate import find_daemon

    tls = find_daemon("", None, config, set_ or ()).access.tls
    address = index or _cluster_addresses(config, set_)[0]
    text = show_text(_console())
    if watch:
        asyncio.run(run_watch(address, tls, show_json_lines(typer.echo) if as_json else text))
    else:
        show = (lambda change: _print_json(nodes_json(change))) if as_json else text
        asyncio.run(run_nodes(address, tls, show))


@app.command()
def where(
    prompt: Annotated[str, typer.Argument(help="The prompt's text.")] = "",
    tokens: Annotated[
        str, typer.Option("--tokens", help="Token ids instead: 1,2,3 or @file (JSON or commas).")
    ] = "",
    hashes: Annotated[
        str,
        typer.Option("--hashes", help="Block hashes instead: hexadecimal words, or @file."),
    ] = "",
    model: Annotated[str, typer.Option("--model", help="When several models are served.")] = "",
    salt: Annotated[str, typer.Option("--salt", help="The request's cache_salt.")] = "",
    adapter: Annotated[
        str, typer.Option("--adapter", metavar="NAME=WEIGHTS_ID", help="The request's adapter.")
    ] = "",
    config: ConfigOption = None,
    set_: SetOption = None,
    index: IndexOption = "",
    router: Annotated[str, typer.Option("--router", help="URL of the router.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Show which node holds how much of a prompt, in which tier, and why each hit ends."""
    from client_sdk.cli.operate import find_daemon
    from client_sdk.cli.where import (
        Adapter,
        WhereQuery,
        read_hashes,
        read_tokens,
        run_where,
    )
    from client_sdk.cli.where_report import print_where, where_json

    index_address, router_url = _cluster_addresses(config, set_)
    ids = tuple(read_tokens(tokens)) if tokens else None
    tls = find_daemon("", None, config, set_ or ()).access.tls
    query = WhereQuery(
        index or index_address,
        router or router_url,
        model,
        prompt,
        ids,
        tls,
        read_hashes(hashes) if hashes else None,
        salt,
        Adapter.parse(adapter) if adapter else None,
    )
    found = asyncio.run(run_where(query))
    if as_json:
        _print_json(where_json(found))
    else:
        print_where(_console(), found)


@doctor_app.callback()
def doctor(
    context: typer.Context,
    config: ConfigOption = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check this machine and a configuration; each finding comes with its fix."""
    if context.invoked_subcommand is not None:
        return
    from client_sdk.cli.doctor import Verdict, examine, findings_json, print_findings

    findings = examine(config, tuple(set_ or ()))
    if as_json:
        _print_json(findings_json(findings))
    else:
        print_findings(_console(), findings)
    if any(finding.verdict is Verdict.FAIL for finding in findings):
        raise typer.Exit(1)


@doctor_app.command(
    "vllm", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def doctor_vllm(context: typer.Context, as_json: JsonOption = False) -> None:
    """Check a vLLM command line: emberkv doctor vllm -- vllm serve MODEL ..."""
    from client_sdk.cli.doctor import Verdict, findings_json, print_findings
    from client_sdk.cli.doctor_vllm import examine_vllm

    findings = examine_vllm(context.args)
    if as_json:
        _print_json(findings_json(findings))
    else:
        print_findings(_console(), findings)
    if any(finding.verdict is Verdict.FAIL for finding in findings):
        raise typer.Exit(1)


@doctor_app.command("sglang")
def doctor_sglang(
    url: Annotated[str, typer.Argument(help="Of a running server: http://host:30000")],
    admin_key: Annotated[
        str,
        typer.Option(
            envvar="SGLANG_ADMIN_API_KEY",
            help="Its --admin-api-key: what was attached at run time is seen with it only.",
        ),
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Check the settings of a running SGLang server."""
    from client_sdk.cli.doctor import Verdict, findings_json, print_findings
    from client_sdk.cli.doctor_sglang import examine_sglang

    findings = examine_sglang(url, admin_key)
    if as_json:
        _print_json(findings_json(findings))
    else:
        print_findings(_console(), findings)
    if any(finding.verdict is Verdict.FAIL for finding in findings):
        raise typer.Exit(1)


@doctor_app.command("faults")
def doctor_faults(as_json: JsonOption = False) -> None:
    """List the points at which EMBERKV_FAULTS makes a server pause, fail, drop, delay or exit."""
    from client_sdk.cli.fault_list import faults_json, print_faults

    if as_json:
        _print_json(faults_json())
    else:
        print_faults(_console())


@config_app.command("show")
def config_show(
    config: ConfigOption = None,
    set_: SetOption = None,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value is from.")] = False,
    live: Annotated[
        bool, typer.Option("--live", help="Only what a running daemon takes over, and when.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print every value of every section, after file, environment and flags."""
    from client_sdk.cli.config_show import config_json, only_live, print_config, show_config

    shown = show_config(config, tuple(set_ or ()))
    if live:
        shown = only_live(shown)
    if as_json:
        _print_json(config_json(shown))
    else:
        print_config(_console(), shown, with_origin=origin)


def _show_daemon(daemon: Daemon, as_json: bool) -> None:
    from client_sdk.cli.node_status import node_json, print_node, read_node

    status, tenants = asyncio.run(read_node(daemon))
    if as_json:
        _print_json(node_json(daemon.address, status, tenants))
    else:
        print_node(_console(), daemon.address, status, tenants)


def _cluster_addresses(config: Path | None, set_: list[str] | None) -> tuple[str, str]:
    """(index address, router URL) of the cluster that `up` would start with this config."""
    from client_sdk.cli.cluster_plan import cluster_addresses

    found = cluster_addresses(config, tuple(set_ or ()))
    return found.index, found.router_url


def _become(
    module: str, needs: tuple[str, ...], config: Path | None, set_: list[str] | None
) -> None:
    """Run the part as `python -m` would, in this process; what it needs is looked for first."""
    _require(needs)
    sys.argv = [module, *(["--config", str(config)] if config else [])]
    for override in set_ or ():
        sys.argv += ["--set", override]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _require(needs: tuple[str, ...]) -> None:
    """Raises ModuleNotFoundError for the first that is not installed."""
    for name in needs:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))
