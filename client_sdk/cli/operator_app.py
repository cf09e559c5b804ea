"""Operators' commands of `emberkv`: pin, unpin, evict, clear, quota, drain, scrub, reload."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from emberkv_proto.errors import ConfigError

if TYPE_CHECKING:
    from client_sdk.cli.operate import Daemon

EXIT_STATUS = (
    "Exit status: 0 done; 1 the daemon is away, or did less than was asked; 2 something has to be"
    " changed first (options, token, configuration)."
)
PIPE_COLUMNS = 400
MOST_BYTES = 1 << 62
"""As many as messages carry; more than any tier has."""

AddressOption = Annotated[
    str,
    typer.Option(
        "--address", metavar="HOST:PORT", help="The daemon's gRPC; default: as configured."
    ),
]
TokenOption = Annotated[
    Path | None,
    typer.Option("--token-file", help="The daemon's secret; not needed on its own machine."),
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="The daemon's YAML file.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one value. Repeatable."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
NamespaceOption = Annotated[
    str, typer.Option("--namespace", metavar="HEX", help="Namespace id, 32 digits.")
]
HashesOption = Annotated[
    str,
    typer.Option("--hashes", metavar="HEX,HEX|-", help="Hashes in chain order; - reads them."),
]
PromptFileOption = Annotated[
    Path | None, typer.Option("--prompt-file", help="Text whose blocks are meant.")
]
TokensOption = Annotated[
    str, typer.Option("--tokens", help="Token ids whose blocks are meant: 1,2,3 or @file.")
]
ModelOption = Annotated[
    str, typer.Option("--model", help="Of the prompt, when several models are served.")
]
IndexOption = Annotated[
    str, typer.Option("--index", help="Index that knows the prompt's engine; default: configured.")
]
TierOption = Annotated[str, typer.Option("--tier", help="dram or ssd.")]


def pin(
    namespace: NamespaceOption = "",
    hashes: HashesOption = "",
    prompt_file: PromptFileOption = None,
    tokens: TokensOption = "",
    model: ModelOption = "",
    index: IndexOption = "",
    ttl_seconds: Annotated[
        float, typer.Option("--ttl", help="Seconds; without it the pin is hard: until unpinned.")
    ] = 0.0,
    address: AddressOption = "",
    token_file: TokenOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep blocks from eviction on one node."""
    from client_sdk.cli import operate

    daemon = operate.find_daemon(address, token_file, config, set_ or ())
    blocks = _blocks(daemon, namespace, hashes, prompt_file, tokens, model, index, config, set_)
    done = asyncio.run(operate.pin(daemon, blocks, ttl_seconds))
    if as_json:
        _print_json(done)
    else:
        typer.echo(f"pinned {done['pinned_blocks']} of {done['asked_blocks']} blocks")
        typer.echo(f"hard pins keep {done['pinned_bytes']} of {done['limit_bytes']} bytes")
    if done["pinned_blocks"] < done["asked_blocks"]:
        _note("the rest is not here, or over the limit of hard pins (dram.pin_share)")
        raise typer.Exit(1)


def unpin(
    namespace: NamespaceOption = "",
    hashes: HashesOption = "",
    prompt_file: PromptFileOption = None,
    tokens: TokensOption = "",
    model: ModelOption = "",
    index: IndexOption = "",
    everything: Annotated[bool, typer.Option("--all", help="Every pin of the node.")] = False,
    address: AddressOption = "",
    token_file: TokenOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """End pins: of blocks, of a namespace, or --all."""
    from client_sdk.cli import operate

    daemon = operate.find_daemon(address, token_file, config, set_ or ())
    if everything and (namespace or hashes or prompt_file or tokens):
        raise ConfigError("--all goes with no other choice of blocks")
    if everything:
        done = asyncio.run(operate.unpin(daemon, None, ()))
    elif namespace and not hashes:
        done = asyncio.run(operate.unpin(daemon, operate.read_namespace(namespace), ()))
    else:
        blocks = _blocks(daemon, namespace, hashes, prompt_file, tokens, model, index, config, set_)
        done = asyncio.run(operate.unpin(daemon, blocks.namespace_id, blocks.hashes))
    _tell(done, as_json, f"unpinned {done['unpinned_blocks']} blocks")


def evict(
    tier: TierOption,
    byte_count: Annotated[
        int,
        typer.Option("--bytes", min=0, max=MOST_BYTES, help="Evict as many blocks as free this."),
    ] = 0,
    namespace: NamespaceOption = "",
    hashes: HashesOption = "",
    prompt_file: PromptFileOption = None,
    tokens: TokensOption = "",
    model: ModelOption = "",
    index: IndexOption = "",
    address: AddressOption = "",
    token_file: TokenOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take blocks out of one tier: those that are named, or as many as free --bytes."""
    from client_sdk.cli import operate

    daemon = operate.find_daemon(address, token_file, config, set_ or ())
    chosen = operate.read_tier(tier)
    if byte_count and (hashes or prompt_file or tokens):
        raise ConfigError("--bytes goes with no other choice of blocks but --namespace")
    if byte_count:
        own = operate.read_namespace(namespace) if namespace else None
        done = asyncio.run(operate.evict_bytes(daemon, chosen, own, byte_count))
    else:
        blocks = _blocks(daemon, namespace, hashes, prompt_file, tokens, model, index, config, set_)
        done = asyncio.run(operate.evict(daemon, chosen, blocks))
    _tell(done, as_json, _evicted_text(done))


def clear(
    tier: Annotated[str, typer.Option("--tier", help="dram or ssd; without it both.")] = "",
    namespace: NamespaceOption = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what is there.")] = False,
    address: AddressOption = "",
    token_file: TokenOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take everything out of a tier or of both, hard pins excepted."""
    from client_sdk.cli import operate

    daemon = operate.find_daemon(address, token_file, config, set_ or ())
    chosen = operate.read_tier(tier) if tier else None
    own = operate.read_namespace(namespace) if namespace else None
    if dry_run or not yes:
        there = asyncio.run(operate.what_clear_would_take(daemon, chosen))
        parts = ", ".join(f"{count} blocks in {name.upper()}" for name, count in there.items())
        whose = f"those of namespace {namespace} among " if own else ""
        text = f"{daemon.address} holds {parts}; clear would take {whose}all but hard pins"
        if dry_run:
            _tell({"would_clear_of": there}, as_json, text)
            return
        if not sys.stdin.isatty():
            raise ConfigError(f"{text}; say --yes to do it")
        typer.confirm(f"{text}. Go on?", abort=True, err=True)
    done = asyncio.run(operate.clear(daemon, chosen, own))
    _tell(done, as_json, _evicted_text(done))


def quota(
    salt_id: Annotated[
        str, typer.Argument(metavar="[SALT_ID]", help="Tenant, 32 hexadecimal digits.")
    ] = "",
    dram_bytes: Annotated[
        int | None, typer.Option("--dram-bytes", min=0, max=MOST_BYTES, help="Limit; 0: none.")
    ] = None,
    ssd_bytes: Annotated[
        int | None, typer.Option("--ssd-bytes", min=0, max=MOST_BYTES, help="Limit; 0: none.")
    ] = None,
    address: AddressOption = "",
    token_file: TokenOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show tenants' usage and quotas, or set a tenant's until the daemon ends (see tenants:)."""
    from client_sdk.cli import operate

    daemon = operate.find_daemon(address, token_file, config, set_ or ())
    if (dram_bytes is None) != (ssd_bytes is None):
        raise ConfigError("a quota is set for both tiers: --dram-bytes and --ssd-bytes")
    if dram_bytes is not None and ssd_bytes is not None:
        if not salt_id:
            raise ConfigError("whose quota? give the tenant's salt id")
        tenant = operate.read_salt_id(salt_id)
        asyncio.run(operate.set_quota(daemon, tenant, dram_bytes, ssd_bytes))
    rows = asyncio.run(operate.quotas(daemon))
    if salt_id:
        wanted = operate.read_salt_id(salt_id).hex()
        rows = [row for row in rows if row["salt_id"] == wanted]
    if as_json:
        _print_json({"tenants": rows})
    else:
        _print_quotas(rows)


def drain(
    wait_seconds: Annotated[
        float, typer.Option("--wait", min=0.0, help="Seconds to wait for its end.")
    ] = 0.0,
    address: AddressOption = "",
    token_file: TokenOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have a daemon refuse new work, finish what it has, write back, and end."""
    from client_sdk.cli import operate

    daemon = operate.find_daemon(address, token_file, config, set_ or ())
    is_gone = asyncio.run(operate.drain(daemon, wait_seconds))
    text = "it has ended" if is_gone else "it drains"
    _tell({"has_ended": is_gone}, as_json, f"{daemon.address}: {text}")
    if wait_seconds and not is_gone:
        _note(f"it still answers after {wait_seconds:g} s")
        raise typer.Exit(1)


def scrub(
    address: AddressOption = "",
    token_file: TokenOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have a daemon check everything on its SSD now, in the background at the configured rate."""
    from client_sdk.cli import operate

    done = asyncio.run(operate.scrub(operate.find_daemon(address, token_file, config, set_ or ())))
    text = f"checking {done['records']} records; takes about {done['expected_seconds']:.0f} s"
    _tell(done, as_json, text)


def reload(
    address: AddressOption = "",
    token_file: TokenOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have a daemon read its configuration again and take over what it can (as SIGHUP does)."""
    from client_sdk.cli import operate

    done = asyncio.run(operate.reload(operate.find_daemon(address, token_file, config, set_ or ())))
    lines = [f"changed: {line}" for line in done["changed"]]
    lines += [f"waits for a restart: {line}" for line in done["needs_restart"]]
    _tell(done, as_json, "\n".join(lines) or "nothing has changed")


COMMANDS: tuple[Callable[..., None], ...] = (
    pin,
    unpin,
    evict,
    clear,
    quota,
    drain,
    scrub,
    reload,
)


def add_commands(app: typer.Typer) -> None:
    """Register them all; each says in --help what its exit status means."""
    for command in COMMANDS:
        app.command(epilog=EXIT_STATUS, rich_help_panel="Operate a daemon")(command)


def _blocks(
    daemon: Daemon,
    namespace: str,
    hashes: str,
    prompt_file: Path | None,
    tokens: str,
    model: str,
    index: str,
    config: Path | None,
    set_: list[str] | None,
) -> Any:
    """The blocks that the options name, in exactly one of the three ways."""
    from client_sdk.cli import operate
    from client_sdk.cli.cluster_plan import cluster_addresses
    from client_sdk.cli.where import WhereQuery, read_tokens

    if sum((bool(hashes), prompt_file is not None, bool(tokens))) != 1:
        raise ConfigError("name blocks: --hashes with --namespace, --prompt-file or --tokens")
    if hashes:
        if not namespace:
            raise ConfigError("--hashes need the --namespace they are of")
        return operate.Blocks(operate.read_namespace(namespace), operate.read_hashes(hashes))
    if namespace:
        raise ConfigError("a prompt's namespace is its engine's; leave --namespace out")
    prompt = ""
    if prompt_file is not None:
        try:
            prompt = prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"prompt file {prompt_file} cannot be read: {error}") from None
    ids = tuple(read_tokens(tokens)) if tokens else None
    address, tls = index or cluster_addresses(config, set_ or ()).index, daemon.access.tls
    return asyncio.run(operate.prompt_blocks(WhereQuery(address, "", model, prompt, ids, tls)))


def _evicted_text(done: dict[str, Any]) -> str:
    return (
        f"evicted {done['evicted_blocks']} blocks, freed {done['freed_bytes']} bytes;"
        f" {done['kept_blocks']} stay (pinned, or being read or written)"
    )


def _print_quotas(rows: list[dict[str, Any]]) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=PIPE_COLUMNS)
    if not rows:
        console.print("no tenants hold or may hold anything of their own")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("tenant", no_wrap=True)
    for heading in ("DRAM bytes", "of", "SSD bytes", "of", "evicted"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        limits = [str(row[key] or "no limit") for key in ("dram_limit_bytes", "ssd_limit_bytes")]
        used = [str(row["dram_bytes"]), str(row["ssd_bytes"])]
        table.add_row(
            row["salt_id"], used[0], limits[0], used[1], limits[1], str(row["evicted_blocks"])
        )
    console.print(table)


def _tell(done: Any, as_json: bool, text: str) -> None:
    if as_json:
        _print_json(done)
    else:
        typer.echo(text)


def _note(text: str) -> None:
    typer.echo(f"emberkv: {text}", err=True)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))
