"""Where others can hear what this vLLM engine publishes of its own KV cache.

vLLM publishes when it is started with `--kv-events-config '{"enable_kv_cache_events": true, ...}'`.
Its settings say where it binds; others need to know where to connect.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

log = logging.getLogger(__name__)

_TCP = re.compile(r"tcp://(?P<host>\*|\[[^\]]*\]|[^\s:\[\]]+):(?P<port>\d{1,5})")
_WILDCARDS = frozenset({"*", "0.0.0.0", "[::]"})


@dataclass(frozen=True, slots=True)
class EventEndpoints:
    """Where to connect to; empty: nowhere."""

    events: str = ""
    replay: str = ""


NOWHERE = EventEndpoints()


def event_endpoints(config: Any, engine_url: str, dp_rank: int) -> EventEndpoints:
    """What routers are told, from vLLM's `kv_events_config`.

    Wildcard hosts become the host of `engine_url`, where routers reach the engine anyway; ports go
    up by the data-parallel rank, as vLLM's do. An engine that publishes otherwise (not at all, to
    a collector it connects to, on a port nobody knows yet) is found nowhere, and says why.
    """
    if config is None or not config.enable_kv_cache_events or config.publisher != "zmq":
        return NOWHERE
    if not _binds(str(config.endpoint)):
        log.warning(
            "EmberKV: vLLM sends its KV events to %s instead of binding; routers do not hear them",
            config.endpoint,
        )
        return NOWHERE
    host = _host_of(engine_url)
    events = _reachable(str(config.endpoint), host, dp_rank)
    if not events:
        return NOWHERE
    return EventEndpoints(events, _reachable(str(config.replay_endpoint or ""), host, dp_rank))


def _binds(endpoint: str) -> bool:
    """As vLLM decides it."""
    return "*" in endpoint or "::" in endpoint


def _reachable(endpoint: str, host: str, dp_rank: int) -> str:
    if not endpoint:
        return ""
    match = _TCP.fullmatch(endpoint)
    port = int(match["port"]) if match else 0
    if match is None or not port:
        log.warning("EmberKV: KV events at %s can be reached by nobody else", endpoint)
        return ""
    where = host if match["host"] in _WILDCARDS else match["host"]
    return f"tcp://{where}:{port + dp_rank}"


def _host_of(engine_url: str) -> str:
    host = urlsplit(engine_url).hostname or ""
    return f"[{host}]" if ":" in host else host
