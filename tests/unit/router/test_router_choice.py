"""Where requests go: hits, herds, announcements, explanations."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

from emberkv_proto.chains import chain_hashes
from emberkv_proto.hashing import block_hashes, index_keys
from emberkv_proto.types import EngineInfo, HashScheme, NamespaceId, NodeId
from router.engines import EngineTable
from router.health import BreakerLimits
from tests.helpers.fake_engine import COMPLETION, FakeEngine, FakeRequest, answer, hang, response
from tests.helpers.router_client import HandIndex, HandNode, connected, request, running_router
from tests.helpers.waiting import until, until_asked

SPACE = NamespaceId(b"n" * 16)
BLOCK = 4


def announced(engine: FakeEngine, node: str) -> HandNode:
    info = EngineInfo(f"engine-{node}", engine.url, "m", SPACE, BLOCK)
    return HandNode(NodeId(node), engines=(info,))


def keys_of(tokens: list[int], salt: bytes = b"") -> set[int]:
    return set(index_keys(block_hashes(SPACE, tokens, BLOCK, salt=salt)).tolist())


async def test_a_prompt_goes_where_its_blocks_are() -> None:
    prompt = list(range(400))
    async with FakeEngine().serving() as one, FakeEngine().serving() as two:
        a, b = announced(one, "a"), announced(two, "b")
        b.dram = keys_of(prompt)
        async with running_router(index=HandIndex(a, b)) as router:
            for _ in range(3):
                got = await request(
                    router.port, "/v1/completions", {"model": "m", "prompt": prompt}
                )
                assert got.headers["x-emberkv-engine"] == "engine-b"
                assert got.headers["x-emberkv-hit-tokens"] == "400"
            await router.settled()
            assert router.counter("predicted_hit_tokens_total", source="dram") == 400
            # Just routed there, so the next ones count as in HBM.
            assert router.counter("predicted_hit_tokens_total", source="hbm") == 800


async def test_an_sglang_engine_is_asked_for_by_its_own_page_hashes() -> None:
    prompt = list(range(400))
    async with FakeEngine().serving() as one, FakeEngine().serving() as two:
        a, b = announced(one, "a"), announced(two, "b")
        b.engines = (replace(b.engines[0], hash_scheme=HashScheme.SGLANG),)
        hashes = chain_hashes(HashScheme.SGLANG, SPACE, prompt, BLOCK)
        b.dram = set(index_keys(hashes).tolist())
        async with running_router(index=HandIndex(a, b)) as router:
            body = {"model": "m", "prompt": prompt}
            got = await request(router.port, "/v1/completions", body)
            assert got.headers["x-emberkv-engine"] == "engine-b"
            assert got.headers["x-emberkv-hit-tokens"] == "400"
            got = await request(router.port, "/route/explain", body)
            assert {chain["blocks"] for chain in got.json["chains"]} == {100}
            assert len(got.json["chains"]) == 2, "both engines' hashes were asked for"
            for key, chains in (("user-1", 1), ("", 2), (None, 2)):
                keyed = {**body, "extra_key": key}
                got = await request(router.port, "/route/explain", keyed)
                assert len(got.json["chains"]) == chains, key


async def test_of_two_engines_on_a_node_the_one_whose_hbm_has_the_blocks_is_chosen() -> None:
    prompt = list(range(4000))
    async with FakeEngine().serving() as one, FakeEngine().serving() as two:
        node = HandNode(NodeId("a"))
        node.engines = (*announced(one, "a").engines, *announced(two, "a2").engines)
        node.dram = keys_of(prompt)
        index = HandIndex(node)
        index.hbm = {two.url: keys_of(prompt[:3000]), one.url: set()}
        async with running_router(index=index, seed=3) as router:
            body = {"model": "m", "prompt": prompt}
            got = await request(router.port, "/route/explain", body)
            assert got.json["chosen"] == "engine-a2"
            (chain,) = got.json["chains"]
            hits = {hit["engine_id"]: hit for hit in chain["engine_hits"]}
            assert (hits["engine-a2"]["hbm_blocks"], hits["engine-a2"]["dram_blocks"]) == (750, 250)
            assert (hits["engine-a"]["hbm_blocks"], hits["engine-a"]["dram_blocks"]) == (0, 1000)
            terms = {engine["engine"]: engine for engine in got.json["engines"]}
            assert terms["engine-a2"]["holding"]["hbm_tokens"] == 3000
            assert terms["engine-a2"]["fetch_seconds"] < terms["engine-a"]["fetch_seconds"]
            got = await request(router.port, "/v1/completions", body)
            assert got.headers["x-emberkv-engine"] == "engine-a2"
            await router.settled()
            assert router.counter("told_hbm_tokens_total") == 3000
            assert router.counter("predicted_hit_tokens_total", source="hbm") == 3000


async def test_an_engine_of_the_indexs_settings_is_routed_to_by_its_own_events() -> None:
    prompt = list(range(400))
    async with FakeEngine().serving() as one, FakeEngine().serving() as two:
        index = HandIndex(announced(one, "a"))
        info = EngineInfo("plain", two.url, "m", SPACE, BLOCK)
        index.configured = [(NodeId(""), info)]
        index.all.append(HandNode(NodeId(""), "gone", (info,)))
        index.hbm = {two.url: keys_of(prompt)}
        async with running_router(index=index) as router:
            got = await request(router.port, "/v1/completions", {"model": "m", "prompt": prompt})
            assert got.headers["x-emberkv-engine"] == "plain"


async def test_another_salt_or_text_tokens_find_their_own_blocks() -> None:
    text = "abcdefgh"
    async with FakeEngine().serving() as one, FakeEngine().serving() as two:
        a, b = announced(one, "a"), announced(two, "b")
        a.dram = keys_of([ord(letter) for letter in text], b"tenant")
        async with running_router(index=HandIndex(a, b)) as router:
            body = {"model": "m", "prompt": text, "cache_salt": "tenant"}
            got = await request(router.port, "/route/explain", body)
            (chain,) = got.json["chains"]
            assert chain["blocks"] == 2
            assert chain["hits"] == [
                {"node_id": "a", "hit_blocks": 2, "dram_blocks": 2, "ssd_blocks": 0}
            ]
            other = await request(router.port, "/route/explain", {**body, "cache_salt": "x"})
            assert other.json["chains"][0]["hits"] == []


async def test_explain_shows_the_terms_and_changes_nothing() -> None:
    prompt = list(range(4000))
    async with FakeEngine().serving() as one, FakeEngine().serving() as two:
        a, b = announced(one, "a"), announced(two, "b")
        a.dram = keys_of(prompt)
        async with running_router(index=HandIndex(a, b)) as router:
            got = await request(router.port, "/route/explain", {"model": "m", "prompt": prompt})
            assert got.json["chosen"] == "engine-a"
            assert got.json["prompt_tokens"] == 4000
            by_name = {item["engine"]: item for item in got.json["engines"]}
            assert by_name["engine-a"]["holding"]["dram_tokens"] == 4000
            # The other node can pull what this one holds.
            assert by_name["engine-b"]["used"]["peer_tokens"] == 4000
            for item in by_name.values():
                assert item["total_seconds"] == (
                    item["queue_seconds"] + item["fetch_seconds"] + item["prefill_seconds"]
                )
            assert not one.requests
            assert not two.requests
            assert router.inflight() == 0
            assert router.router.predicted.hit_blocks(one.url, [1], 0.0) == 0


async def test_siblings_of_a_new_prefix_stay_together_until_the_queue_is_long() -> None:
    async def slow(request: FakeRequest, writer: asyncio.StreamWriter) -> bool:
        await asyncio.sleep(0.3)
        writer.write(response(200, b"{}"))
        return True

    prefix = list(range(4000))
    async with FakeEngine().serving() as one, FakeEngine().serving() as two:
        one.completion = two.completion = slow
        index = HandIndex(announced(one, "a"), announced(two, "b"))
        async with running_router(index=index) as router:

            async def burst(count: int) -> Counter[str]:
                got = await asyncio.gather(
                    *(
                        request(
                            router.port, "/v1/completions", {"model": "m", "prompt": [*prefix, i]}
                        )
                        for i in range(count)
                    )
                )
                return Counter(item.headers["x-emberkv-engine"] for item in got)

            # The first computes 4000 tokens (0.8 s). Waiting for it takes as long as doing the same
            # elsewhere, and 0.02 s more for each sibling.
            assert list((await burst(4)).values()) == [4]
            await router.settled()
            many = await burst(80)
            # By then both or one hold it in prediction; the load term spreads what would pile up.
            assert max(many.values()) < 80


async def test_one_hot_prefix_does_not_take_everything_to_one_node() -> None:
    async def slow(request: FakeRequest, writer: asyncio.StreamWriter) -> bool:
        await asyncio.sleep(0.2)
        writer.write(response(200, b"{}"))
        return True

    shared = list(range(64))
    engines = [FakeEngine() for _ in range(4)]
    async with (
        engines[0].serving(),
        engines[1].serving(),
        engines[2].serving(),
        engines[3].serving(),
    ):
        nodes = []
        for number, engine in enumerate(engines):
            engine.completion = slow
            nodes.append(announced(engine, f"n{number}"))
        nodes[0].dram = keys_of(shared)
        async with running_router(index=HandIndex(*nodes)) as router:
            await asyncio.gather(
                *(
                    request(
                        router.port,
                        "/v1/completions",
                        {"model": "m", "prompt": [*shared, *range(1000 * i, 1000 * i + 400)]},
                    )
                    for i in range(1, 81)
                )
            )
        counts = [len(engine.requests) for engine in engines]
        assert max(counts) / (sum(counts) / 4) <= 1.5, counts


async def test_paced_requests_without_reuse_do_not_all_go_to_one_engine() -> None:
    async with FakeEngine().serving() as one, FakeEngine().serving() as two:
        index = HandIndex(announced(one, "a"), announced(two, "b"))
        async with running_router(index=index) as router:
            for i in range(40):
                body = {"model": "m", "prompt": list(range(100 * i, 100 * i + 8))}
                await request(router.port, "/v1/completions", body)
        assert min(len(one.requests), len(two.requests)) >= 8


async def test_engines_outlive_the_daemon_that_announced_them() -> None:
    async with FakeEngine().serving() as engine:
        node = announced(engine, "a")
        index = HandIndex(node)
        async with running_router(index=index) as router:
            node.liveness = "gone"

            async def is_no_more_announced() -> bool:
                (worker,) = (await request(router.port, "/workers")).json["workers"]
                return worker["is_announced"] is False

            await until_asked(is_no_more_announced)
            got = await request(router.port, "/v1/completions", {"model": "m", "prompt": [1] * 8})
            assert got.status == 200


def test_an_engine_that_is_neither_healthy_nor_announced_is_forgotten() -> None:
    table = EngineTable(BreakerLimits(3, 2.0), forget_seconds=60.0)
    removed = []
    table.on_removed.append(lambda engine: removed.append(engine.url))
    info = EngineInfo("e", "http://127.0.0.1:9", "m", SPACE, BLOCK)
    node = HandNode(NodeId("a"), engines=(info,))
    static = table.add("http://127.0.0.1:8", 0.0)
    static.is_static = True
    table.sync([node], 0.0)
    engine = table.get("http://127.0.0.1:9")
    assert engine is not None
    engine.health.probe_succeeded(1.0)
    table.sync([], 100.0)
    assert len(table) == 2
    engine.health.refused(100.0)
    table.sync([], 160.0)
    assert len(table) == 2
    table.sync([], 161.0)
    assert removed == ["http://127.0.0.1:9"]
    assert [e.url for e in table] == ["http://127.0.0.1:8"]
    table.check_integrity()


def test_an_announcement_with_a_bad_url_or_length_harms_nobody() -> None:
    table = EngineTable(BreakerLimits(3, 2.0), 60.0)
    infos = tuple(
        EngineInfo("e", url, "m", SPACE, 0)
        for url in (
            "",
            "ftp://x",
            "http://",
            "http://h/path",
            "http://h:99999",
            "http://[",
            "http://h:1",
        )
    )
    evil = EngineInfo("e\r\nset-cookie: a", "http://h:2", "m", SPACE, BLOCK)
    table.sync([HandNode(NodeId("a"), engines=(*infos, evil))], 0.0)
    assert [engine.url for engine in table] == ["http://h:1"]
    assert table.refused_announcements == 6
    table.check_integrity()


async def test_a_static_engine_is_completed_by_its_announcement() -> None:
    async with FakeEngine().serving() as engine:
        engine.completion = answer(COMPLETION)
        node = announced(engine, "a")
        async with running_router(engine.url, index=HandIndex(node)) as router:
            (worker,) = (await request(router.port, "/workers")).json["workers"]
            assert (worker["engine"], worker["node_id"]) == ("engine-a", "a")
            assert worker["is_static"]
            assert worker["is_announced"]


async def test_dead_and_full_engines_change_nothing_about_the_choice() -> None:
    prompt = list(range(400))
    async with FakeEngine().serving() as one, FakeEngine().serving() as two:
        a, b = announced(one, "a"), announced(two, "b")
        a.dram = keys_of(prompt[:200])
        ghost = EngineInfo("ghost", "http://127.0.0.1:9", "m", SPACE, BLOCK)
        dead = HandNode(NodeId("dead"), engines=(ghost,), dram=keys_of(prompt))
        body = {"model": "m", "prompt": prompt}
        for nodes in ((a, b), (a, b, dead)):
            async with running_router(index=HandIndex(*nodes)) as router:
                got = await request(router.port, "/route/explain", body)
                assert got.json["chosen"] == "engine-a"
                assert [item["engine"] for item in got.json["engines"]] == ["engine-a", "engine-b"]


async def test_a_router_where_nothing_is_known_of_blocks_goes_by_load() -> None:
    async with FakeEngine().serving() as one, FakeEngine().serving() as two:
        one.completion = two.completion = hang()
        async with running_router(one.url, two.url, index=HandIndex()) as router:
            async with connected(router.port) as client:
                client.post("/v1/completions", {"prompt": ["a", "b"]})
                await until(lambda: bool(one.requests or two.requests))
                idle = two if one.requests else one
                idle.completion = answer(COMPLETION)
                for _ in range(5):
                    got = await request(router.port, "/v1/completions", {"prompt": ["a", "b"]})
                    assert got.headers["x-emberkv-engine"] == idle.url
            assert router.counter("no_token_requests_total", why="many_prompts") == 6
