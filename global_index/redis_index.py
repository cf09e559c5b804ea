"""Rows of the index in Redis: who has which block, written under a fence, asked for in one go.

Unlike a `BlockIndex` every call waits for Redis. Redis bounds the memory, so nothing is dropped
here; when it is full (`maxmemory`), writing fails and nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, NewType

import numpy as np
import numpy.typing as npt

from emberkv_proto.errors import UnavailableError
from emberkv_proto.events import Keys
from emberkv_proto.types import IndexKey, Tier, TierDigest
from global_index import redis_scripts
from global_index.index import Applied, Holder, HolderHit, Holding
from global_index.redis_schema import (
    TAGS,
    RedisSchema,
    keys_of,
    members_of,
    parts_of,
    slice_bits_for,
    tags_of,
)
from global_index.redis_walk import ChainWalk, decode

Token = NewType("Token", int)
"""Who may write a number's rows; a newer one is greater."""

Client = Any
"""redis.asyncio.Redis or RedisCluster: the calls used here are the same."""

Trip = list[tuple[Any, ...]]
"""Arguments of some scripts."""

ROWS_PER_SCRIPT = 512
"""Bounds how long one script keeps Redis from others: about 2 ms."""

SCRIPTS_PER_TRIP = 4
"""Bounds how long this process's loop is kept by packing them: some milliseconds."""

SLICES_PER_READ = 64
"""Read by one command; of a node with a million rows that is 16,000 rows, a few milliseconds."""

FIRST_WINDOW_BLOCKS = 1024
NEXT_WINDOW_BLOCKS = 8192
"""Asked for in the first round trip of a query, and in each later one."""


class FencedError(UnavailableError):
    """Another writer has the number."""


class RowsLostError(UnavailableError):
    """Redis no longer knows the fence: it was emptied, or it is another Redis."""


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """Rows to store or to remove in one tier."""

    tier: Tier
    keys: Keys
    stores: bool

    @property
    def op(self) -> int:
        return (1 << (self.tier - 1)) + (8 if self.stores else 0)


class RedisIndex:
    """One writer's and reader's view of the rows. Not thread-safe; calls may overlap.

    `claim` a number before writing to it. Changes are idempotent, in order within a call for each
    block. Errors of the connection come as redis.RedisError or OSError.
    """

    def __init__(self, client: Client, schema: RedisSchema) -> None:
        self.client = client
        self._schema = schema
        self._tokens: dict[Holder, Token] = {}
        self._bits: dict[Holder, list[int]] = {}
        """How each tag of a claimed number is sliced."""

    async def claim(self, number: Holder, token: Token, rows: int = 0) -> None:
        """From now on only writes under `token` change the rows of `number`.

        `rows` is how many it is about to have, where it has none yet.

        Raises:
            FencedError: a greater token has it.
        """
        bits = slice_bits_for(rows)
        async with self.client.pipeline(transaction=False) as pipe:
            for tag in range(len(TAGS)):
                pipe.eval(redis_scripts.FENCE, 1, self._schema.fence(tag, number), token, bits)
            found = await pipe.execute()
        _refuse(number, found)
        self._tokens[number], self._bits[number] = token, list(found)

    async def release(self, number: Holder) -> None:
        """Forget the fence of a number that has no rows left."""
        async with self.client.pipeline(transaction=False) as pipe:
            for tag in range(len(TAGS)):
                fence = self._schema.fence(tag, number)
                pipe.eval(redis_scripts.UNFENCE, 1, fence, self._fence(tag, number))
            await pipe.execute()
        del self._tokens[number], self._bits[number]

    def is_cut_too_coarsely(self, number: Holder, rows: int) -> bool:
        """Whether slices of so many rows are far above what Redis keeps small."""
        return slice_bits_for(rows) > min(self._bits[number]) + 1

    async def reslice(self, number: Holder, tag: int, rows: dict[Tier, Keys]) -> None:
        """Cut what `number` has in `tag`, which is exactly `rows`, into as many slices as it needs.

        Raises:
            FencedError, RowsLostError
        """
        old, size = self._bits[number][tag], max(keys.size for keys in rows.values())
        new = max(old, slice_bits_for(size * len(TAGS)))
        if new == old:
            return
        fence, own = self._schema.fence(tag, number), self._fence(tag, number)
        fills = []
        for tier, keys in rows.items():
            parts = parts_of(keys, new)
            order = np.argsort(parts, kind="stable")
            cuts = np.searchsorted(parts[order], np.arange((1 << new) + 1)).tolist()
            for part, (first, last) in enumerate(pairwise(cuts)):
                name = self._schema.slice(tag, number, tier, new, part)
                members = members_of(keys[order[first:last]])
                fills.append((redis_scripts.FILL_SLICE, 2, fence, name, own, *members))
        for first in range(0, len(fills), SLICES_PER_READ):
            async with self.client.pipeline(transaction=False) as pipe:
                for fill in fills[first : first + SLICES_PER_READ]:
                    pipe.eval(*fill)
                _refuse(number, await pipe.execute())
        left = [name for tier in Tier for name in self._schema.slices(tag, number, tier, old)]
        arguments = (fence, *left, own, f"{self._tokens[number]}:{new}")
        _refuse(number, [await self.client.eval(redis_scripts.RESLICE, 1 + len(left), *arguments)])
        self._bits[number][tag] = new

    async def apply(self, number: Holder, changes: Sequence[Change]) -> int:
        """Make the changes; return how many rows were not so before.

        Raises:
            FencedError, RowsLostError: nothing of the refused scripts was done.
        """
        changed = 0
        for trip in self.trips(number, changes):
            changed += await self.send(number, trip)
        return changed

    def trips(self, number: Holder, changes: Sequence[Change]) -> Iterator[Trip]:
        """The changes as scripts, some of them at a time; each trip goes to `send`, in order."""
        changes = [change for change in changes if change.keys.size]
        if not changes:
            return
        keys = np.concatenate([change.keys for change in changes]).astype(np.uint64, copy=False)
        sizes = [change.keys.size for change in changes]
        ops = np.repeat(np.array([change.op for change in changes], np.uint8), sizes)
        ops, keys = ops[keys != 0], keys[keys != 0]
        scripts = iter(self._scripts(number, keys, ops))
        while trip := list(islice(scripts, SCRIPTS_PER_TRIP)):
            yield trip

    async def send(self, number: Holder, trip: Trip) -> int:
        """Run scripts of `trips`; return how many rows were not so before. Raises as `apply`."""
        async with self.client.pipeline(transaction=False) as pipe:
            for arguments in trip:
                pipe.eval(*arguments)
            return _refuse(number, await pipe.execute())

    async def apply_stored(self, number: Holder, tier: Tier, keys: Keys) -> Applied:
        changed = await self.apply(number, [Change(tier, keys, stores=True)])
        return Applied(changed, keys.size - changed, 0)

    async def apply_removed(self, number: Holder, tier: Tier, keys: Keys) -> Applied:
        changed = await self.apply(number, [Change(tier, keys, stores=False)])
        return Applied(changed, keys.size - changed, 0)

    async def clear_tier(self, number: Holder, tier: Tier) -> int:
        """Remove all rows of `number` in `tier`, found by its reverse sets; return how many."""
        return await self._clear(number, (tier,))

    async def remove_holder(self, number: Holder) -> None:
        """Remove all rows of `number`."""
        await self._clear(number, tuple(Tier))

    async def rows_of_tag(self, number: Holder, tag: int) -> dict[Tier, Keys]:
        """Rows whose keys' low bits are `tag`, by tier, in no order."""
        return await self._rows_of_tag(number, tuple(Tier), tag)

    async def query(self, keys: Keys) -> list[HolderHit]:
        """Leading runs of a chain, one for each number of its first block, in no order. Exact."""
        walk = ChainWalk()
        for first, last in windows(keys.size):
            walk.add(decode(await self.values(keys[first:last])))
            if walk.is_over:
                break
        return walk.hits()

    async def values(self, keys: Keys) -> list[bytes | None]:
        """Values of blocks, in order."""
        if not keys.size:
            return []
        async with self.client.pipeline(transaction=False) as pipe:
            asked = ask_values(self.client, pipe, self._schema, keys)
            return asked.in_order(await pipe.execute())

    async def count(self, number: Holder, tier: Tier) -> int:
        """How many rows `number` has in `tier`. O(slices), whatever their size."""
        async with self.client.pipeline(transaction=False) as pipe:
            for tag in range(len(TAGS)):
                names = self._schema.slices(tag, number, tier, self._bits[number][tag])
                pipe.eval(redis_scripts.COUNT, len(names), *names)
            return sum(await pipe.execute())

    async def holdings(self, key: IndexKey) -> tuple[Holding, ...]:
        """Who has one block, by number."""
        window = decode(await self.values(np.array([key], np.uint64)))
        return tuple(
            Holding(Holder(number), tuple(tier for tier in Tier if tiers >> (tier - 1) & 1))
            for number, tiers in zip(window.numbers.tolist(), window.tiers.tolist(), strict=True)
        )

    async def digest(self, number: Holder, tier: Tier) -> TierDigest:
        """Count and XOR of the rows of `number` in `tier`. O(rows)."""
        blocks, xor = 0, np.uint64(0)
        for tag in range(len(TAGS)):
            keys = (await self._rows_of_tag(number, (tier,), tag))[tier]
            blocks, xor = blocks + keys.size, xor ^ np.bitwise_xor.reduce(keys, initial=0)
        return TierDigest(tier, blocks, int(xor))

    async def check_integrity(self) -> None:
        """Assert that values and reverse sets of every claimed number agree. O(rows)."""
        sets: dict[tuple[int, int], int] = {}
        for number in self._tokens:
            for tag in range(len(TAGS)):
                for tier, keys in (await self.rows_of_tag(number, tag)).items():
                    assert np.all(tags_of(keys) == tag)
                    for key in keys.tolist():
                        held = sets.get((key, number), 0)
                        sets[key, number] = held | 1 << (tier - 1)
        keys = np.unique(np.array([key for key, _ in sets], np.uint64))
        values = await self.values(keys)
        found: dict[tuple[int, int], int] = {}
        for key, value in zip(keys.tolist(), values, strict=True):
            assert value is not None, f"block {key} is in a reverse set only"
            window = decode([value])
            assert window.malformed == 0
            assert np.all(np.diff(window.numbers) > 0), f"the holders of {key} are not in order"
            assert np.all(window.tiers > 0), f"a holder of {key} has no tier"
            for number, tiers in zip(window.numbers.tolist(), window.tiers.tolist(), strict=True):
                if number in self._tokens:
                    found[key, number] = tiers
        assert found == sets, "values and reverse sets differ"

    def _fence(self, tag: int, number: Holder) -> str:
        return f"{self._tokens[number]}:{self._bits[number][tag]}"

    async def _clear(self, number: Holder, tiers: tuple[Tier, ...]) -> int:
        changed = 0
        for tag in range(len(TAGS)):
            rows = await self._rows_of_tag(number, tiers, tag)
            removed = [Change(tier, keys, stores=False) for tier, keys in rows.items()]
            changed += await self.apply(number, removed)
        return changed

    async def _rows_of_tag(
        self, number: Holder, tiers: tuple[Tier, ...], tag: int
    ) -> dict[Tier, Keys]:
        async with self.client.pipeline(transaction=False) as pipe:
            for tier in tiers:
                names = self._schema.slices(tag, number, tier, self._bits[number][tag])
                for first in range(0, len(names), SLICES_PER_READ):
                    pipe.execute_command("SUNION", *names[first : first + SLICES_PER_READ])
            found = await pipe.execute()
        reads = -(-(1 << self._bits[number][tag]) // SLICES_PER_READ)
        return {
            tier: keys_of([m for members in found[n * reads : (n + 1) * reads] for m in members])
            for n, tier in enumerate(tiers)
        }

    def _scripts(self, number: Holder, keys: Keys, ops: Any) -> Iterable[tuple[Any, ...]]:
        tags = tags_of(keys)
        for tag in np.unique(tags).tolist():
            of_tag = np.flatnonzero(tags == tag)
            for first in range(0, of_tag.size, ROWS_PER_SCRIPT):
                chosen = of_tag[first : first + ROWS_PER_SCRIPT]
                yield self._script(number, tag, keys[chosen], ops[chosen])

    def _script(self, number: Holder, tag: int, keys: Keys, ops: Any) -> tuple[Any, ...]:
        tiers = [_TIER_OF_BIT[op & 7] for op in ops.tolist()]
        names: list[bytes] = [b""] * (2 * keys.size)
        names[0::2] = self._schema.blocks(keys)
        names[1::2] = self._schema.slices_of(tag, number, tiers, self._bits[number][tag], keys)
        return (
            redis_scripts.WRITE,
            1 + len(names),
            self._schema.fence(tag, number),
            *names,
            self._fence(tag, number),
            number,
            ops.tobytes(),
            *members_of(keys),
        )


_TIER_OF_BIT = {1 << (tier - 1): tier for tier in Tier}


def windows(blocks: int) -> list[tuple[int, int]]:
    """How a chain is cut into round trips: first the length of most chains, then long pieces."""
    cuts = [0, *range(FIRST_WINDOW_BLOCKS, blocks, NEXT_WINDOW_BLOCKS), blocks]
    return [(first, last) for first, last in pairwise(cuts) if last > first]


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """Which blocks each reply of a trip is for."""

    places: tuple[npt.NDArray[np.intp], ...]
    blocks: int

    def in_order(self, replies: Sequence[Sequence[bytes | None]]) -> list[bytes | None]:
        """The blocks' values, in the order in which they were asked for."""
        if len(self.places) == 1:
            return list(replies[0])
        values: list[bytes | None] = [None] * self.blocks
        for places, reply in zip(self.places, replies, strict=True):
            for place, value in zip(places.tolist(), reply, strict=True):
                values[place] = value
        return values


def is_cluster(client: Client) -> bool:
    return hasattr(client, "get_primaries")


def ask_values(client: Client, pipe: Any, schema: RedisSchema, keys: Keys) -> Asked:
    """Put what asks for the blocks' values into a pipeline: one MGET, or one for each tag."""
    names = schema.blocks(keys)
    if not is_cluster(client):
        pipe.execute_command("MGET", *names)
        return Asked((np.arange(keys.size),), keys.size)
    tags = tags_of(keys)
    places = tuple(np.flatnonzero(tags == tag) for tag in np.unique(tags))
    for chosen in places:
        pipe.execute_command("MGET", *[names[place] for place in chosen.tolist()])
    return Asked(places, keys.size)


def _refuse(number: Holder, replies: Sequence[int]) -> int:
    """The sum of the replies. Raises FencedError, RowsLostError."""
    if redis_scripts.FENCED in replies:
        raise FencedError(f"another writer has number {number} of the index in Redis")
    if redis_scripts.LOST in replies:
        raise RowsLostError(f"Redis does not know number {number}: it was emptied or exchanged")
    return sum(replies)
