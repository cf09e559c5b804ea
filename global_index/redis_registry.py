"""Who writes what in Redis: leases on daemons, numbers of nodes, records, and who is alive.

    writers   sorted set   writer -> when it counts as dead
    lease:A   token        the writer of daemon A's rows; expires unless renewed
    numbers   hash         node -> number of its rows
    owners    hash         node -> token of who may describe it
    records   hash         node -> JSON (`redis_record`)
    version   text         changes when readers must read the records again
    alive:W   u16 words    numbers that writer W vouches for; expires, so a dead writer's nodes
                           drop out of answers by themselves
    resting   sorted set   numbers without rows -> since when; used again after a minute

All of them share one slot. A node is alive when the writer that its record names vouches for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from emberkv_proto.types import NodeId
from global_index import redis_scripts
from global_index.index import MAX_HOLDERS, Holder
from global_index.redis_index import FencedError, RowsLostError, Token
from global_index.redis_link import RedisFullError, RedisLink
from global_index.redis_record import NodeRecord, record_from_json, record_to_json
from global_index.redis_schema import RedisSchema

REST_SECONDS = 60.0
"""Longer than any query: nobody still takes a number's rows for its last node's."""


@dataclass(frozen=True, slots=True)
class Beat:
    """What a heartbeat found: writers alive, own leases still held, leases won."""

    writers: int
    kept: frozenset[str]
    won: Mapping[str, Token]


@dataclass(frozen=True, slots=True)
class LeftNode:
    """A node that nobody describes any more, and the token of who did last."""

    node_id: NodeId
    number: Holder
    token: Token


@dataclass(frozen=True, slots=True, eq=False)
class Registry:
    """The records as of one version."""

    version: bytes
    records: Mapping[NodeId, NodeRecord]
    by_number: Mapping[Holder, NodeRecord]
    writers: tuple[str, ...]
    malformed: int


class RedisRegistry:
    """One process's side of the registry; `writer` names it, uniquely."""

    def __init__(
        self, link: RedisLink, schema: RedisSchema, writer: str, lease_seconds: float
    ) -> None:
        self._link = link
        self._schema = schema
        self.writer = writer
        self._lease_ms = round(lease_seconds * 1000)

    async def beat(self, held: Mapping[str, Token], wanted: Sequence[str]) -> Beat:
        """Renew leases and take free ones, no more than one's share of all."""
        keys = self._keys("writers", "tokens", *map(_lease, held), *map(_lease, wanted))
        arguments = (self.writer, self._lease_ms, len(held), *held.values())
        writers, *rest = await self._link.call(
            lambda client: client.eval(redis_scripts.BEAT, len(keys), *keys, *arguments)
        )
        kept = frozenset(a for a, is_held in zip(held, rest, strict=False) if is_held)
        won = {
            address: Token(int(token))
            for address, token in zip(wanted, rest[len(held) :], strict=True)
            if token
        }
        return Beat(writers, kept, won)

    async def give_up(self, leases: Mapping[str, Token]) -> None:
        """Let others have these leases at once."""
        await self._leave("", leases)

    async def leave(self, leases: Mapping[str, Token]) -> None:
        """Be no writer any more."""
        await self._leave(self.writer, leases)

    async def register(self, address: str, token: Token, node_id: NodeId) -> Holder:
        """The number of a node's rows, for the holder of its address's lease.

        Raises:
            FencedError: the lease is another's by now, or a newer writer has the node.
            RedisFullError: all numbers are in use or rest.
        """
        keys = self._keys(_lease(address), "numbers", "owners", "resting", "last")
        arguments = (token, node_id, MAX_HOLDERS, round(REST_SECONDS * 1000))
        number = await self._link.call(
            lambda client: client.eval(redis_scripts.REGISTER, len(keys), *keys, *arguments)
        )
        if number == -3:
            raise RedisFullError(f"all {MAX_HOLDERS} numbers of nodes are in use")
        _check(number, node_id)
        return Holder(number)

    async def publish(self, record: NodeRecord, token: Token, *, has_news: bool) -> None:
        """Describe a node; `has_news` makes readers look.

        Raises:
            FencedError, RowsLostError
        """
        keys = self._keys("owners", "records", "version")
        arguments = (token, record.view.node_id, record_to_json(record), int(has_news))
        answer = await self._link.call(
            lambda client: client.eval(redis_scripts.PUBLISH, len(keys), *keys, *arguments)
        )
        _check(answer, record.view.node_id)

    async def forget(self, node_id: NodeId, token: Token) -> None:
        """Drop a node whose rows are gone; its number rests. Raises FencedError."""
        keys = self._keys("owners", "records", "version", "numbers", "resting")
        answer = await self._link.call(
            lambda client: client.eval(redis_scripts.FORGET, len(keys), *keys, token, node_id)
        )
        _check(answer, node_id)

    async def left(self, before: float) -> list[LeftNode]:
        """Nodes whose records were last written before this time (Unix seconds). O(nodes)."""
        records_key, owners_key = self._keys("records", "owners")

        async def ask(client: object) -> list[Mapping[bytes, bytes]]:
            async with client.pipeline(transaction=False) as pipe:  # type: ignore[attr-defined]
                pipe.hgetall(records_key)
                pipe.hgetall(owners_key)
                return list(await pipe.execute())

        raw, owners = await self._link.call(ask)
        return [
            LeftNode(node_id, record.number, Token(int(owner)))
            for node_id, record in parse_registry(b"", raw).records.items()
            if record.written_unix_seconds < before
            and (owner := owners.get(node_id.encode(), b"")).isdigit()
        ]

    async def vouch(self, numbers: Sequence[Holder]) -> None:
        """Say which nodes are alive, until the lease would expire."""
        words = np.array(numbers, ">u2").tobytes()
        key = self.alive_key(self.writer)
        await self._link.call(
            lambda client: client.eval(redis_scripts.VOUCH, 1, key, words, self._lease_ms)
        )

    async def read(self) -> Registry:
        """All records. O(nodes): only when the version says so, and for people."""
        version_key, records_key = self._keys("version", "records")

        async def ask(client: object) -> list[object]:
            async with client.pipeline(transaction=False) as pipe:  # type: ignore[attr-defined]
                pipe.get(version_key)
                pipe.hgetall(records_key)
                return list(await pipe.execute())

        version, raw = await self._link.call(ask)
        return parse_registry(version or b"", raw)  # type: ignore[arg-type]

    def alive_key(self, writer: str) -> str:
        return self._schema.registry(f"alive:{writer}")

    def version_key(self) -> str:
        return self._schema.registry("version")

    async def _leave(self, writer: str, leases: Mapping[str, Token]) -> None:
        keys = self._keys("writers", *map(_lease, leases))
        arguments = (writer, *leases.values())
        await self._link.call(
            lambda client: client.eval(redis_scripts.LEAVE, len(keys), *keys, *arguments)
        )

    def _keys(self, *names: str) -> list[str]:
        return [self._schema.registry(name) for name in names]


def parse_registry(version: bytes, raw: Mapping[bytes, bytes]) -> Registry:
    """Records that no writer of ours wrote, or two of one number, are left out and counted."""
    records: dict[NodeId, NodeRecord] = {}
    by_number: dict[Holder, NodeRecord] = {}
    malformed = 0
    for name, text in raw.items():
        try:
            record = record_from_json(text)
            if record.view.node_id.encode() != name or record.number in by_number:
                raise ValueError("a record under another's name or number")
        except ValueError:
            malformed += 1
            continue
        records[record.view.node_id] = by_number[record.number] = record
    writers = tuple(sorted({record.writer for record in records.values()}))
    return Registry(version, records, by_number, writers, malformed)


def alive_numbers(
    registry: Registry, writers: Sequence[str], vouchers: Sequence[bytes | None]
) -> frozenset[Holder]:
    """Numbers whose own writer vouches for them."""
    alive = []
    for writer, words in zip(writers, vouchers, strict=True):
        if not words or len(words) % 2:
            continue
        for number in np.frombuffer(words, ">u2").tolist():
            record = registry.by_number.get(Holder(number))
            if record is not None and record.writer == writer:
                alive.append(record.number)
    return frozenset(alive)


def _lease(address: str) -> str:
    return f"lease:{address}"


def _check(answer: int, node_id: NodeId) -> None:
    if answer == redis_scripts.FENCED:
        raise FencedError(f"another writer has node {node_id} in Redis")
    if answer == redis_scripts.LOST:
        raise RowsLostError(f"Redis does not know node {node_id}: it was emptied or exchanged")
