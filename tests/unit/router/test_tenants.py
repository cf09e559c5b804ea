"""Keys, limits and salts on the wire: what engines see of a tenant, and what clients are told."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkv_proto.errors import ConfigError
from emberkv_proto.hashing import block_hashes, index_keys
from emberkv_proto.types import EngineInfo, NamespaceId, NodeId
from router.config import RouterSection
from router.keys import TenantLimits, edit_keys, make_key
from router.tenants import Tenants, with_salt
from tests.helpers.fake_engine import SSE_HEAD, FakeEngine, answer, chunk, hang, stream
from tests.helpers.router_client import (
    Got,
    HandIndex,
    HandNode,
    connected,
    request,
    running_router,
)
from tests.helpers.waiting import until

PATH = "/v1/completions"
PROMPT: dict[str, Any] = {"model": "m", "prompt": list(range(8))}


@dataclass
class Files:
    """A key file, the cluster's secret, and settings that name both."""

    keys: Path
    secret: Path

    @property
    def settings(self) -> dict[str, Any]:
        return {"key_file": self.keys, "tenant_secret_file": self.secret}

    def add(self, tenant: str, **limits: Any) -> dict[str, str]:
        """A new key, as the header that carries it."""
        key = make_key(tenant, "now")
        given = TenantLimits(**limits) if limits else None
        edit_keys(self.keys, lambda file: file.with_key(key.stored, given))
        return {"Authorization": f"Bearer {key.text}"}

    def revoke(self, headers: dict[str, str]) -> None:
        key_id = headers["Authorization"].split("-")[1]
        edit_keys(self.keys, lambda file: file.without_key(key_id, "now"))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    secret = tmp_path / "secret"
    secret.write_text("c" * 32)
    secret.chmod(0o600)
    return Files(tmp_path / "keys.json", secret)


@pytest.mark.parametrize(
    "path", [PATH, "/v1/chat/completions", "/v1/models", "/tokenize", "/route/explain"]
)
async def test_without_a_valid_key_the_answer_is_401_in_openais_shape(
    files: Files, path: str
) -> None:
    right = files.add("acme")
    wrong = {"Authorization": right["Authorization"][:-3] + "xyz"}
    async with FakeEngine().serving() as engine, running_router(engine.url, **files.settings) as r:
        body = None if path == "/v1/models" else PROMPT
        for headers in ({}, wrong, {"Authorization": "Basic abc"}, {"X-Api-Key": "ek-1-2"}):
            got = (
                await get(r.port, path, headers)
                if body is None
                else await request(r.port, path, body, headers)
            )
            assert got.status == 401
            assert got.headers["www-authenticate"] == "Bearer"
            assert got.json["error"]["code"] == "invalid_api_key"
            assert got.json["error"]["type"] == "authentication_error"
        assert not engine.requests
        assert r.counter("refused_requests_total", why="unauthorized") == 4
        for open_path in ("/health", "/ready", "/metrics", "/workers"):
            assert (await request(r.port, open_path)).status == 200


async def get(port: int, path: str, headers: dict[str, str]) -> Got:
    async with connected(port) as client:
        extra = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        client.send(f"GET {path} HTTP/1.1\r\nHost: r\r\n{extra}\r\n".encode())
        return await client.read()


async def test_a_key_serves_and_no_engine_sees_it(files: Files) -> None:
    headers = files.add("acme")
    secret = headers["Authorization"].split()[1]
    async with FakeEngine().serving() as engine, running_router(engine.url, **files.settings) as r:
        assert (await get(r.port, "/v1/models", headers)).status == 200
        assert (await request(r.port, PATH, PROMPT, headers)).status == 200
        assert (await request(r.port, PATH, PROMPT, {"x-api-key": secret})).status == 200
        for seen in engine.requests:
            assert not {"authorization", "x-api-key"} & seen.headers.keys()
            assert secret not in str(seen)


async def test_without_a_key_file_everything_passes_as_it_came() -> None:
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        raw = b'{ "model":"m", "prompt":[1],  "cache_salt":"mine" }'
        got = await request(router.port, PATH, raw, {"Authorization": "Bearer x"})
        assert got.status == 200
        assert engine.requests[0].body == raw
        assert engine.requests[0].headers["authorization"] == "Bearer x"


async def test_tenants_have_salts_of_their_own_and_cannot_choose_anothers(files: Files) -> None:
    acme, other = files.add("acme"), files.add("other")
    async with FakeEngine().serving() as engine, running_router(engine.url, **files.settings) as r:

        async def salt(headers: dict[str, str], **body: object) -> str:
            assert (await request(r.port, PATH, {**PROMPT, **body}, headers)).status == 200
            return str(engine.requests[-1].json["cache_salt"])

        of_acme, of_other = await salt(acme), await salt(other)
        assert of_acme == await salt(acme)
        assert len({of_acme, of_other}) == 2
        own = await salt(acme, cache_salt="s")
        stolen = await salt(other, cache_salt=of_acme)
        assert own == await salt(acme, cache_salt="s")
        assert len({of_acme, of_other, own, stolen, "s"}) == 5
        assert await salt(other, cache_salt="s") != own
        twice = b'{"model":"m","prompt":[1],"cache_salt":"a","cache_s\\u0061lt":"%s"}'
        await request(r.port, PATH, twice % of_acme.encode(), other)
        assert engine.requests[-1].body.count(of_acme.encode()) == 0
        assert "cache_salt" in engine.requests[-1].json


async def test_a_tenants_hits_are_looked_up_under_its_salt_alone(files: Files) -> None:
    acme, other = files.add("acme"), files.add("other")
    space = NamespaceId(b"n" * 16)
    async with FakeEngine().serving() as engine:
        info = EngineInfo("e", engine.url, "m", space, 4)
        node = HandNode(NodeId("a"), engines=(info,))
        async with running_router(index=HandIndex(node), **files.settings) as r:
            assert r.router.tenants is not None
            salt = r.router.tenants.salt("acme", None).encode()
            hashes = block_hashes(space, PROMPT["prompt"], 4, salt=salt)
            node.dram = set(index_keys(hashes).tolist())

            async def hit(headers: dict[str, str], **body: object) -> int:
                got = await request(r.port, "/route/explain", {**PROMPT, **body}, headers)
                return int(got.json["engines"][0]["holding"]["dram_tokens"])

            assert await hit(acme) == 8
            assert await hit(other) == 0
            assert await hit(other, cache_salt=salt.decode()) == 0
            assert await hit(acme, cache_salt="x") == 0


async def test_limits_answer_429_with_a_time_and_hold_for_one_tenant_only(files: Files) -> None:
    few = files.add("few", requests_per_minute=2)
    small = files.add("small", tokens_per_minute=10)
    free = files.add("free")
    async with FakeEngine().serving() as engine, running_router(engine.url, **files.settings) as r:

        async def status(headers: dict[str, str]) -> int:
            got = await request(r.port, PATH, PROMPT, headers)
            if got.status == 429:
                assert 1 <= int(got.headers["retry-after"]) <= 60
                assert got.json["error"]["code"] == "rate_limit_exceeded"
                assert got.json["error"]["type"] == "rate_limit_error"
            return got.status

        assert [await status(few) for _ in range(3)] == [200, 200, 429]
        # 8 tokens of prompt and one of the answer leave one.
        assert [await status(small) for _ in range(2)] == [200, 429]
        assert [await status(free) for _ in range(5)] == [200] * 5
        explained = await request(r.port, "/route/explain", PROMPT, few)
        assert explained.status == 429
        assert r.counter("refused_requests_total", why="tenant_requests") == 2
        assert r.counter("refused_requests_total", why="tenant_tokens") == 1


@pytest.mark.parametrize("is_stream", [False, True])
async def test_answers_count_whose_engine_tells_nothing_of_its_cache(
    files: Files, is_stream: bool
) -> None:
    small = files.add("small", tokens_per_minute=100)
    told = {"usage": {"prompt_tokens": 8, "completion_tokens": 500, "prompt_tokens_details": None}}
    event = b"data: " + json.dumps(told).encode() + b"\n\n"
    async with FakeEngine().serving() as engine, running_router(engine.url, **files.settings) as r:
        engine.completion = stream([event, b"data: [DONE]\n\n"]) if is_stream else answer(told)
        assert (await request(r.port, PATH, PROMPT, small)).status == 200
        assert (await request(r.port, PATH, PROMPT, small)).status == 429


@pytest.mark.parametrize("is_cut", [False, True])
async def test_a_stream_without_usage_counts_by_its_events_even_when_the_client_leaves(
    files: Files, is_cut: bool
) -> None:
    small = files.add("small", tokens_per_minute=100)
    events = [b'data: {"choices":[{"text":"x"}]}\n\n'] * 300
    async with FakeEngine().serving() as engine, running_router(engine.url, **files.settings) as r:
        engine.completion = stream([*events, b"data: [DONE]\n\n"])
        if is_cut:
            engine.completion = hang(SSE_HEAD + b"".join(map(chunk, events)))
        async with connected(r.port) as client:
            client.post(PATH, PROMPT, small)
            got = await client.read_head()
            assert got.status == 200
            await asyncio.wait_for(client.reader.readexactly(300 * len(chunk(events[0]))), 30)
        await r.settled()
        assert (await request(r.port, PATH, PROMPT, small)).status == 429


async def test_a_prompt_that_found_every_engine_full_takes_no_tokens(files: Files) -> None:
    small, free = files.add("small", tokens_per_minute=10), files.add("free")
    full: dict[str, Any] = {"max_inflight_per_engine": 1, "queue_requests": 0}
    async with (
        FakeEngine().serving() as engine,
        running_router(engine.url, **files.settings, **full) as r,
    ):
        engine.completion = hang()
        async with connected(r.port) as client:
            client.post(PATH, PROMPT, free)
            await engine.was_asked()
            for _ in range(2):
                assert (await request(r.port, PATH, PROMPT, small)).status == 429
        assert r.counter("refused_requests_total", why="saturated") == 2
        await r.settled()
        engine.completion = FakeEngine().completion
        assert (await request(r.port, PATH, PROMPT, small)).status == 200


async def test_requests_at_once_are_limited_and_a_client_that_left_counts_no_more(
    files: Files,
) -> None:
    one = files.add("one", concurrent_requests=1)
    async with FakeEngine().serving() as engine, running_router(engine.url, **files.settings) as r:
        engine.completion = hang()
        async with connected(r.port) as client:
            client.post(PATH, PROMPT, one)
            await engine.was_asked()
            assert (await request(r.port, PATH, PROMPT, one)).status == 429
        await r.settled()
        engine.completion = FakeEngine().completion
        assert (await request(r.port, PATH, PROMPT, one)).status == 200
        assert r.router.tenants is not None
        assert r.router.tenants.active_requests() == 0


async def test_models_and_classes_beyond_a_tenants_own_are_not_given(files: Files) -> None:
    headers = files.add("acme", models=("n",), highest_priority="low")
    async with (
        FakeEngine("n").serving() as engine,
        FakeEngine("m").serving() as other,
        running_router(engine.url, other.url, **files.settings) as r,
    ):
        got = await request(r.port, PATH, PROMPT, headers)
        assert got.status == 403
        assert got.json["error"]["code"] == "model_not_allowed"
        assert got.json["error"]["type"] == "permission_error"
        allowed = await request(
            r.port, PATH, {**PROMPT, "model": "n"}, {**headers, "X-Emberkv-Priority": "high"}
        )
        assert allowed.status == 200
        assert (
            await request(r.port, "/tokenize", {"model": "m", "prompt": "a"}, headers)
        ).status == 403
        assert (await request(r.port, "/route/explain", PROMPT, headers)).status == 403
        assert not other.requests


async def test_no_engine_is_told_a_priority_that_is_not_the_tenants(files: Files) -> None:
    normal, high = files.add("normal", highest_priority="normal"), files.add("high")
    async with FakeEngine().serving() as engine, running_router(engine.url, **files.settings) as r:
        for asked, wanted in ((-5, 0), ("-5", 0), (-5.0, 0), (None, 0), (3, 3), (0, 0)):
            await request(r.port, PATH, {**PROMPT, "priority": asked}, normal)
            assert engine.requests[-1].json["priority"] == wanted
            assert {**engine.requests[-1].json, **PROMPT} == engine.requests[-1].json
        await request(r.port, PATH, PROMPT, normal)
        assert "priority" not in engine.requests[-1].json
        await request(r.port, PATH, {**PROMPT, "priority": -5}, high)
        assert engine.requests[-1].json["priority"] == -5


async def test_a_changed_file_counts_within_moments_and_stands_in_the_audit_log(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "router.audit")
    first = files.add("acme")
    async with FakeEngine().serving() as engine, running_router(engine.url, **files.settings) as r:

        async def becomes(headers: dict[str, str], wanted: int) -> None:
            deadline = time.monotonic() + 30
            while (await request(r.port, PATH, PROMPT, headers)).status != wanted:
                assert time.monotonic() < deadline, f"never {wanted}"
                await asyncio.sleep(0.02)

        await becomes(first, 200)
        second = files.add("other", requests_per_minute=100)
        await becomes(second, 200)
        files.revoke(first)
        await becomes(first, 401)
        files.keys.write_text("{")
        tenants = r.router.tenants
        assert tenants is not None
        await until(lambda: tenants.failed_reads == 1)
        assert (await request(r.port, PATH, PROMPT, second)).status == 200
        assert tenants.failed_reads == 1, "read once, not at each look"
        files.keys.unlink()
        third = files.add("acme")
        await becomes(third, 200)
        files.revoke(third)
        files.keys.chmod(0o666)
        await asyncio.sleep(0.2)
        files.keys.chmod(0o600)
        await becomes(third, 401)
        lines = "\n".join(x.getMessage() for x in caplog.records if x.name == "router.audit")
        assert "of tenant other is new" in lines
        assert "of tenant acme is revoked" in lines
        assert "limits of tenant other are changed" in lines
        assert first["Authorization"].split("-", 2)[2] not in caplog.text


def test_a_key_file_without_the_clusters_secret_is_a_mistake(files: Files) -> None:
    with pytest.raises(ValueError, match="tenant_secret_file"):
        RouterSection(key_file=files.keys)


def test_another_secret_gives_other_salts_and_equal_ones_equal(files: Files) -> None:
    files.add("acme")

    def salt(secret: bytes) -> str:
        return Tenants(files.keys, secret, lambda: 0.0).salt("acme", None)

    assert salt(b"a" * 32) == salt(b"a" * 32) != salt(b"b" * 32)
    with pytest.raises(ConfigError):
        Tenants(files.keys.with_name("none"), b"a" * 32, lambda: 0.0)


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
bodies = st.dictionaries(st.one_of(st.just("cache_salt"), st.text(max_size=6)), values, max_size=4)


@given(bodies, st.sampled_from(["utf-8", "utf-16", "utf-32", "utf-8-sig"]), st.booleans())
def test_a_salt_put_into_any_body_is_what_a_parser_reads(
    body: dict[str, Any], encoding: str, is_spaced: bool
) -> None:
    text = json.dumps(body, indent=2 if is_spaced else None, ensure_ascii=not is_spaced)
    raw = text.encode(encoding)
    salted = with_salt(raw, {**body, "cache_salt": "s"}, "s", is_changed="cache_salt" in body)
    assert json.loads(salted) == {**body, "cache_salt": "s"}
    if "cache_salt" not in body and encoding == "utf-8":
        assert salted.endswith(raw[raw.index(b"{") + 1 :])
