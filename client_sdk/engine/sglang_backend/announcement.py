"""How routers find an SGLang engine: its address, its namespace, and where it publishes.

SGLang publishes with `--kv-events-config '{"publisher": "zmq", ...}'`, one rank of each replica.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from client_sdk.engine.event_endpoints import NOWHERE, EventEndpoints, reachable_endpoints
from client_sdk.engine.sglang_backend.identity import PageShape
from emberkv_proto.types import EngineInfo, HashScheme

log = logging.getLogger("sglang.emberkv")
DEFAULT_ENDPOINT = "tcp://*:5557"
"""SGLang's own."""


def engine_info(
    shape: PageShape, config: Any, args: Any, engine_url: str, dp_rank: int
) -> EngineInfo | None:
    """What this rank tells of its engine; None when another rank does, or there is no address.

    Args:
        config: SGLang's HiCacheStorageConfig.
        args: SGLang's ServerArgs; None outside a server.
        dp_rank: of this replica.
    """
    if not engine_url or config.tp_rank or config.pp_rank or config.attn_cp_rank:
        return None
    endpoints = event_endpoints(getattr(args, "kv_events_config", None), engine_url, dp_rank)
    name = str(getattr(args, "served_model_name", None) or config.model_name)
    return EngineInfo(
        engine_id=f"sglang {engine_url}",
        url=engine_url,
        model=name,
        namespace_id=shape.namespace.id,
        block_tokens=shape.page_tokens,
        dp_rank=dp_rank,
        events_endpoint=endpoints.events,
        replay_endpoint=endpoints.replay,
        engine_block_tokens=shape.page_tokens,
        hash_scheme=HashScheme.SGLANG,
    )


def event_endpoints(text: str | None, engine_url: str, dp_rank: int) -> EventEndpoints:
    """What routers are told, from SGLang's `--kv-events-config`.

    An engine that publishes otherwise (not at all, or to a collector it connects to) is found
    nowhere, and says why.
    """
    given = json.loads(text) if text else None
    if not isinstance(given, Mapping) or given.get("publisher", "null") != "zmq":
        return NOWHERE
    endpoint = str(given.get("endpoint") or DEFAULT_ENDPOINT)
    if not _binds(endpoint, given.get("bind")):
        log.warning(
            "EmberKV: SGLang sends its KV events to %s instead of binding; routers do not hear"
            " them",
            endpoint,
        )
        return NOWHERE
    return reachable_endpoints(
        endpoint, str(given.get("replay_endpoint") or ""), engine_url, dp_rank
    )


def _binds(endpoint: str, wanted: bool | None) -> bool:
    """As SGLang decides it."""
    return wanted if wanted is not None else any(s in endpoint for s in ("*", "::", "0.0.0.0"))
