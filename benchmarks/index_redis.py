"""The index in Redis beside two other schemas, on the same chains, each on a Redis of its own.

`hash`: what llm-d's index keeps (github.com/llm-d/llm-d-kv-cache, pkg/kvcache/kvblock): a hash for
each block with a JSON field for each pod, and a sorted set from the engine's hash to it, asked by
pipelined HKEYS. `bitmap`: a SETBIT for each row, asked by MGET. Both go through the same client
library as ours, and all three answers are compared.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import redis.asyncio

from benchmarks._figure import Figure, Line, NotAvailable, Options, main
from benchmarks._peer_servers import redis_server
from benchmarks._peers import PeerUnavailableError
from emberkv_proto.events import Keys
from emberkv_proto.types import Tier
from global_index.index import Holder
from global_index.redis_index import Change, RedisIndex, Token
from global_index.redis_schema import RedisSchema

CHAIN_BLOCKS = 226
"""Of the Mooncake conversation trace at 64 tokens a block, the mean prompt."""
NODES = 64
BITMAP_TIERS = 4
BATCH = 512


@dataclass(frozen=True, slots=True, eq=False)
class Chains:
    """Each chain's blocks, and how many of them each of some nodes holds, by tier."""

    keys: list[Keys]
    held: list[dict[int, tuple[int, Tier]]]

    @property
    def blocks(self) -> int:
        return len({key for keys in self.keys for key in keys.tolist()})

    def rows(self) -> dict[tuple[int, Tier], Keys]:
        found: dict[tuple[int, Tier], list[Keys]] = {}
        for keys, held in zip(self.keys, self.held, strict=True):
            for node, (length, tier) in held.items():
                found.setdefault((node, tier), []).append(keys[:length])
        return {at: np.unique(np.concatenate(parts)) for at, parts in found.items()}


class Schema(Protocol):
    name: str
    client: Any

    async def fill(self, rows: dict[tuple[int, Tier], Keys]) -> None: ...

    async def query(self, keys: Keys) -> dict[int, int]:
        """Blocks of the leading run, by node."""


class Ours:
    name = "emberkv"

    def __init__(self, client: Any) -> None:
        self.client = client
        self._index = RedisIndex(client, RedisSchema())

    async def fill(self, rows: dict[tuple[int, Tier], Keys]) -> None:
        for node in sorted({node for node, _ in rows}):
            largest = max(keys.size for (other, _), keys in rows.items() if other == node)
            await self._index.claim(Holder(node), Token(1), largest)
        for (node, tier), keys in rows.items():
            await self._index.apply(Holder(node), [Change(tier, keys, stores=True)])

    async def query(self, keys: Keys) -> dict[int, int]:
        return {hit.holder: hit.hit_blocks for hit in await self._index.query(keys)}


class HashPerBlock:
    name = "hash"

    def __init__(self, client: Any) -> None:
        self.client = client

    async def fill(self, rows: dict[tuple[int, Tier], Keys]) -> None:
        for (node, tier), keys in rows.items():
            field = json.dumps(
                {"podIdentifier": f"10.0.0.{node}:8000", "deviceTier": tier.name.lower()}
            )
            for first in range(0, keys.size, BATCH):
                async with self.client.pipeline(transaction=False) as pipe:
                    for key in keys[first : first + BATCH].tolist():
                        pipe.hset(str(key), field, "1700000000")
                        pipe.zadd(f"engine:{key}", {str(key): 0.0})
                    await pipe.execute()

    async def query(self, keys: Keys) -> dict[int, int]:
        async with self.client.pipeline(transaction=False) as pipe:
            for key in keys.tolist():
                pipe.hkeys(str(key))
            blocks = await pipe.execute()
        runs: dict[int, int] = {}
        active: set[int] | None = None
        for position, fields in enumerate(blocks):
            pods = {int(json.loads(f)["podIdentifier"].split(":")[0][7:]) for f in fields}
            active = pods if active is None else active & pods
            if not active:
                break
            runs.update(dict.fromkeys(active, position + 1))
        return runs


class BitmapPerBlock:
    name = "bitmap"

    def __init__(self, client: Any) -> None:
        self.client = client

    async def fill(self, rows: dict[tuple[int, Tier], Keys]) -> None:
        for (node, tier), keys in rows.items():
            for first in range(0, keys.size, BATCH):
                async with self.client.pipeline(transaction=False) as pipe:
                    for key in keys[first : first + BATCH].tolist():
                        pipe.setbit(key.to_bytes(8, "little"), node * BITMAP_TIERS + tier, 1)
                    await pipe.execute()

    async def query(self, keys: Keys) -> dict[int, int]:
        values = await self.client.mget([key.to_bytes(8, "little") for key in keys.tolist()])
        runs: dict[int, int] = {}
        active: set[int] | None = None
        for position, value in enumerate(values):
            if active is None:
                bits = np.unpackbits(np.frombuffer(value or b"", np.uint8))
                active = set((np.flatnonzero(bits) // BITMAP_TIERS).tolist())
            else:
                active = {node for node in active if _has_bits(value, node)}
            if not active:
                break
            runs.update(dict.fromkeys(active, position + 1))
        return runs


def _has_bits(value: bytes | None, node: int) -> bool:
    at, half = divmod(node * BITMAP_TIERS, 8)
    return value is not None and at < len(value) and bool(value[at] & (0xF0 >> half))


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one schema: medians over rounds, a query's share."""

    bytes_per_block: float
    rows_per_second: float
    wall_seconds: float
    client_seconds: float
    server_seconds: float


def chains_of(count: int, nodes: int, rng: np.random.Generator) -> Chains:
    """Half of each chain is shared with seven others; one to four nodes hold each to some depth."""
    keys, held = [], []
    shared = np.zeros(0, np.uint64)
    for number in range(count):
        if number % 8 == 0:
            shared = rng.integers(1, 1 << 63, CHAIN_BLOCKS // 2, dtype=np.uint64)
        own = rng.integers(1, 1 << 63, CHAIN_BLOCKS - shared.size, dtype=np.uint64)
        keys.append(np.concatenate([shared, own]))
        chosen = rng.choice(nodes, int(rng.integers(1, 5)), replace=False).tolist()
        tier = Tier.DRAM if number % 3 else Tier.SSD
        held.append({node: (int(rng.integers(1, CHAIN_BLOCKS + 1)), tier) for node in chosen})
    return Chains(keys, held)


async def cost_of(schema: Schema, chains: Chains, rounds: int) -> tuple[Cost, list[dict[int, int]]]:
    rows = chains.rows()
    empty = (await schema.client.info("memory"))["used_memory"]
    began = time.perf_counter()
    await schema.fill(rows)
    fill_seconds = time.perf_counter() - began
    full = (await schema.client.info("memory"))["used_memory"]
    answers = [await schema.query(keys) for keys in chains.keys]
    asked = chains.keys[:100]
    walls, clients, servers = [], [], []
    for _ in range(rounds):
        server = await _cpu_seconds(schema.client)
        wall, client = time.perf_counter(), time.process_time()
        for keys in asked:
            await schema.query(keys)
        walls.append((time.perf_counter() - wall) / len(asked))
        clients.append((time.process_time() - client) / len(asked))
        servers.append((await _cpu_seconds(schema.client) - server) / len(asked))
    return (
        Cost(
            (full - empty) / chains.blocks,
            sum(keys.size for keys in rows.values()) / fill_seconds,
            statistics.median(walls),
            statistics.median(clients),
            statistics.median(servers),
        ),
        answers,
    )


async def _cpu_seconds(client: Any) -> float:
    info = await client.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


def compare(nodes: int, chain_count: int, rounds: int) -> dict[str, Cost]:
    """All schemas on the same chains; raises AssertionError where an answer differs."""
    chains = chains_of(chain_count, nodes, np.random.default_rng(5))
    costs: dict[str, Cost] = {}
    expected: list[dict[int, int]] | None = None
    with ExitStack() as stack:
        for make in (Ours, HashPerBlock, BitmapPerBlock):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ekbench")))
            path = stack.enter_context(redis_server(folder))

            async def run(make: Any = make, path: str = path) -> tuple[Cost, list[dict[int, int]]]:
                async with redis.asyncio.Redis(unix_socket_path=path) as client:
                    return await cost_of(make(client), chains, rounds)

            costs[make.name], answers = asyncio.run(run())
            assert expected is None or answers == expected, f"{make.name} answers otherwise"
            expected = answers
    return costs


def measure(options: Options) -> Sequence[Line]:
    rounds = options.repeats(9, 3)
    chain_count = 160 if options.quick else 4000
    try:
        few = compare(NODES, chain_count, rounds)
        many = compare(1024, chain_count // 2, rounds)
    except PeerUnavailableError as error:
        return [NotAvailable("index_redis", str(error))]
    ours, theirs, bitmap = few["emberkv"], few["hash"], few["bitmap"]
    wide, wide_bitmap = many["emberkv"], many["bitmap"]
    hash_name, bitmap_name = "hash per block, HKEYS", "bitmap per block, MGET"

    def figure(
        name: str, value: float, unit: str, reference: str, other: float, **target: float
    ) -> Figure:
        return Figure(name, value, unit, reference, other, rounds, **target)

    return [
        figure(
            *(f"queries_of_{CHAIN_BLOCKS}_blocks", 1 / ours.wall_seconds, "1/s"),
            *(hash_name, 1 / theirs.wall_seconds),
            at_least=4.0,
        ),
        figure(
            *("query_client_cpu", ours.client_seconds * 1e6, "us"),
            *(hash_name, theirs.client_seconds * 1e6),
            at_most=0.25,
        ),
        figure(
            *("query_redis_cpu", ours.server_seconds * 1e6, "us"),
            *(hash_name, theirs.server_seconds * 1e6),
            at_most=0.75,
        ),
        figure(
            *("bytes_a_block", ours.bytes_per_block, "B"),
            *(hash_name, theirs.bytes_per_block),
            at_most=0.6,
        ),
        figure(
            *("rows_written", ours.rows_per_second, "1/s"),
            *(hash_name, theirs.rows_per_second),
        ),
        figure(
            *("bytes_a_block_beside_a_bitmap", ours.bytes_per_block, "B"),
            *(bitmap_name, bitmap.bytes_per_block),
        ),
        figure(
            *("bytes_a_block_of_1024_nodes", wide.bytes_per_block, "B"),
            *(bitmap_name, wide_bitmap.bytes_per_block),
            at_most=0.6,
        ),
        figure(
            *("query_client_cpu_of_1024_nodes", wide.client_seconds * 1e6, "us"),
            *(bitmap_name, wide_bitmap.client_seconds * 1e6),
        ),
        figure(
            *("query_redis_cpu_of_1024_nodes", wide.server_seconds * 1e6, "us"),
            *(bitmap_name, wide_bitmap.server_seconds * 1e6),
        ),
    ]


if __name__ == "__main__":
    main("index_redis", measure)
