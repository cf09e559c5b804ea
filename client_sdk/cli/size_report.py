"""`emberkv size`: reads a model's config.json and shows what `sizing` says."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from client_sdk.cli.sizing import GIB, ModelShape, Sizing, shape_of
from emberkv_proto.errors import InvalidRequestError

MAX_CONFIG_BYTES = 1 << 20


def read_shape(model: Path, dtype: str) -> ModelShape:
    """Of a model's directory, or its config.json. Raises InvalidRequestError."""
    path = model / "config.json" if model.is_dir() else model
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
        loaded = json.loads(raw) if len(raw) <= MAX_CONFIG_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{path} cannot be read as a model's config: {error}") from None
    if not isinstance(loaded, dict):
        raise InvalidRequestError(f"{path} is no model's config.json")
    name = str(loaded.get("_name_or_path") or "") or path.parent.name
    return shape_of(loaded, name, dtype)


def size_json(sizing: Sizing, target_percent: float | None) -> dict[str, Any]:
    return {
        "model": sizing.shape.name,
        "token_bytes": sizing.shape.token_bytes,
        "is_upper_bound": sizing.shape.is_upper_bound,
        "block_bytes": sizing.block_bytes,
        "kept_tokens": sizing.kept_tokens,
        "span_seconds": sizing.span_seconds,
        "expected": [asdict(expected) for expected in sizing.expected()],
        "needed_bytes": None if target_percent is None else sizing.needed(target_percent),
        "values": sizing.values(),
    }


def print_size(console: Console, sizing: Sizing, target_percent: float | None) -> None:
    shape = sizing.shape
    bound = ", at most: some of its layers keep a window or a state" * shape.is_upper_bound
    facts = {
        f"KV a token of {shape.name}": f"{shape.token_bytes:,} bytes{bound}",
        f"a block of {sizing.block_tokens} tokens": f"{sizing.block_bytes / 2**20:,.2f} MiB",
        "a node's pool and SSD": (
            f"{sizing.pool_bytes / GIB:,.0f} GiB: {sizing.pool_blocks:,} blocks; "
            f"{sizing.ssd_bytes / GIB:,.0f} GiB: {sizing.ssd_blocks:,} blocks"
        ),
        f"kept on {sizing.nodes} nodes": (
            f"{sizing.kept_tokens:,} tokens, {sizing.span_seconds:,.0f} s of "
            f"{sizing.tokens_per_second:,.0f} prompt tokens a second"
        ),
    }
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, text in facts.items():
        table.add_row(name, text)
    for expected in sizing.expected():
        least = "at least " * expected.is_beyond
        table.add_row(
            f"hits if it is like {expected.trace}",
            f"{least}{expected.percent:.1f} % of blocks ({expected.most_percent} % is the most)",
        )
    if target_percent is not None:
        for trace, needed in sizing.needed(target_percent).items():
            text = "more than was measured" if needed is None else f"{needed / GIB:,.1f} GiB of KV"
            table.add_row(f"{target_percent:g} % if it is like {trace}", text)
    if sizing.is_shared:
        text = f"{sizing.index_blocks:,}, more than one router can keep: shared through Redis"
        table.add_row("rows of the index", text)
    console.print(table)
    console.print("\nvalues for the chart:", markup=False)
    console.print(yaml.safe_dump(sizing.values(), sort_keys=False), markup=False, highlight=False)
