"""The indexer calls against an index that follows real daemons' and engines' streams."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from client_sdk.operator_gate import OperatorGate
from emberkv_proto.errors import AccessDeniedError, InvalidRequestError, UnauthenticatedError
from emberkv_proto.hashing import block_hashes, index_keys
from emberkv_proto.types import EngineInfo, NamespaceId, Tier
from global_index.config import IndexSection
from global_index.embedded import GlobalIndex
from global_index.http_calls import IndexerCalls
from global_index.http_message import HttpRequest
from tests.helpers.event_publisher import EventPublisher, stored
from tests.helpers.model_daemon import ModelDaemon, ModelServer
from tests.helpers.waiting import until, until_asked

TOKENS = list(range(64))
SPACE = NamespaceId(b"n" * 16)
ENGINE = EngineInfo("e1", "http://127.0.0.1:8000", "m", SPACE, 16, dp_rank=1)
KEYS = index_keys(block_hashes(SPACE, TOKENS, 16)).tolist()
JSON = {"content-type": "application/json; charset=utf-8"}
TOKEN = b"0123456789abcdef"


class Caller:
    def __init__(self, index: GlobalIndex, token: bytes | None = None) -> None:
        gate = OperatorGate(token, "index.operator_token_file")
        self._routes = IndexerCalls(index, gate, clock=self._later).routes
        self._now = 0.0
        self.host = "127.0.0.1"
        self.headers = dict(JSON)

    async def ask(self, method: str, path: str, **fields: Any) -> tuple[int, Any]:
        path, _, query = path.partition("?")
        request = HttpRequest(
            method,
            path,
            dict([query.split("=")]) if query else {},
            self.headers,
            json.dumps(fields).encode() if method == "POST" else b"",
            self.host,
            True,
        )
        answer = await self._routes[path][method](request)
        body = answer.body
        if not isinstance(body, bytes):
            body = b"".join([piece async for piece in body])
        return answer.status, json.loads(body)

    def _later(self) -> float:
        self._now += 1.0
        return self._now


@asynccontextmanager
async def indexed(**changes: Any) -> AsyncIterator[GlobalIndex]:
    section = IndexSection(
        **{"capacity_blocks": 100_000, "backend": "python", "suspect_seconds": 2.0, **changes}
    )
    async with GlobalIndex(section) as index:
        yield index
        index.check_integrity()
    assert index.faults == 0


@pytest.fixture
async def server() -> AsyncIterator[ModelServer]:
    server = ModelServer(ModelDaemon("n1"))
    server.daemon.store(Tier.DRAM, KEYS[:2])
    server.daemon.store(Tier.SSD, KEYS[:3])
    server.daemon.engines = (ENGINE,)
    await server.start()
    yield server
    await server.stop()


async def test_a_daemon_is_registered_asked_dumped_and_unregistered(server: ModelServer) -> None:
    async with indexed() as index:
        caller = Caller(index)
        daemon = {"type": "EmberKV", "endpoint": f"grpc://{server.address}"}
        assert await caller.ask("POST", "/register", **daemon) == (201, {"status": "ok"})
        assert (await caller.ask("POST", "/register", **daemon))[0] == 201, "once more is no harm"
        await until(lambda: bool(index.hits(index_keys(block_hashes(SPACE, TOKENS, 16))).nodes))
        await until(lambda: bool(index.nodes()[0].engines))
        summary = {"longest_matched": 48, "gpu": 0, "cpu": 32, "disk": 48, "dp": {"1": 48}}
        assert await caller.ask("POST", "/query", model_name="m", token_ids=TOKENS) == (
            200,
            {"scores": {"e1": {"1": 48}}, "frequencies": [], "instances": {"e1": summary}},
        )
        by_hash = await caller.ask("POST", "/query_by_hash", model_name="m", block_hashes=KEYS)
        assert by_hash[1]["instances"] == {"e1": summary}
        status, problem = await caller.ask("POST", "/query", model_name="x", token_ids=TOKENS)
        assert (status, problem) == (
            404,
            {"error": "no engine of model 'x' is known; there is m"},
        )
        status, dumped = await caller.ask("GET", "/dump")
        events = dumped["emberkv:default"]["events"]
        assert {
            (event["worker_id"], event["storage_tier"], event["event"]["event_id"])
            for event in events
        } == {("n1", "host_pinned", 2), ("n1", "disk", 2)}
        blocks = [event["event"]["data"]["stored"]["blocks"] for event in events]
        assert sorted(block["block_hash"] for block in blocks[1]) == sorted(KEYS[:3])
        assert (await caller.ask("GET", "/dump?node_id=nobody"))[1]["emberkv:default"][
            "events"
        ] == []
        name = {"type": "emberkv", "instance_id": server.address, "modelname": "m"}
        assert await caller.ask("POST", "/unregister", **name) == (
            200,
            {
                "status": "unregistered successfully",
                "removed_instances": [f"{server.address}|default|0"],
            },
        )
        assert index.streams() == {}
        assert (await caller.ask("POST", "/unregister", **name))[0] == 404


async def test_daemons_of_the_settings_are_not_unregistered_by_http(server: ModelServer) -> None:
    async with indexed(nodes=(server.address,)) as index:
        caller = Caller(index)
        await caller.ask("POST", "/register", type="emberkv", endpoint=server.address)
        name = {"type": "emberkv", "instance_id": server.address}
        assert (await caller.ask("POST", "/unregister", **name))[0] == 404
        assert list(index.streams()) == [server.address]


async def test_an_engine_is_registered_followed_asked_and_unregistered() -> None:
    async with EventPublisher() as publisher, indexed() as index:
        caller = Caller(index)
        engine = {
            "type": "vLLM",
            "modelname": "m",
            "instance_id": "worker-7",
            "block_size": 16,
            "dp_rank": 3,
            "endpoint": publisher.events_endpoint,
            "replay_endpoint": publisher.replay_endpoint,
        }
        assert await caller.ask("POST", "/register", **engine) == (
            200,
            {"status": "registered successfully", "instance_id": "worker-7"},
        )
        await publisher.publish(stored([1, 2, 3], TOKENS[:48]))
        asked = {"model": "m", "token_ids": TOKENS, "block_size": 16}
        found: dict[str, Any] = {}

        async def ask() -> bool:
            status, answer = await caller.ask("POST", "/query", **asked)
            found.clear()
            found.update(answer if status == 200 else {})
            return bool(found.get("default"))

        await until_asked(ask)
        summary = {"longest_matched": 48, "GPU": 48, "CPU": 48, "DISK": 48, "DP": {"3": 48}}
        assert found == {"default": {"worker-7": summary}}
        (worker,) = (await caller.ask("GET", "/workers"))[1]
        assert (worker["instance_id"], worker["model_name"]) == ("worker-7", "m")
        assert worker["listeners"] == {
            "3": {"endpoint": publisher.events_endpoint, "status": "current"}
        }
        gone = await caller.ask("POST", "/unregister", instance_id="worker-7", modelname="m")
        assert gone[1]["removed_instances"] == ["worker-7|default|3"]
        assert index.engines() == []
        assert (await caller.ask("POST", "/query", **asked))[0] == 404


async def test_workers_lists_daemons_and_engines_that_publish_nothing(server: ModelServer) -> None:
    async with indexed(nodes=(server.address,)) as index:
        await until(lambda: bool(index.nodes()) and bool(index.nodes()[0].engines))
        daemon, engine = (await Caller(index).ask("GET", "/workers"))[1]
        assert daemon == {
            "instance_id": "n1",
            "source": "daemon",
            "status": "ok",
            "exactness": "exact",
            "endpoints": {"0": server.address},
        }
        assert engine == {
            "instance_id": "e1",
            "source": "engine",
            "model_name": "m",
            "block_size": 16,
            "node_id": "n1",
            "url": "http://127.0.0.1:8000",
            "role": "both",
            "endpoints": {"1": ""},
            "listeners": {"1": {"endpoint": "", "status": "not followed"}},
        }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"endpoint": "ipc:///run/e"}, "tcp://host:port"),
        ({"replay_endpoint": "tcp://*:1"}, "tcp://host:port"),
        ({"namespace_id": "zz"}, "hexadecimal"),
        ({"instance_id": ""}, "engine_id"),
        ({"type": "mooncake"}, "cannot be followed"),
        ({"type": "emberkv", "endpoint": "nowhere"}, "host:port"),
    ],
)
async def test_what_cannot_be_followed_is_refused(changes: dict[str, Any], words: str) -> None:
    async with indexed() as index:
        engine = {
            "model_name": "m",
            "instance_id": 1,
            "block_size": 16,
            "endpoint": "tcp://127.0.0.1:1",
        }
        with pytest.raises(InvalidRequestError, match=words):
            await Caller(index).ask("POST", "/register", **(engine | changes))


async def test_only_this_machine_or_the_token_may_change_what_is_followed() -> None:
    daemon = {"type": "emberkv", "endpoint": "127.0.0.1:1"}
    async with indexed() as index:
        caller = Caller(index)
        caller.host = "10.0.0.9"
        with pytest.raises(AccessDeniedError, match=r"index\.operator_token_file"):
            await caller.ask("POST", "/register", **daemon)
        caller = Caller(index, TOKEN)
        for host in ("10.0.0.9", "fe80::1"):
            caller.host = host
            with pytest.raises(UnauthenticatedError):
                await caller.ask("POST", "/unregister", instance_id="x")
        caller.headers["authorization"] = f"Bearer {TOKEN.decode()}"
        assert (await caller.ask("POST", "/register", **daemon))[0] == 201
        caller.host, caller.headers = "::1", {"content-type": "text/plain"}
        with pytest.raises(InvalidRequestError, match="application/json"):
            await caller.ask("POST", "/register", **daemon)
        caller.headers = {**JSON, "origin": "http://page.example:9100"}
        for path in ("/register", "/unregister"):
            with pytest.raises(AccessDeniedError, match="web pages"):
                await caller.ask("POST", path, **daemon)
        caller.headers = {**JSON, "x-forwarded-for": "10.0.0.9"}
        with pytest.raises(UnauthenticatedError):
            await caller.ask("POST", "/unregister", instance_id="x")
        status, _ = await caller.ask("GET", "/workers")
        assert status == 200, "who only asks needs nothing"
