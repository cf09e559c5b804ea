"""What an engine says it delivered: `usage.prompt_tokens_details` of a finished response. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import msgspec


class _Answer(msgspec.Struct):
    usage: msgspec.Raw


_decode = msgspec.json.Decoder(_Answer).decode
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
    return _from_usage(_usage_in(body, b"cached_tokens"))


def from_stream_tail(tail: bytes) -> Delivered | None:
    """Read the last event of a stream that carries a usage; chunk framing around it is no harm."""
    return from_json(_last_event(tail, b"cached_tokens"))


def answered_tokens(body: bytes, *, is_stream: bool) -> int:
    """Generated tokens, by a whole JSON response or a stream's tail; 0 where it does not tell.

    Other than hits they are told by any engine.
    """
    word = b"completion_tokens"
    usage = _usage_in(_last_event(body, word) if is_stream else body, word)
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return count if _is_count(count) else 0


def _last_event(tail: bytes, word: bytes) -> bytes:
    """The data of the last event with this word; empty without one."""
    at = tail.rfind(word)
    start, end = tail.rfind(b"data:", 0, max(0, at)), tail.find(b"\n", max(0, at))
    return tail[start + len(b"data:") : end] if min(at, start, end) >= 0 else b""


def _usage_in(body: bytes, word: bytes) -> Any:
    if word not in body or len(body) > MAX_PARSED_BYTES:
        return None
    try:
        return json.loads(bytes(_decode(body).usage))
    except (ValueError, RecursionError):
        return None


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
