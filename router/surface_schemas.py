"""The JSON that endpoints take and give, as schemas. Values that are asdict() are read off."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import TypeAdapter

from emberkv_proto.types import EngineHit, NodeHit
from router.config import PolicyName
from router.health import HealthState
from router.scoring import Holding, Load, Speeds
from router.speeds import SampleCounts

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer", "minimum": 0}
SECONDS: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
MAYBE_TEXT: Schema = {"type": ["string", "null"]}
TOKEN: Schema = {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def _object(**fields: Schema) -> Schema:
    """With all of these fields and no other."""
    return {
        "type": "object",
        "properties": fields,
        "required": [*fields],
        "additionalProperties": False,
    }


def _of(kind: type, **further: Schema) -> Schema:
    """As asdict() makes it, with further fields: all are there, defaults or not."""
    schema: Schema = TypeAdapter(kind).json_schema()
    assert "$defs" not in schema, f"{kind} holds another"
    return _object(**schema["properties"], **further)


def _asked(**fields: Schema) -> Schema:
    """A body of which routing reads these fields; the engine judges all of it."""
    return {"type": "object", "properties": {**_ROUTED, **fields}}


_ROUTED: dict[str, Schema] = {
    "model": {**TEXT, "description": "May be left out where all engines serve one model"},
    "stream": FLAG,
    "priority": {"type": "integer", "description": "Below 0: high; above: low"},
    "cache_salt": TEXT,
}
_PROMPT: Schema = {
    "oneOf": [TEXT, _list(TEXT), _list(TOKEN), _list(_list(TOKEN))],
}
_MESSAGES: Schema = _list(
    {
        "type": "object",
        "properties": {"role": TEXT, "content": {"type": ["string", "array", "null"]}},
        "required": ["role"],
    }
)
_POLICIES: Schema = {"enum": [*get_args(PolicyName)]}

SCHEMAS: dict[str, Schema] = {
    "Error": _object(
        error=_object(
            message=TEXT,
            type=TEXT,
            param={"type": "null"},
            code={"type": ["string", "integer"]},
        )
    ),
    "Completion": _asked(prompt=_PROMPT),
    "Chat": _asked(messages=_MESSAGES, tools=_list({"type": "object"})),
    "Prompt": _asked(prompt=_PROMPT, messages=_MESSAGES),
    "OfEngine": _asked(user=TEXT),
    "Models": _object(
        object={"const": "list"},
        data=_list(
            {"type": "object", "properties": {"id": TEXT, "object": TEXT}, "required": ["id"]}
        ),
    ),
    "Explanation": _object(
        model=TEXT,
        prompt_tokens=WHOLE,
        tokens_known=FLAG,
        no_tokens_reason=MAYBE_TEXT,
        chosen=MAYBE_TEXT,
        chosen_url=MAYBE_TEXT,
        problem=MAYBE_TEXT,
        chains=_list(
            _object(
                namespace_id=TEXT,
                block_tokens=WHOLE,
                blocks=WHOLE,
                hits=_list(_of(NodeHit)),
                engine_hits=_list(_of(EngineHit)),
            )
        ),
        engines=_list(
            _object(
                engine=TEXT,
                url=TEXT,
                node_id=MAYBE_TEXT,
                total_seconds=SECONDS,
                queue_seconds=SECONDS,
                fetch_seconds=SECONDS,
                prefill_seconds=SECONDS,
                uncached_tokens=WHOLE,
                holding=_of(Holding),
                used=_of(Holding),
                load=_of(Load),
                speeds=_of(Speeds, samples=_of(SampleCounts)),
            )
        ),
    ),
    "Policy": _object(policy=_POLICIES, policies=_list(_POLICIES)),
    "PolicyOrder": {
        "type": "object",
        "properties": {"policy": _POLICIES},
        "required": ["policy"],
    },
    "Workers": _object(
        workers=_list(
            _object(
                engine=TEXT,
                url=TEXT,
                node_id=MAYBE_TEXT,
                models=_list(TEXT),
                role=TEXT,
                state={"enum": [state.value for state in HealthState]},
                is_static=FLAG,
                is_announced=FLAG,
                namespace_id=MAYBE_TEXT,
                block_tokens=WHOLE,
                load=_of(Load),
            )
        )
    ),
    "Health": _object(status={"const": "ok"}, version=TEXT),
    "Ready": _object(status={"const": "ready"}),
    "Document": {"type": "object", "required": ["openapi", "info", "paths"]},
    "UiState": {"type": "object"},
}
