"""Rows in a real Redis: exact like the oracle, fenced, cleared without a search."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import redis.asyncio
from redis.asyncio.cluster import RedisCluster

from emberkv_proto.events import Keys
from emberkv_proto.types import IndexKey, Tier
from global_index.index import Applied, Holder, Holding
from global_index.naive_index import NaiveIndex
from global_index.redis_index import FencedError, RedisIndex, RowsLostError, Token, windows
from global_index.redis_schema import TAGS, RedisSchema, keys_of, members_of, slice_bits_for
from global_index.redis_walk import ChainWalk, decode
from tests.helpers.redis_server import RedisServer, redis_cluster, redis_server

A, B, C = Holder(0), Holder(1), Holder(8191)


def chain(start: int, stop: int) -> Keys:
    return np.arange(start, stop, dtype=np.uint64)


@pytest.fixture(scope="module", params=["alone", "cluster"])
def servers(request: pytest.FixtureRequest) -> Iterator[list[RedisServer]]:
    if request.param == "cluster":
        with redis_cluster() as servers:
            yield servers
    else:
        with redis_server() as server:
            yield [server]


@asynccontextmanager
async def client_of(servers: list[RedisServer]) -> AsyncIterator[object]:
    if len(servers) > 1:
        client = RedisCluster(host="127.0.0.1", port=servers[0].port)
    else:
        client = redis.asyncio.Redis(host="127.0.0.1", port=servers[0].port)
    try:
        yield client
    finally:
        await client.aclose()


async def opened(client: object, *numbers: Holder) -> RedisIndex:
    await client.flushall()  # type: ignore[attr-defined]
    index = RedisIndex(client, RedisSchema())
    for number in numbers or (A, B, C):
        await index.claim(number, Token(1))
    return index


async def test_runs_are_exact_with_holes_alternating_tiers_and_a_lost_head(
    servers: list[RedisServer],
) -> None:
    async with client_of(servers) as client:
        index = await opened(client)
        await index.apply_stored(A, Tier.DRAM, chain(1, 257))
        await index.apply_stored(B, Tier.SSD, chain(1, 3001))
        await index.apply_removed(A, Tier.DRAM, chain(101, 111))
        found = {hit.holder: hit for hit in await index.query(chain(1, 4000))}
        assert (found[A].hit_blocks, found[A].dram_blocks) == (100, 100)
        assert (found[B].hit_blocks, found[B].ssd_blocks) == (3000, 3000)
        await index.apply_stored(A, Tier.SSD, chain(91, 121))
        await index.apply_stored(A, Tier.HBM, chain(4, 7))
        found = {hit.holder: hit for hit in await index.query(chain(1, 4000))}
        assert (found[A].hit_blocks, found[A].hbm_blocks, found[A].ssd_blocks) == (256, 3, 10)
        await index.apply_removed(B, Tier.SSD, chain(1, 2))
        assert {hit.holder for hit in await index.query(chain(1, 4000))} == {A}
        assert await index.holdings(IndexKey(4)) == (
            Holding(A, (Tier.HBM, Tier.DRAM)),
            Holding(B, (Tier.SSD,)),
        )
        await index.check_integrity()


async def test_random_histories_equal_the_oracle(servers: list[RedisServer]) -> None:
    numbers = (A, B, Holder(2), Holder(63), Holder(700), C)
    async with client_of(servers) as client:
        for seed in range(1 if len(servers) > 1 else 2):
            rng = np.random.default_rng(seed)
            index, oracle = await opened(client, *numbers), NaiveIndex(1 << 20)
            stride = np.uint64(0x1000000000000001 if seed % 2 else 1)
            for _ in range(40):
                number = numbers[rng.integers(len(numbers))]
                tier = Tier(int(rng.integers(1, 4)))
                first, count = int(rng.integers(0, 60)), int(rng.integers(0, 80))
                keys = chain(first, first + count) * stride
                match rng.integers(12):
                    case 0:
                        expected = oracle.clear_tier(number, tier)
                        assert await index.clear_tier(number, tier) == expected
                    case 1:
                        oracle.remove_holder(number)
                        await index.remove_holder(number)
                    case 2 | 3 | 4:
                        wanted = oracle.apply_removed(number, tier, keys)
                        assert await index.apply_removed(number, tier, keys) == wanted
                    case _:
                        wanted = oracle.apply_stored(number, tier, keys)
                        assert await index.apply_stored(number, tier, keys) == wanted
                asked = chain(int(rng.integers(1, 40)), 140) * stride
                assert _set(await index.query(asked)) == _set(oracle.query(asked))
            for number in numbers:
                for tier in Tier:
                    assert await index.digest(number, tier) == oracle.digest(number, tier)
            await index.check_integrity()
            for number in numbers:
                await index.remove_holder(number)
                await index.release(number)
            for server in servers:
                async with redis.asyncio.Redis(port=server.port) as one:
                    assert await one.dbsize() == 0, "something is left of removed numbers"


def _set(hits: list) -> set:  # type: ignore[type-arg]
    return {(hit.holder, hit.hit_blocks, hit.hbm_blocks, hit.dram_blocks) for hit in hits}


async def test_key_zero_and_repeats_change_nothing(servers: list[RedisServer]) -> None:
    async with client_of(servers) as client:
        index = await opened(client)
        keys = np.array([0, 5, 5, 2**64 - 1], np.uint64)
        assert await index.apply_stored(A, Tier.DRAM, keys) == Applied(2, 2, 0)
        assert await index.apply_stored(A, Tier.DRAM, keys) == Applied(0, 4, 0)
        assert await index.query(np.array([0, 5], np.uint64)) == []
        assert await index.query(np.zeros(0, np.uint64)) == []
        assert (await index.digest(A, Tier.DRAM)).xor == 5 ^ (2**64 - 1)
        await index.check_integrity()


async def test_writer_that_lost_its_number_changes_nothing(servers: list[RedisServer]) -> None:
    async with client_of(servers) as client:
        old = await opened(client)
        await old.apply_stored(A, Tier.DRAM, chain(1, 50))
        new = RedisIndex(client, RedisSchema())
        await new.claim(A, Token(2))
        with pytest.raises(FencedError):
            await old.apply_stored(A, Tier.DRAM, chain(50, 90))
        with pytest.raises(FencedError):
            await old.clear_tier(A, Tier.DRAM)
        with pytest.raises(FencedError):
            await old.claim(A, Token(1))
        assert (await new.digest(A, Tier.DRAM)).blocks == 49
        await new.check_integrity()


async def test_number_that_has_grown_is_cut_into_more_slices(servers: list[RedisServer]) -> None:
    async with client_of(servers) as client:
        index = await opened(client)
        await index.apply_stored(A, Tier.DRAM, chain(1, 40_001))
        await index.apply_stored(A, Tier.SSD, chain(1, 1001))
        assert index.is_cut_too_coarsely(A, 40_000)
        late = RedisIndex(client, RedisSchema())
        await late.claim(A, Token(1))
        for tag in range(len(TAGS)):
            rows = await index.rows_of_tag(A, tag)
            await index.reslice(A, tag, rows)
        assert not index.is_cut_too_coarsely(A, 40_000)
        with pytest.raises(FencedError):
            await late.apply_stored(A, Tier.DRAM, chain(50_000, 50_001))  # by the old cut
        await index.apply_stored(A, Tier.DRAM, chain(40_001, 40_101))
        await index.apply_removed(A, Tier.DRAM, chain(1, 101))
        assert (await index.digest(A, Tier.DRAM)).blocks == 40_000
        assert await index.count(A, Tier.SSD) == 1000
        await index.check_integrity()
        heir = RedisIndex(client, RedisSchema())
        await heir.claim(A, Token(2))
        assert (await heir.digest(A, Tier.DRAM)).blocks == 40_000
        await heir.remove_holder(A)
        await heir.release(A)
        for number in (B, C):
            await index.release(number)
        for server in servers:
            async with redis.asyncio.Redis(port=server.port) as one:
                assert await one.dbsize() == 0


async def test_emptied_redis_is_noticed_by_the_next_write(servers: list[RedisServer]) -> None:
    async with client_of(servers) as client:
        index = await opened(client)
        await index.apply_stored(A, Tier.DRAM, chain(1, 50))
        await client.flushall()  # type: ignore[attr-defined]
        with pytest.raises(RowsLostError):
            await index.apply_stored(A, Tier.DRAM, chain(50, 51))
        assert await index.query(chain(1, 50)) == []


async def test_no_command_that_searches_the_keyspace_is_ever_sent(
    servers: list[RedisServer],
) -> None:
    async with client_of(servers) as client:
        index = await opened(client)
        await index.apply_stored(A, Tier.DRAM, chain(1, 5000))
        await index.apply_stored(A, Tier.SSD, chain(1, 5000))
        await index.clear_tier(A, Tier.DRAM)
        await index.remove_holder(A)
        await index.query(chain(1, 5000))
    for server in servers:
        async with redis.asyncio.Redis(port=server.port) as one:
            used = set(await one.info("commandstats"))
        assert not {"cmdstat_keys", "cmdstat_scan", "cmdstat_sscan", "cmdstat_hscan"} & used


def test_no_source_of_ours_names_a_searching_command() -> None:
    folder = Path(__file__).parents[3] / "global_index"
    sources = sorted(folder.glob("redis_*.py"))
    assert len(sources) > 3
    for source in sources:
        text = source.read_text(encoding="utf-8")
        assert not re.search(r"\b[shz]?scan(_iter)?\b\s*\(|['\"](SCAN|KEYS|[SHZ]SCAN)['\"]", text)
        assert not re.search(r"\.keys\(\s*['\"]", text)


async def test_values_that_nobody_of_ours_wrote_are_absent_blocks_and_counted() -> None:
    good = b"\x00\x0a"  # number 1, DRAM
    window = decode([good, b"\x00", None, good, b"x" * 40_000])
    assert window.malformed == 2
    walk = ChainWalk()
    walk.add(window)
    assert [(hit.holder, hit.hit_blocks) for hit in walk.hits()] == [(1, 1)]


def test_members_are_keys_of_all_64_bits() -> None:
    keys = np.array([1, 2**63, 2**64 - 1], np.uint64)
    replies = [str(member).encode() for member in members_of(keys)]
    assert keys_of(replies).tolist() == keys.tolist()
    assert keys_of([]).size == 0


def test_tags_spread_over_the_slots_of_any_even_cluster() -> None:
    from redis.crc import key_slot

    assert sorted(key_slot(tag.encode()) // 1024 for tag in TAGS) == list(range(16))
    schema = RedisSchema()
    keys = np.arange(1, 10_000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for name, key in zip(schema.blocks(keys)[:100], keys[:100].tolist(), strict=True):
        assert name.startswith(b"ek{" + TAGS[key & 15].encode() + b"}")
        assert name.endswith(key.to_bytes(8, "little"))
    assert len(set(schema.slices(0, A, Tier.DRAM, 8))) == 256


def test_slices_grow_in_count_with_the_rows() -> None:
    assert [slice_bits_for(rows) for rows in (0, 4096, 4097, 8192, 1 << 20)] == [0, 0, 1, 1, 8]
    assert slice_bits_for(1 << 40) == 12


@pytest.mark.parametrize("blocks", [0, 1, 1023, 1024, 1025, 9216, 9217, 100_000])
def test_windows_cover_a_chain_once_and_in_order(blocks: int) -> None:
    cuts = windows(blocks)
    assert [n for first, last in cuts for n in (first, last)][1:-1:1] == [
        n for first, _ in cuts[1:] for n in (first, first)
    ]
    assert sum(last - first for first, last in cuts) == blocks
