"""What an engine says it delivered: `usage.prompt_tokens_details` of a finished response. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

SOURCES = ("hbm", "dram", "ssd", "peer")
MAX_PARSED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Delivered:
    """Prompt tokens not computed: in all, and by source where the engine tells."""

    cached_tokens: int
    by_source: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


def from_json(body: bytes) -> Delivered | None:
    """Read a whole JSON response; None when it says nothing about cached tokens."""
    if b"cached_tokens" not in body or len(body) > MAX_PARSED_BYTES:
        return None
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return _from_usage(parsed.get("usage")) if isinstance(parsed, dict) else None


def from_stream_tail(tail: bytes) -> Delivered | None:
    """Read the last event of a stream that carries a usage; chunk framing around it is no harm."""
    at = tail.rfind(b"cached_tokens")
    if at < 0:
        return None
    start = tail.rfind(b"data:", 0, at)
    end = tail.find(b"\n", at)
    if start < 0 or end < 0:
        return None
    return from_json(tail[start + len(b"data:") : end])


def _from_usage(usage: Any) -> Delivered | None:
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    if not isinstance(details, dict) or not _is_count(details.get("cached_tokens")):
        return None
    nested = details.get("by_source")
    parts = nested if isinstance(nested, dict) else {}
    by_source = {}
    for source in SOURCES:
        count = parts.get(source, details.get(f"{source}_tokens"))
        if _is_count(count):
            by_source[source] = count
    counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    prompt, completion = (count if _is_count(count) else None for count in counts)
    return Delivered(details["cached_tokens"], by_source, prompt, completion)


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and value >= 0
