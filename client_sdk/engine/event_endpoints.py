"""Where others can hear what an engine publishes of its own KV cache.

Its settings say where it binds; others need to know where to connect.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
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


def reachable_endpoints(events: str, replay: str, engine_url: str, dp_rank: int) -> EventEndpoints:
    """What routers are told of an engine that binds to these.

    Wildcard hosts become the host of `engine_url`, where routers reach the engine anyway; ports go
    up by the data-parallel rank, as those of vLLM and SGLang do. What is on a port nobody knows
    yet is found nowhere.
    """
    host = _host_of(engine_url)
    found = _reachable(events, host, dp_rank)
    return EventEndpoints(found, _reachable(replay, host, dp_rank)) if found else NOWHERE


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
