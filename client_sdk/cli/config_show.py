"""Every setting of every section, its value and where it came from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import create_model
from rich.console import Console
from rich.table import Table

from client_sdk.cli.cluster_plan import ClusterSettings
from client_sdk.settings import Settings, load_with_origins


@dataclass(frozen=True, slots=True)
class ShownValue:
    """One key of the combined schema. `value` is JSON-ready."""

    section: str
    key: str
    value: Any
    origin: str
    takes_effect: str = ""
    """When a daemon that runs takes over a change; empty: at a restart, or not asked for."""


def combined_settings() -> type[Settings]:
    """One settings type with the sections of all parts: what a whole YAML file may hold."""
    from client_sdk.engine.torch_engine.config import EngineSettings
    from router.config import RouterSettings
    from store_daemon.config import DaemonSettings

    fields: dict[str, Any] = {}
    for kind in (DaemonSettings, RouterSettings, EngineSettings, ClusterSettings):
        for name, field in kind.model_fields.items():
            fields[name] = (field.annotation, field.default)
    combined: type[Settings] = create_model("CombinedSettings", __base__=Settings, **fields)
    return combined


def show_config(path: Path | None, overrides: Sequence[str]) -> list[ShownValue]:
    """Load and check the whole configuration.

    Raises:
        ConfigError: a key that no part knows, or a value that its part refuses.
    """
    settings, origins = load_with_origins(combined_settings(), path, overrides)
    shown = []
    for section, keys in settings.model_dump(mode="json").items():
        for key, value in keys.items():
            origin = origins.get(f"{section}.{key}", "default")
            shown.append(ShownValue(section, key, value, origin))
    return shown


def only_live(shown: Sequence[ShownValue]) -> list[ShownValue]:
    """What a running daemon takes over from a changed configuration, and when."""
    from store_daemon.live_settings import LIVE, LIVE_SECTIONS

    found = []
    for item in shown:
        text = LIVE.get(f"{item.section}.{item.key}") or LIVE_SECTIONS.get(item.section)
        if text is not None:
            found.append(replace(item, takes_effect=text))
    return found


def config_json(shown: Sequence[ShownValue]) -> dict[str, Any]:
    """Section -> key -> {value, origin, and takes_effect where it is known}."""
    sections: dict[str, Any] = {}
    for item in shown:
        keys = sections.setdefault(item.section, {})
        keys[item.key] = {"value": item.value, "origin": item.origin}
        if item.takes_effect:
            keys[item.key]["takes_effect"] = item.takes_effect
    return sections


def print_config(console: Console, shown: Sequence[ShownValue], *, with_origin: bool) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("key", no_wrap=True)
    with_effect = any(item.takes_effect for item in shown)
    extras = (*(("origin",) if with_origin else ()), *(("takes effect",) if with_effect else ()))
    for heading in ("value", *extras):
        table.add_column(heading, overflow="fold")
    for item in shown:
        row = [f"{item.section}.{item.key}", json.dumps(item.value)]
        row += [item.origin] if with_origin else []
        row += [item.takes_effect] if with_effect else []
        table.add_row(*row)
    console.print(table)
