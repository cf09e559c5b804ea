"""Where routers hear what this vLLM engine publishes of its own KV cache.

vLLM publishes when it is started with `--kv-events-config '{"enable_kv_cache_events": true, ...}'`.
"""

from __future__ import annotations

import logging
from typing import Any

from client_sdk.engine.event_endpoints import NOWHERE, EventEndpoints, reachable_endpoints

log = logging.getLogger(__name__)


def event_endpoints(config: Any, engine_url: str, dp_rank: int) -> EventEndpoints:
    """What routers are told, from vLLM's `kv_events_config`.

    An engine that publishes otherwise (not at all, or to a collector it connects to) is found
    nowhere, and says why.
    """
    if config is None or not config.enable_kv_cache_events or config.publisher != "zmq":
        return NOWHERE
    if not _binds(str(config.endpoint)):
        log.warning(
            "EmberKV: vLLM sends its KV events to %s instead of binding; routers do not hear them",
            config.endpoint,
        )
        return NOWHERE
    replay = str(config.replay_endpoint or "")
    return reachable_endpoints(str(config.endpoint), replay, engine_url, dp_rank)


def _binds(endpoint: str) -> bool:
    """As vLLM decides it."""
    return "*" in endpoint or "::" in endpoint
