"""Which settings a running router takes over, and what differs between two sections. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from router.config import RouterSection

LIVE: Mapping[str, str] = {
    "engines": "new ones once they are healthy; none goes to those left out, whose requests end",
    "policy": "for the next request",
    "max_inflight_per_engine": "for the next request",
    "max_queued_tokens_per_engine": "for the next request",
    "queue_requests": "for the next request; those in line stay",
    "queue_seconds": "for the next request that has to wait",
    "max_retry_after_seconds": "for the next 429",
}
"""Key -> when a change of it takes effect. Everything else needs a restart."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Keys with another value, by whether a running router takes them over."""

    live: tuple[str, ...]
    needs_restart: tuple[str, ...]


def compare(old: RouterSection, new: RouterSection) -> Changes:
    """What differs, in the order of the schema."""
    changed = [key for key in type(old).model_fields if getattr(old, key) != getattr(new, key)]
    return Changes(
        tuple(key for key in changed if key in LIVE),
        tuple(key for key in changed if key not in LIVE),
    )


def with_live_changes(old: RouterSection, new: RouterSection) -> RouterSection:
    """`old` with what may change taken from `new`."""
    return old.model_copy(update={key: getattr(new, key) for key in LIVE})
