"""Engines that the index found as pods: routed to while they are ready, and forgotten when gone."""

from __future__ import annotations

from emberkv_proto.types import EngineInfo, NamespaceId, NodeId
from global_index.kube.listing import ObjectName
from global_index.kube.pods import EnginePod
from router.engines import EngineTable
from router.health import BreakerLimits
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.router_client import HandIndex, HandNode, request, running_router

NOWHERE = NamespaceId(bytes(16))
SPACE = NamespaceId(b"n" * 16)
BODY = {"model": "m", "prompt": list(range(40))}


def found(url: str, name: str = "pod", is_ready: bool = True) -> EnginePod:
    info = EngineInfo(name, url, "m", NOWHERE, block_tokens=0)
    return EnginePod(ObjectName("ns", name), NodeId("node-1"), info, is_ready)


async def test_a_pod_on_its_way_out_gets_no_new_request() -> None:
    async with FakeEngine().serving() as one, FakeEngine().serving() as two:
        index = HandIndex()
        index.found = [found(one.url, "one"), found(two.url, "two", is_ready=False)]
        async with running_router(index=index) as router:
            for _ in range(6):
                got = await request(router.port, "/v1/completions", BODY)
                assert got.headers["x-emberkv-engine"] == "one"


async def test_where_no_pod_is_ready_a_healthy_one_still_answers() -> None:
    async with FakeEngine().serving() as one:
        index = HandIndex()
        index.found = [found(one.url, "one", is_ready=False)]
        async with running_router(index=index) as router:
            got = await request(router.port, "/v1/completions", BODY)
            assert got.status == 200


def test_what_an_engine_announces_wins_over_what_its_pod_says() -> None:
    table = EngineTable(BreakerLimits(3, 1.0), forget_seconds=60.0)
    url = "http://10.0.0.1:8000"
    node = HandNode(NodeId("n7"), engines=(EngineInfo("e7", url, "m", SPACE, 16),))
    table.sync([node], now=0.0, found=[found(url)])
    engine = table.get(url)
    assert engine is not None
    assert (engine.engine_id, engine.node_id, engine.namespace_id) == ("e7", "n7", SPACE)
    table.sync([], now=1.0, found=[found(url)])
    assert (engine.block_tokens, engine.is_announced) == (16, True)
    table.check_integrity()


def test_a_pod_that_is_gone_is_forgotten_and_one_with_a_strange_name_is_refused() -> None:
    table = EngineTable(BreakerLimits(3, 1.0), forget_seconds=60.0)
    table.sync([], now=0.0, found=[found("http://10.0.0.1:8000"), found("http://h:1", "a\nb")])
    assert [engine.url for engine in table] == ["http://10.0.0.1:8000"]
    assert table.refused_announcements == 1
    table.sync([], now=1.0)
    assert len(table) == 1
    table.sync([], now=62.0)
    assert len(table) == 0
    table.check_integrity()
