"""The router does what its own document says, whatever is sent that the document allows, or not.

Schemathesis draws the requests and compares the answers: statuses, content types, bodies.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from router.keys import edit_keys, make_key
from router.surface import ENDPOINTS, FORWARDED, Work, document, served
from tests.helpers.fake_engine import FakeEngine, answer
from tests.helpers.router_client import HandIndex, request, running_router

README = Path(__file__).parents[3] / "router" / "README.md"
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
EXAMPLES = 5
"""Of each kind, for each operation."""
OPERATIONS = [(endpoint.method, endpoint.path) for endpoint in ENDPOINTS]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
async def test_every_operation_keeps_to_the_document_whatever_comes(mode: GenerationMode) -> None:
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        engine.tokenize = answer({"tokens": list(range(64))})
        told = (await request(router.port, "/openapi.json")).json
        seen = await asyncio.to_thread(send_drawn, told, router.port, mode)
        if mode is GenerationMode.POSITIVE:
            assert seen.keys() == set(OPERATIONS)
            for (_, path), found in seen.items():
                assert 200 in found, f"{path} never did its work: {found}"
        await router.settled()
        got = await request(router.port, "/v1/completions", {"model": "m", "prompt": [1, 2]})
        assert got.status == 200


def send_drawn(told: Any, port: int, mode: GenerationMode) -> dict[tuple[str, str], set[int]]:
    """Send what schemathesis draws and check each answer; statuses by operation."""
    schema = schemathesis.openapi.from_dict(told)
    schema.config.update(base_url=f"http://127.0.0.1:{port}")
    operations = [found.ok() for found in schema.get_all_operations()]
    if mode is GenerationMode.NEGATIVE:
        operations = [operation for operation in operations if operation.body]
    with requests.Session() as session:
        return {
            (operation.method.upper(), operation.path): statuses(operation, session, mode)
            for operation in operations
        }


def statuses(operation: Any, session: requests.Session, mode: GenerationMode) -> set[int]:
    seen: set[int] = set()

    @settings(
        max_examples=EXAMPLES,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        got = case.call_and_validate(session=session, checks=CHECKS, timeout=60)
        seen.add(got.status_code)

    send()
    return seen


async def test_the_document_tells_all_that_is_served_and_nothing_else() -> None:
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        told = (await request(router.port, "/openapi.json")).json
        shown = [
            (method.upper(), path) for path, methods in told["paths"].items() for method in methods
        ]
        assert sorted(shown) == sorted(OPERATIONS)
        references = set(re.findall(r"#/components/\w+/\w+", str(told)))
        for reference in references:
            _, _, kind, name = reference.split("/")
            assert name in told["components"][kind]
    async with (
        FakeEngine().serving() as engine,
        running_router(engine.url, index=HandIndex(), ui=False) as router,
    ):
        told = (await request(router.port, "/openapi.json")).json
        assert "/ui" not in told["paths"]
        assert (await request(router.port, "/ui")).status == 404


async def test_keys_are_asked_for_where_the_document_says_so(tmp_path: Path) -> None:
    keys, secret = tmp_path / "keys.json", tmp_path / "secret"
    secret.write_text("s" * 32)
    secret.chmod(0o600)
    edit_keys(keys, lambda file: file.with_key(make_key("acme", "now").stored, None))
    guarded: dict[str, Any] = {"key_file": keys, "tenant_secret_file": secret}
    async with FakeEngine().serving() as engine, running_router(engine.url, **guarded) as router:
        for endpoint in ENDPOINTS:
            body = {"model": "m", "policy": "cost"} if endpoint.method == "POST" else None
            got = await request(router.port, endpoint.path, body, {"Host": "localhost"})
            assert (got.status == 401) == endpoint.needs_key, endpoint.path


def test_each_operation_is_told_once_and_the_readme_names_each_path() -> None:
    assert len(set(OPERATIONS)) == len(OPERATIONS)
    assert served(set(Work)) == ENDPOINTS
    named = README.read_text()
    assert not [path for _, path in OPERATIONS if path not in named]


def test_operations_name_their_schemas_and_refusals() -> None:
    told = document(ENDPOINTS, "0")
    for endpoint in ENDPOINTS:
        operation = told["paths"][endpoint.path][endpoint.method.lower()]
        assert ("requestBody" in operation) == bool(endpoint.body)
        assert ("default" in operation["responses"]) == (endpoint.work in FORWARDED)
        assert ("200" in operation["responses"]) != (endpoint.work in FORWARDED)
        for status in endpoint.refusals:
            assert str(status) in operation["responses"]
