"""What the router answers, as one table: its routes are made from it, and so is its own document.

`/openapi.json` shows it. What an engine says in its answer, and what it takes beside what routing
reads, is the engine's affair: there the document names what the router itself looks at.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, unique
from typing import Any

from router.surface_schemas import SCHEMAS

Document = dict[str, Any]
OPENAPI = "3.1.0"


@unique
class Work(str, Enum):
    """What an endpoint does; several may do the same."""

    COMPLETE = "complete"
    COMPLETE_UNREAD = "complete_unread"
    FORWARD = "forward"
    MODELS = "models"
    EXPLAIN = "explain"
    SHOW_POLICY = "show_policy"
    SET_POLICY = "set_policy"
    WORKERS = "workers"
    HEALTH = "health"
    READY = "ready"
    METRICS = "metrics"
    DOCUMENT = "document"
    UI_PAGE = "ui_page"
    UI_STYLE = "ui_style"
    UI_SCRIPT = "ui_script"
    UI_STATE = "ui_state"


FORWARDED = frozenset({Work.COMPLETE, Work.COMPLETE_UNREAD, Work.FORWARD})
"""Answered by an engine."""
JSON = "application/json"
METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path. `body` and `answer` name schemas of the document."""

    method: str
    path: str
    work: Work
    summary: str
    body: str = ""
    """Empty: none is read."""
    answer: str = ""
    """Of a 200; empty where the engine's answer passes, or where it is no JSON."""
    answer_type: str = JSON
    refusals: tuple[int, ...] = ()
    """Statuses of our own beside those that any request may get."""
    needs_key: bool = False
    """Where there is a key file."""
    is_operators: bool = False
    """For the router's own machine, and for whoever has the operators' token."""


_ASKED = (404, 413, 429, 502, 503, 504)
_EXPLAINED = (404, 413, 429, 503)


def _model(path: str, work: Work, summary: str, body: str) -> Endpoint:
    return Endpoint("POST", path, work, summary, body, refusals=_ASKED, needs_key=True)


ENDPOINTS: tuple[Endpoint, ...] = (
    _model("/v1/completions", Work.COMPLETE, "Complete a prompt", "Completion"),
    _model("/v1/chat/completions", Work.COMPLETE, "Answer a chat", "Chat"),
    _model("/v1/responses", Work.COMPLETE_UNREAD, "OpenAI's responses", "OfEngine"),
    _model("/v1/messages", Work.COMPLETE_UNREAD, "Anthropic's messages", "OfEngine"),
    _model("/v1/embeddings", Work.COMPLETE_UNREAD, "Embed texts", "OfEngine"),
    _model("/v1/rerank", Work.COMPLETE_UNREAD, "Rank documents", "OfEngine"),
    _model("/v1/score", Work.COMPLETE_UNREAD, "Score pairs of texts", "OfEngine"),
    _model("/v1/messages/count_tokens", Work.FORWARD, "Count a prompt's tokens", "OfEngine"),
    _model("/tokenize", Work.FORWARD, "Make tokens", "OfEngine"),
    _model("/detokenize", Work.FORWARD, "Make a text of tokens", "OfEngine"),
    Endpoint(
        "GET", "/v1/models", Work.MODELS, "Models that healthy engines serve",
        answer="Models", needs_key=True,
    ),
    Endpoint(
        "POST", "/route/explain", Work.EXPLAIN, "Where a request would go and why; nothing is sent",
        "Prompt", "Explanation", refusals=_EXPLAINED, needs_key=True,
    ),
    Endpoint(
        "GET", "/admin/policy", Work.SHOW_POLICY, "The policy in force",
        answer="Policy", is_operators=True,
    ),
    Endpoint(
        "POST", "/admin/policy", Work.SET_POLICY, "Route the next requests by another policy",
        "PolicyOrder", "Policy", refusals=(413,), is_operators=True,
    ),
    Endpoint("GET", "/workers", Work.WORKERS, "All engines with their load", answer="Workers"),
    Endpoint("GET", "/health", Work.HEALTH, "Whether the router lives", answer="Health"),
    Endpoint(
        "GET", "/ready", Work.READY, "Whether an engine can answer",
        answer="Ready", refusals=(503,),
    ),
    Endpoint(
        "GET", "/metrics", Work.METRICS, "Figures for Prometheus",
        answer_type=METRICS_TYPE.decode(),
    ),
    Endpoint("GET", "/openapi.json", Work.DOCUMENT, "This document", answer="Document"),
    Endpoint(
        "GET", "/ui", Work.UI_PAGE, "The page for people", answer_type="text/html; charset=utf-8"
    ),
    Endpoint(
        "GET", "/ui/style.css", Work.UI_STYLE, "Its style", answer_type="text/css; charset=utf-8"
    ),
    Endpoint(
        "GET", "/ui/app.js", Work.UI_SCRIPT, "Its program",
        answer_type="text/javascript; charset=utf-8",
    ),
    Endpoint(
        "GET", "/ui/state", Work.UI_STATE, "What it shows", answer="UiState", is_operators=True
    ),
)  # fmt: skip


def served(work: Collection[Work]) -> tuple[Endpoint, ...]:
    """The endpoints that do one of these."""
    return tuple(endpoint for endpoint in ENDPOINTS if endpoint.work in work)


def document(endpoints: Sequence[Endpoint], version: str) -> Document:
    """The OpenAPI document of these endpoints."""
    paths: dict[str, Document] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": OPENAPI,
        "info": {
            "title": "EmberKV router",
            "version": version,
            "description": "Any path with GET answers HEAD too. Request bodies are JSON whatever"
            " their content type says.",
        },
        "paths": paths,
        "components": {
            "schemas": SCHEMAS,
            "responses": {
                str(status): {
                    "description": meaning,
                    "content": {JSON: {"schema": _reference("Error")}},
                }
                for status, meaning in _MEANINGS.items()
            },
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "A tenant's API key"},
                "operator": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "router.operator_token_file; not asked for on loopback",
                },
            },
        },
    }


def _operation(endpoint: Endpoint) -> Document:
    operation: Document = {
        "operationId": f"{endpoint.method.lower()}{endpoint.path.replace('/', '_')}",
        "summary": endpoint.summary,
        "responses": _responses(endpoint),
    }
    if endpoint.needs_key:
        operation["security"] = [{}, {"key": []}]
    if endpoint.is_operators:
        operation["security"] = [{}, {"operator": []}]
    if endpoint.work in FORWARDED:
        operation["parameters"] = [
            _header("x-emberkv-priority", {"enum": ["high", "normal", "low"]}),
            _header("x-request-id", {"type": "string", "pattern": "^[!-~]{1,256}$"}),
            _header("x-session-id", {"type": "string", "pattern": "^[!-~]{1,256}$"}),
        ]
    if endpoint.body:
        operation["requestBody"] = {
            "required": True,
            "content": {JSON: {"schema": _reference(endpoint.body)}},
        }
    return operation


def _responses(endpoint: Endpoint) -> Document:
    statuses = {400, 417, 431, *endpoint.refusals}
    if endpoint.needs_key or endpoint.is_operators:
        statuses |= {401, 403}
    if endpoint.needs_key:
        statuses.add(429)
    responses: Document = {
        str(status): {"$ref": f"#/components/responses/{status}"} for status in sorted(statuses)
    }
    if endpoint.work in FORWARDED:
        responses["default"] = {"description": "What the engine answered, untouched"}
    else:
        schema = _reference(endpoint.answer) if endpoint.answer else {"type": "string"}
        responses["200"] = {
            "description": "Done",
            "content": {endpoint.answer_type: {"schema": schema}},
        }
    return responses


_MEANINGS = {
    400: "Malformed, or the body is no JSON object",
    401: "Whoever asks has to show a key or a token",
    403: "Not for this key, or not from there",
    404: "No engine serves the model",
    413: "The body is too large",
    417: "An expectation other than 100-continue",
    429: "All engines are full, or the tenant's limit is reached; Retry-After says for how long",
    431: "The request's head is too large",
    502: "The engine failed before it answered",
    503: "No engine is healthy",
    504: "The engine did not answer in time",
}


def _reference(name: str) -> Document:
    assert name in SCHEMAS, f"no schema is called {name}"
    return {"$ref": f"#/components/schemas/{name}"}


def _header(name: str, schema: Document) -> Document:
    return {"name": name, "in": "header", "required": False, "schema": schema}
