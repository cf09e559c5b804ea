"""`emberkv router-key`: makes, lists and revokes API keys in the router's key file.

A running router sees the changed file within a second; no signal is needed.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from emberkv_proto.errors import ConfigError

router_key_app = typer.Typer(help="API keys of the router: who may call, within which limits.")
PIPE_COLUMNS = 400

FileOption = Annotated[
    Path | None,
    typer.Option("--file", help="The key file; default: router.key_file of the configuration."),
]
ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file.")]
LimitOption = Annotated[int | None, typer.Option(min=1)]


def _key_file(file: Path | None, config: Path | None) -> Path:
    from client_sdk.settings import load_settings
    from router.config import RouterSettings

    path = file or load_settings(RouterSettings, config).router.key_file
    if path is None:
        raise ConfigError("no key file: give --file, or set router.key_file in the configuration")
    return path


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@router_key_app.command()
def create(
    tenant: Annotated[str, typer.Option("--tenant", help="Whom the key is for.")],
    file: FileOption = None,
    config: ConfigOption = None,
    requests_per_minute: LimitOption = None,
    tokens_per_minute: LimitOption = None,
    concurrent_requests: LimitOption = None,
    model: Annotated[
        list[str] | None, typer.Option("--model", help="One it may use. Repeatable; default: all.")
    ] = None,
    highest_priority: Annotated[str | None, typer.Option(help="high, normal or low.")] = None,
) -> None:
    """Make a key and print it; it cannot be shown again. Limits given replace the tenant's."""
    from pydantic import ValidationError

    from router.keys import TenantLimits, edit_keys, make_key

    given = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent_requests": concurrent_requests,
        "models": tuple(model) if model else None,
        "highest_priority": highest_priority,
    }
    given = {name: value for name, value in given.items() if value is not None}
    try:
        limits = TenantLimits.model_validate(given) if given else None
    except ValidationError:
        raise ConfigError("--highest-priority must be high, normal or low") from None
    path, key = _key_file(file, config), make_key(tenant, _now())
    edit_keys(path, lambda keys: keys.with_key(key.stored, limits))
    print(f"key {key.stored.key_id} of tenant {tenant} is in {path}", file=sys.stderr)
    print(key.text)


@router_key_app.command("list")
def list_keys(
    file: FileOption = None,
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="For a program to read.")] = False,
) -> None:
    """Show ids, tenants and limits. The keys themselves are not kept anywhere."""
    from router.keys import NO_LIMITS, read_keys

    found = read_keys(_key_file(file, config))
    rows = [
        {
            "key_id": key.key_id,
            "tenant": key.tenant,
            "created": key.created,
            "revoked": key.revoked,
            "limits": found.tenants.get(key.tenant, NO_LIMITS).model_dump(mode="json"),
        }
        for key in found.keys
    ]
    if as_json:
        print(json.dumps({"keys": rows}, indent=1))
        return
    table = Table("key", "tenant", "created", "revoked", "limits")
    for key in found.keys:
        limits = found.tenants.get(key.tenant, NO_LIMITS).model_dump(exclude_defaults=True)
        shown = ", ".join(f"{name} {value}" for name, value in limits.items())
        table.add_row(key.key_id, key.tenant, key.created, key.revoked or "", shown or "none")
    (Console() if sys.stdout.isatty() else Console(width=PIPE_COLUMNS)).print(table)


@router_key_app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="The id, as `list` shows it.")],
    file: FileOption = None,
    config: ConfigOption = None,
) -> None:
    """End a key. Requests that run go on."""
    from router.keys import edit_keys

    path = _key_file(file, config)
    edit_keys(path, lambda keys: keys.without_key(key_id, _now()))
    print(f"key {key_id} is revoked in {path}")
