"""Which settings a running daemon can take over, and what differs between two sets. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from emberkv_proto.errors import ConfigError
from store_daemon.config import DaemonSettings

LIVE: Mapping[str, str] = {
    "daemon.lease_seconds": "from the next grant or heartbeat on; live only when it grows, because"
    " clients count with the time they were told",
    "daemon.lease_share": "for the next lease; a lower share ends none",
    "daemon.stage_seconds": "for all sessions, at once",
    "daemon.drain_seconds": "at the next drain",
    "daemon.peer_timeout_seconds": "for the next request of a peer",
    "daemon.operator_token_file": "at once; the file is read again at each reload",
    "daemon.log_level": "at once",
    "daemon.log_format": "at once",
    "dram.high_watermark": "at the next commit",
    "dram.low_watermark": "at the next trim",
    "dram.policy": "at once; the new policy knows nothing of earlier uses",
    "dram.pin_share": "for the next pin; a lower share ends no pin",
    "dram.tenant_quota_bytes": "at once; who is over it loses blocks when room is needed",
    "ssd.tenant_quota_bytes": "at once, for the next copy",
    "ssd.queue_blocks": "for the next block",
    "ssd.write_bytes_per_second": "for the next batch",
    "ssd.scrub_bytes_per_second": "at the next step",
    "peers.replicate_after_pulls": "for the next block that comes",
    "peers.replicate_seconds": "for the next block that comes",
    "peers.replica_share": "at once",
}
"""Key -> when a change of it takes effect. Everything else needs a restart."""
LIVE_SECTIONS: Mapping[str, str] = {
    "tenants": "at once; a tenant that is left out falls back to tenant_quota_bytes"
}
"""Sections whose keys are all live."""


@dataclass(frozen=True, slots=True)
class Change:
    """One key that has another value now. Values are JSON-ready; None where there was none."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {json.dumps(self.old)} -> {json.dumps(self.new)}"


@dataclass(frozen=True, slots=True)
class Changes:
    """The difference between two configurations."""

    live: tuple[Change, ...]
    needs_restart: tuple[Change, ...]


def compare(old: DaemonSettings, new: DaemonSettings) -> Changes:
    """What differs, by key, in the order of the schema."""
    before, after = _flat(old), _flat(new)
    live: list[Change] = []
    needs_restart: list[Change] = []
    for key in dict.fromkeys((*before, *after)):
        change = Change(key, before.get(key), after.get(key))
        if change.old != change.new:
            (live if _is_live(change) else needs_restart).append(change)
    return Changes(tuple(live), tuple(needs_restart))


def with_live_changes(old: DaemonSettings, new: DaemonSettings) -> DaemonSettings:
    """The old settings, but for what may change while the daemon runs.

    Raises ConfigError when the new values do not fit the old ones that stay.
    """
    values = old.model_dump(mode="json", exclude_unset=True)
    wanted = new.model_dump(mode="json")
    for section in LIVE_SECTIONS:
        values[section] = wanted[section]
    for change in compare(old, new).live:
        section, _, key = change.key.partition(".")
        if section not in LIVE_SECTIONS:
            values.setdefault(section, {})[key] = wanted[section][key]
    try:
        return DaemonSettings.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(problem["msg"] for problem in error.errors())
        raise ConfigError(f"what may change now does not fit what may not: {problems}") from None


def _is_live(change: Change) -> bool:
    if change.key == "daemon.lease_seconds":
        return bool(change.new > change.old)
    return change.key in LIVE or change.key.partition(".")[0] in LIVE_SECTIONS


def _flat(settings: DaemonSettings) -> dict[str, Any]:
    """`section.key` -> value; a tenant's limits are keys of their own."""
    found: dict[str, Any] = {}
    for section, keys in settings.model_dump(mode="json").items():
        for key, value in keys.items():
            if isinstance(value, dict):
                found |= {f"{section}.{key}.{name}": inner for name, inner in value.items()}
            else:
                found[f"{section}.{key}"] = value
    return found
