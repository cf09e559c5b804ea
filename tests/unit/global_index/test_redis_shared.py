"""Several indexes over one real Redis: they share daemons, answer alike, and outlive failures."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis.asyncio

from client_sdk import aio
from client_sdk.cli.status import redis_line
from client_sdk.index_client import IndexClient
from client_sdk.settings import load_settings
from emberkv_proto.errors import ConfigError, UnavailableError
from emberkv_proto.hashing import block_hashes, index_keys
from emberkv_proto.types import EngineInfo, NamespaceId, NodeHit, NodeId, Tier, TierDigest
from global_index.config import IndexSection, IndexSettings
from global_index.embedded import GlobalIndex
from global_index.index import Holder
from global_index.ingest import Exactness
from global_index.membership import Liveness
from global_index.metrics import IndexMetrics
from global_index.redis_index import FencedError, RedisIndex, Token
from global_index.redis_registry import parse_registry
from global_index.redis_schema import TAGS, RedisSchema, keys_of
from global_index.service import start_server
from tests.helpers.event_publisher import EventPublisher, stored
from tests.helpers.model_daemon import ModelDaemon, ModelServer, as_keys
from tests.helpers.redis_server import RedisServer, redis_cluster, redis_server

CHAIN = as_keys(range(1, 201))
ENGINE = EngineInfo("e1", "http://127.0.0.1:8000", "m", NamespaceId(b"n" * 16), 64)
pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@asynccontextmanager
async def daemons(count: int) -> AsyncIterator[list[ModelServer]]:
    """Daemon i holds blocks 1..100+10*i in DRAM, and 20 more in SSD."""
    servers = []
    for i in range(count):
        server = ModelServer(ModelDaemon(f"n{i}"))
        server.daemon.store(Tier.DRAM, range(1, 101 + 10 * i))
        server.daemon.store(Tier.SSD, range(90, 121 + 10 * i))
        servers.append(server)
        await server.start()
    try:
        yield servers
    finally:
        for server in servers:
            await server.stop()


@asynccontextmanager
async def sharing(
    server: RedisServer, nodes: list[ModelServer], name: str = "r", **changes: Any
) -> AsyncIterator[GlobalIndex]:
    values: dict[str, Any] = {
        "nodes": tuple(node.address for node in nodes),
        "capacity_blocks": 100_000,
        "backend": "python",
        "suspect_seconds": 1.5,
        "gone_seconds": 60.0,
        "redis_url": server.url,
        "redis_lease_seconds": 1.0,
        "redis_query_seconds": 2.0,
    }
    async with GlobalIndex(IndexSection(**(values | changes)), name=name) as index:
        yield index
    index.check_integrity()
    assert index.faults == 0


async def until(holds: Callable[[], Awaitable[bool]], seconds: float = 40.0) -> None:
    async with aio.timeout(seconds):
        while not await holds():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def redis_equals(server: RedisServer, nodes: list[ModelServer]) -> bool:
    """Whether Redis has exactly the rows of these daemons, and says so."""
    schema = RedisSchema()
    async with server.client() as client:
        records = parse_registry(b"", await client.hgetall(schema.registry("records"))).records
        for node in nodes:
            record = records.get(NodeId(node.daemon.node_id))
            if record is None or record.view.exactness is not Exactness.EXACT:
                return False
            if (record.view.incarnation, record.view.seq) != (
                *(node.daemon.incarnation, node.daemon.seq),
            ):
                return False
            for tier, expected in node.daemon.rows.items():
                digest = await digest_in_redis(client, record.number, tier)
                xor = int(np.bitwise_xor.reduce(as_keys(expected), initial=0)) if expected else 0
                if (digest.blocks, digest.xor) != (len(expected), xor):
                    return False
    return True


async def digest_in_redis(client: Any, number: Holder, tier: Tier) -> TierDigest:
    """Count and XOR of a number's rows, by its reverse sets, without claiming it."""
    schema = RedisSchema()
    blocks = xor = 0
    for tag in range(len(TAGS)):
        fence = await client.get(schema.fence(tag, number)) or b"0:0"
        for name in schema.slices(tag, number, tier, int(fence.split(b":")[1])):
            keys = keys_of(list(await client.smembers(name)))
            blocks, xor = blocks + keys.size, xor ^ int(np.bitwise_xor.reduce(keys, initial=0))
    return TierDigest(tier, blocks, xor)


def expected_hits(nodes: list[ModelServer]) -> set[NodeHit]:
    hits = set()
    for node in nodes:
        dram = ssd = 0
        for key in CHAIN.tolist():
            if key in node.daemon.rows[Tier.DRAM]:
                dram += 1
            elif key in node.daemon.rows[Tier.SSD]:
                ssd += 1
            else:
                break
        if dram + ssd:
            hits.add(NodeHit(NodeId(node.daemon.node_id), dram + ssd, dram, ssd))
    return hits


def engines_of(index: GlobalIndex) -> dict[NodeId, tuple[EngineInfo, ...]]:
    return {view.node_id: view.engines for view in index.nodes()}


async def answers(index: GlobalIndex, nodes: list[ModelServer]) -> bool:
    return set((await index.answer(CHAIN)).nodes) == expected_hits(nodes)


async def all_answer(indexes: list[GlobalIndex], nodes: list[ModelServer]) -> None:
    for index in indexes:
        await until(lambda index=index: answers(index, nodes))


async def test_two_routers_share_the_daemons_and_answer_alike(server: RedisServer) -> None:
    async with daemons(4) as nodes:
        nodes[0].daemon.engines = (ENGINE,)
        async with sharing(server, nodes, "a") as first, sharing(server, nodes, "b") as second:
            await until(lambda: redis_equals(server, nodes))
            await all_answer([first, second], nodes)
            for index in (first, second):
                assert index.shared is not None
                await until(lambda index=index: asyncio.sleep(0, index.shared.state().leases == 2))
            await all_answer([first, second], nodes)
            await until(lambda: asyncio.sleep(0, len(first.followed()) == 2))
            told = {NodeId(f"n{n}"): (ENGINE,) if n == 0 else () for n in range(4)}
            for index in (first, second):  # a node's rows come before its engines
                await until(lambda index=index: asyncio.sleep(0, engines_of(index) == told))
                assert all(view.liveness is Liveness.OK for view in index.nodes())
            nodes[1].daemon.remove(Tier.DRAM, range(40, 50))
            nodes[2].daemon.clear(Tier.DRAM)
            nodes[3].daemon.store(Tier.DRAM, range(131, 180))
            await all_answer([first, second], nodes)
            await until(lambda: redis_equals(server, nodes))


async def test_metrics_say_how_redis_fares(server: RedisServer, tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("secret\n")
    async with redis.asyncio.Redis(port=server.port) as client:
        await client.config_set("requirepass", "secret")
    async with daemons(1) as nodes, sharing(server, nodes, redis_password_file=password) as index:
        registry = IndexMetrics(index).registry

        def sample(name: str) -> float | None:
            return registry.get_sample_value(f"emberkv_index_redis_{name}")

        await until(lambda: asyncio.sleep(0, sample("exact_nodes") == 1.0))
        assert (sample("up"), sample("leases"), sample("writers")) == (1.0, 1.0, 1.0)
        assert sample("link_connects_total") == 1.0
        assert sample("writer_repaired_total") == 131.0


async def test_operators_see_how_redis_stands_and_where_others_blocks_are(
    server: RedisServer,
) -> None:
    async with (
        daemons(2) as nodes,
        sharing(server, nodes, "a") as first,
        sharing(server, nodes, "b"),
    ):
        await until(lambda: redis_equals(server, nodes))
        await until(lambda: asyncio.sleep(0, len(first.followed()) == 1))
        served, port = await start_server(first, "127.0.0.1", 0, lambda _: None)
        client = IndexClient(f"127.0.0.1:{port}", timeout_seconds=10.0)
        try:
            state = await client.redis()
            assert state is not None
            assert (state.is_up, state.writers, state.leases) == (True, 2, 1)
            assert redis_line(state).startswith("shared through Redis by 2: 1 daemons")
            assert {node.node_id for node in await client.nodes()} == {"n0", "n1"}
            traced = {node.node_id: node for node in (await client.explain(CHAIN)).nodes}
            for node in nodes:
                tiers = traced[NodeId(node.daemon.node_id)].tiers
                for key, held in zip(CHAIN.tolist(), tiers, strict=True):
                    rows = node.daemon.rows
                    assert held == 2 * (key in rows[Tier.DRAM]) + 4 * (key in rows[Tier.SSD])
        finally:
            await client.close()
            await served.stop(None)


def test_a_password_in_the_url_and_a_foreign_scheme_are_refused() -> None:
    for url in ("redis://user:secret@host", "http://host:6379", "redis://"):
        with pytest.raises(ValueError, match="redis_url"):
            IndexSection(redis_url=url)
    with pytest.raises(ConfigError) as refused:
        load_settings(IndexSettings, overrides=["index.redis_url=redis://user:secret@host"])
    assert "secret" not in str(refused.value)
    with pytest.raises(ConfigError, match="redis_password_file"):
        IndexSection(redis_password_file=Path("/nowhere")).password()
    assert "secret" not in repr(IndexSection(redis_password="secret"))


async def test_dead_routers_daemons_are_taken_over(server: RedisServer) -> None:
    async with daemons(3) as nodes, AsyncExitStack() as stack:
        first = await stack.enter_async_context(sharing(server, nodes, "a"))
        await until(lambda: redis_equals(server, nodes))
        second = await stack.enter_async_context(sharing(server, nodes, "b"))
        await all_answer([first, second], nodes)
        # As kill -9 leaves it: nothing is given back, nothing renewed.
        assert first.shared is not None
        first.shared.link.lost(first.shared.link.client, "killed by the test")
        for task in (*first.shared._tasks, first.shared._connecting):
            task.cancel()
        nodes[0].daemon.store(Tier.DRAM, range(121, 160))
        await until(lambda: answers(second, nodes))
        await until(lambda: redis_equals(server, nodes))
        assert second.shared is not None
        assert second.shared.state().leases == 3


async def test_flushed_redis_is_filled_again(server: RedisServer) -> None:
    async with (
        daemons(2) as nodes,
        sharing(server, nodes) as index,
        sharing(server, nodes, "b") as other,
    ):
        await until(lambda: redis_equals(server, nodes))
        async with redis.asyncio.Redis(port=server.port) as client:
            await client.flushall()
        nodes[0].daemon.store(Tier.DRAM, range(121, 130))
        await until(lambda: redis_equals(server, nodes))
        await all_answer([index, other], nodes)


async def test_killed_redis_leaves_the_own_rows_and_is_filled_when_it_is_back(
    server: RedisServer,
) -> None:
    async with (
        daemons(2) as nodes,
        sharing(server, nodes) as first,
        sharing(server, nodes, "b") as second,
    ):
        await until(lambda: redis_equals(server, nodes))
        await all_answer([first, second], nodes)
        server.kill()
        nodes[0].daemon.remove(Tier.DRAM, range(50, 60))
        nodes[1].daemon.restart(loses=(Tier.DRAM,))
        # Alone, each follows all daemons.
        await all_answer([first, second], nodes)
        server.start_again()
        await until(lambda: redis_equals(server, nodes))
        await all_answer([first, second], nodes)
        for index in (first, second):
            await until(lambda index=index: asyncio.sleep(0, index.shared.state().leases == 1))


async def test_stopped_redis_delays_no_query_for_long_and_only_differences_are_written(
    server: RedisServer,
) -> None:
    async with daemons(1) as nodes, sharing(server, nodes, redis_query_seconds=0.05) as index:
        await until(lambda: redis_equals(server, nodes))
        assert index.shared is not None
        counts = index.shared.writer.counts
        repaired = counts.repaired
        server.stop()
        for _ in range(6):  # the first are late, then it counts as away
            assert await answers(index, nodes)
        assert index.shared.reader.counts.away == 6
        assert index.shared.link.counts.late >= 3
        nodes[0].daemon.store(Tier.DRAM, range(150, 157))
        await asyncio.sleep(2.5)
        server.go_on()
        await until(lambda: redis_equals(server, nodes))
        assert counts.repaired - repaired <= 7
        await until(lambda: answers(index, nodes))


async def test_silent_daemon_drops_out_of_everybodys_answers(server: RedisServer) -> None:
    async with (
        daemons(2) as nodes,
        sharing(server, nodes) as first,
        sharing(server, nodes, "b") as second,
    ):
        await until(lambda: redis_equals(server, nodes))
        await nodes[1].stop()
        await all_answer([first, second], nodes[:1])
        await nodes[1].start()
        await all_answer([first, second], nodes)


async def test_forged_records_and_values_are_ignored_and_counted(server: RedisServer) -> None:
    async with (
        daemons(1) as nodes,
        sharing(server, nodes) as index,
        redis.asyncio.Redis(port=server.port) as client,
    ):
        await until(lambda: redis_equals(server, nodes))
        schema = RedisSchema()
        forger = RedisIndex(client, schema)
        await forger.claim(Holder(77), Token(1))
        await forger.apply_stored(Holder(77), Tier.DRAM, CHAIN)
        await client.hset(schema.registry("records"), "evil", b'{"number": 77, "node": "evil"}')
        await client.set(schema.registry("version"), "new")
        await client.set(schema.blocks(CHAIN)[119], b"odd")
        await until(lambda: asyncio.sleep(0, index.shared.reader.counts.malformed > 0))
        assert [hit.node_id for hit in (await index.answer(CHAIN)).nodes] == ["n0"]
        assert index.shared is not None
        assert index.shared.reader.counts.unknown > 0


async def test_drifted_rows_are_found_by_the_audit_and_repaired(server: RedisServer) -> None:
    async with daemons(1) as nodes, sharing(server, nodes, redis_audit_seconds=0.5) as index:
        await until(lambda: redis_equals(server, nodes))
        schema = RedisSchema()
        async with redis.asyncio.Redis(port=server.port) as client:
            key = as_keys([5])
            await client.delete(
                schema.blocks(key)[0], schema.slices_of(5, _number(index), [Tier.DRAM], 0, key)[0]
            )
        await until(lambda: redis_equals(server, nodes))
        assert index.shared is not None
        assert index.shared.writer.counts.drifted > 0


def _number(index: GlobalIndex) -> Any:
    assert index.shared is not None
    return index.shared.writer.alive_numbers()[0]


async def test_removed_node_leaves_nothing_in_redis_but_its_resting_number(
    server: RedisServer,
) -> None:
    async with daemons(2) as nodes, sharing(server, nodes) as index:
        await until(lambda: redis_equals(server, nodes))
        await index.remove_node(NodeId("n1"))
        await until(lambda: answers(index, nodes[:1]))
        async with redis.asyncio.Redis(port=server.port) as client:
            schema = RedisSchema()
            assert await client.hlen(schema.registry("records")) == 1
            assert await client.zcard(schema.registry("resting")) == 1
            values = await RedisIndex(client, schema).values(as_keys(range(121, 131)))
            assert values == [None] * 10
        with pytest.raises(UnavailableError):
            await index.remove_node(NodeId("n1"))


async def test_nodes_that_nobody_follows_any_more_leave_redis_and_may_come_back(
    server: RedisServer,
) -> None:
    schema = RedisSchema()
    async with daemons(2) as nodes, server.client() as client:
        async with sharing(server, nodes):
            await until(lambda: redis_equals(server, nodes))
            number = Holder(int(await client.hget(schema.registry("numbers"), "n1")))
        async with sharing(server, nodes[:1], redis_forget_seconds=1.0) as index:
            assert index.shared is not None
            await until(lambda: asyncio.sleep(0, index.shared.tidied.forgotten == 1))
            for name in ("numbers", "owners", "records"):
                assert await client.hkeys(schema.registry(name)) == [b"n0"]
            assert await client.zrange(schema.registry("resting"), 0, -1) == [b"%d" % number]
            for tier in Tier:
                assert (await digest_in_redis(client, number, tier)).blocks == 0
            assert await RedisIndex(client, schema).values(as_keys(range(121, 131))) == [None] * 10
            await until(lambda: redis_equals(server, nodes[:1]))
            assert await answers(index, nodes[:1])
        async with sharing(server, nodes) as index:
            await until(lambda: redis_equals(server, nodes))
            await until(lambda: answers(index, nodes))


async def test_node_that_is_followed_again_is_not_forgotten(server: RedisServer) -> None:
    async with daemons(2) as nodes:
        async with sharing(server, nodes) as first:
            await until(lambda: redis_equals(server, nodes))
            assert first.shared is not None
            left = await first.shared._registry.left(math.inf)
            assert {one.node_id for one in left} == {"n0", "n1"}
        async with sharing(server, nodes, redis_forget_seconds=2.0) as second:
            assert second.shared is not None
            shared = second.shared
            await until(lambda: asyncio.sleep(0, shared.state().exact_nodes == 2))
            for one in left:
                with pytest.raises(FencedError):
                    await shared.writer.forget_left(one)
            await shared._tidy()
            await until(lambda: redis_equals(server, nodes))
            assert shared.tidied.forgotten == 0
            await until(lambda: answers(second, nodes))


async def test_a_clock_that_is_days_ahead_forgets_no_node_that_is_followed(
    server: RedisServer,
) -> None:
    async with (
        daemons(2) as nodes,
        sharing(server, nodes, "a") as first,
        sharing(server, nodes, "b") as second,
    ):
        for index in (first, second):
            assert index.shared is not None
            await until(lambda index=index: asyncio.sleep(0, len(index.followed()) == 1))
        await until(lambda: redis_equals(server, nodes))
        await all_answer([first, second], nodes)
        assert first.shared is not None
        first.shared._wall = lambda: 4e9
        await first.shared._tidy()
        assert first.shared.tidied.forgotten == 0
        assert await redis_equals(server, nodes)


async def test_overflowing_queue_costs_a_comparison_and_no_rows(server: RedisServer) -> None:
    async with (
        daemons(1) as nodes,
        sharing(server, nodes, redis_queue_rows=1024, redis_lease_seconds=5.0) as index,
    ):
        await until(lambda: redis_equals(server, nodes))
        assert index.shared is not None
        compared = index.shared.writer.counts.compared
        for start in range(1000, 9000, 1000):
            nodes[0].daemon.store(Tier.DRAM, range(start, start + 1000))
        await until(lambda: redis_equals(server, nodes))
        assert index.shared.writer.counts.compared > compared


async def test_full_redis_costs_no_answers_and_is_filled_when_it_has_room() -> None:
    with redis_server("--maxmemory", "4mb") as server:
        async with daemons(1) as nodes, sharing(server, nodes) as index:
            await until(lambda: redis_equals(server, nodes))
            nodes[0].daemon.store(Tier.DRAM, range(1000, 61_000))
            assert index.shared is not None
            counts = index.shared.link.counts
            await until(lambda: asyncio.sleep(0, counts.full > 0))
            await until(lambda: answers(index, nodes))
            async with server.client() as client:
                await client.config_set("maxmemory", "200mb")
            await until(lambda: redis_equals(server, nodes))


async def test_growing_node_is_cut_into_more_slices_and_loses_nothing(server: RedisServer) -> None:
    async with daemons(1) as nodes, sharing(server, nodes) as index:
        await until(lambda: redis_equals(server, nodes))
        for start in range(1000, 41_000, 4000):
            nodes[0].daemon.store(Tier.DRAM, range(start, start + 4000))
        await until(lambda: redis_equals(server, nodes))
        assert index.shared is not None
        number = index.shared.writer.alive_numbers()[0]
        async with redis.asyncio.Redis(port=server.port) as client:
            fences = [await client.get(RedisSchema().fence(tag, number)) for tag in range(16)]
        assert all(int(fence.split(b":")[1]) >= 2 for fence in fences)


async def test_cluster_is_recognised_and_shared_like_a_single_server() -> None:
    with redis_cluster() as servers:
        server = servers[0]
        async with (
            daemons(3) as nodes,
            sharing(server, nodes, "a") as first,
            sharing(servers[1], nodes, "b") as second,
        ):
            await until(lambda: redis_equals(server, nodes))
            await all_answer([first, second], nodes)
            nodes[0].daemon.clear(Tier.DRAM)
            nodes[1].daemon.remove(Tier.DRAM, range(40, 50))
            await until(lambda: redis_equals(server, nodes))
            await all_answer([first, second], nodes)
            # One master stops for a while: answers go on, and end up exact.
            servers[2].stop()
            nodes[2].daemon.store(Tier.SSD, range(141, 160))
            await asyncio.sleep(1.5)
            servers[2].go_on()
            await until(lambda: redis_equals(server, nodes))
            await all_answer([first, second], nodes)


async def test_random_events_and_failures_end_with_redis_equal_to_the_daemons(
    server: RedisServer,
) -> None:
    rng = random.Random(7)
    async with (
        daemons(3) as nodes,
        sharing(server, nodes) as first,
        sharing(server, nodes, "b") as second,
    ):
        for _ in range(4):
            for _ in range(10):
                node = rng.choice(nodes)
                start, count = rng.randrange(1, 150), rng.randrange(1, 60)
                tier = rng.choice([Tier.DRAM, Tier.SSD])
                held = node.daemon.rows[tier]
                keys = range(start, start + count)
                match rng.randrange(8):
                    case 0:
                        node.daemon.clear(tier)
                    case 1 | 2 | 3:
                        node.daemon.remove(tier, [key for key in keys if key in held])
                    case _:
                        node.daemon.store(tier, [key for key in keys if key not in held])
                await asyncio.sleep(rng.random() * 0.05)
            match rng.randrange(3):
                case 0:
                    server.kill()
                    server.start_again()
                case 1:
                    async with redis.asyncio.Redis(port=server.port) as client:
                        await client.flushall()
                case _:
                    server.stop()
                    await asyncio.sleep(0.5)
                    server.go_on()
        await until(lambda: redis_equals(server, nodes))
        await all_answer([first, second], nodes)


async def test_every_process_hears_the_engines_of_all_nodes(server: RedisServer) -> None:
    async with daemons(2) as nodes, EventPublisher() as one, EventPublisher() as two:
        for node, publisher in zip(nodes, (one, two), strict=True):
            info = replace(
                ENGINE,
                block_tokens=4,
                events_endpoint=publisher.events_endpoint,
                replay_endpoint=publisher.replay_endpoint,
            )
            node.daemon.engines = (info,)
            publisher.drop(stored([7], range(4)))
        keys = index_keys(block_hashes(ENGINE.namespace_id, range(4), 4))
        async with sharing(server, nodes, "a") as first, sharing(server, nodes, "b") as second:
            for index in (first, second):
                assert index.shared is not None
                await until(lambda index=index: asyncio.sleep(0, index.shared.state().leases == 1))

                async def both_are_heard(index: GlobalIndex = index) -> bool:
                    hits = (await index.answer(keys)).engines
                    return {(hit.node_id, hit.hbm_blocks) for hit in hits} == {("n0", 1), ("n1", 1)}

                await until(both_are_heard)
