"""Who is followed, for how long, and what is left of those who are not. A clock made by hand."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from emberkv_proto.errors import UnavailableError
from emberkv_proto.hashing import block_hashes, index_keys
from emberkv_proto.types import EngineInfo, NamespaceId, NodeId, Tier
from global_index.dict_index import DictIndex
from global_index.hbm import engines as engines_module
from global_index.hbm.engines import EngineDirectory, EngineKey, StreamState
from global_index.hbm.sequence import Verdict
from global_index.holders import HolderPool
from global_index.index import MAX_HOLDERS, Holder
from tests.helpers.event_publisher import stored

SPACE = NamespaceId(bytes(16))
NODE = NodeId("n")
INFO = EngineInfo(
    "e", "http://h:1", "m", SPACE, 4, events_endpoint="tcp://h:5557", replay_endpoint="tcp://h:5558"
)
KEY = EngineKey(NODE, "e", 0)
PROMPT = list(range(12))
CHAIN = index_keys(block_hashes(SPACE, PROMPT, 4))
GONE = 30.0


class World:
    """A directory, its index, and a base that the test sets."""

    def __init__(self) -> None:
        self.index = DictIndex(10_000)
        self.holders = HolderPool(self.index)
        self.bases: dict[NodeId, Holder] = {}
        self.engines = EngineDirectory(self.index, self.holders, self.bases.get, GONE)

    def sync(self, now: float, *infos: EngineInfo) -> tuple[list[str], list[str]]:
        changes = self.engines.sync([(NODE, info) for info in infos], now)
        self.check()
        return [key.engine_id for key in changes.begun], [key.engine_id for key in changes.ended]

    def say(self, seq: int, *events: Any, key: EngineKey = KEY) -> Verdict:
        return self.engines.offer(key, seq, msgspec.msgpack.encode([time.time(), list(events)]))

    def hbm(self) -> int:
        hits = self.engines.hits(self.index.query(CHAIN))
        return next((hit.hbm_blocks for hit in hits), 0)

    def check(self) -> None:
        self.index.check_integrity()
        self.engines.check_integrity()
        self.holders.check_integrity(self.engines.live_holders())


@pytest.fixture
def world() -> World:
    return World()


def current(world: World) -> None:
    """An engine with three blocks, in answers."""
    world.sync(0.0, INFO)
    assert world.say(0, stored([1, 2, 3], PROMPT)) is Verdict.NEXT
    assert world.hbm() == 0, "not before the stream is known to be complete"
    world.engines.on_current(KEY)
    assert world.hbm() == 3


def test_an_engine_is_followed_once_and_anew_when_its_stream_is_another(world: World) -> None:
    assert world.sync(0.0, INFO, replace(INFO, url="http://other")) == (["e"], [])
    assert world.sync(1.0, INFO) == ([], [])
    assert world.sync(2.0, replace(INFO, url="http://h:2")) == ([], [])
    assert world.engines.info(KEY).url == "http://h:2"
    moved = replace(INFO, events_endpoint="tcp://h:6000")
    assert world.sync(3.0, moved) == (["e"], ["e"])
    assert world.sync(4.0, replace(moved, namespace_id=NamespaceId(b"o" * 16))) == (["e"], ["e"])
    assert world.sync(5.0, replace(INFO, events_endpoint="")) == ([], ["e"])


def test_an_engine_whose_daemon_restarts_stays_while_its_connection_does(world: World) -> None:
    current(world)
    assert world.sync(10.0) == ([], [])
    assert world.hbm() == 3
    assert world.sync(20.0, INFO) == ([], [])
    assert world.sync(20.0 + GONE) == ([], [])
    assert world.sync(20.1 + GONE) == ([], ["e"])
    while world.holders.sweep():
        pass
    assert world.index.size().blocks == 0


def test_an_engine_that_is_away_and_unannounced_is_gone_at_once(world: World) -> None:
    current(world)
    world.engines.on_away(KEY, 5.0)
    assert world.hbm() == 0
    assert world.sync(6.0, INFO) == ([], [])
    assert world.sync(7.0) == ([], ["e"])
    world.engines.on_away(KEY, 8.0)  # its task ends after it was forgotten


def test_rows_of_an_engine_that_stays_away_go_and_its_stream_begins_again(world: World) -> None:
    current(world)
    world.engines.on_away(KEY, 5.0)
    world.sync(5.0 + GONE, INFO)
    assert world.index.size().blocks == 3
    world.sync(5.1 + GONE, INFO)
    assert world.index.size().blocks == 0
    assert world.say(0, stored([1], PROMPT[:4])) is Verdict.NEXT


def test_bases_follow_the_node(world: World) -> None:
    node = Holder(7)
    for _ in range(8):
        world.holders.reserve(1)
    taken = [world.holders.take() for _ in range(8)]
    world.index.apply_stored(node, Tier.DRAM, CHAIN)
    world.bases[NODE] = node
    world.engines.sync([(NODE, INFO)], 0.0)
    world.engines.on_current(KEY)
    (hit,) = world.engines.hits(world.index.query(CHAIN))
    assert (hit.hit_blocks, hit.hbm_blocks, hit.dram_blocks) == (3, 0, 3)
    del world.bases[NODE]
    world.engines.rebase(NODE)
    assert world.engines.hits(world.index.query(CHAIN)) == []
    assert len(taken) == 8


def test_a_clear_takes_nothing_but_what_that_engine_had_in_its_hbm(world: World) -> None:
    other = replace(INFO, engine_id="f", events_endpoint="tcp://h:5559", replay_endpoint="")
    world.sync(0.0, INFO, other)
    node = Holder(100)
    for tier in (Tier.DRAM, Tier.SSD):
        world.index.apply_stored(node, tier, CHAIN)
    for key in (KEY, EngineKey(NODE, "f", 0)):
        world.say(0, stored([1, 2, 3], PROMPT), key=key)
        world.engines.on_current(key)
    before = {key: len(rows) for key, rows in rows_by_holder(world).items()}
    assert sorted(before.values()) == [3, 3, 3, 3]
    world.say(1, {"type": "AllBlocksCleared"})
    left = rows_by_holder(world)
    assert sorted(len(rows) for rows in left.values()) == [3, 3, 3]
    assert [hit.engine_id for hit in world.engines.hits(world.index.query(CHAIN))] == ["f"]
    assert (node, Tier.DRAM) in left
    assert (node, Tier.SSD) in left
    world.index.check_integrity()
    world.engines.check_integrity()


def rows_by_holder(world: World) -> dict[tuple[Holder, Tier], list[int]]:
    found = {
        (Holder(holder), tier): world.index.rows(Holder(holder), tier).tolist()
        for holder in (0, 1, 100)
        for tier in Tier
    }
    return {key: rows for key, rows in found.items() if rows}


def test_no_more_are_followed_than_there_is_room_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines_module, "MAX_ENGINES", 3)
    many = [replace(INFO, engine_id=f"e{n}") for n in range(5)]
    assert world.sync(0.0, *many) == (["e0", "e1", "e2"], [])
    assert world.engines.refused == 2
    assert world.sync(1.0, *many[2:]) == ([], ["e0", "e1"]), "room is found at the next look"
    assert world.sync(2.0, *many[2:])[0] == ["e3", "e4"]
    assert world.engines.refused == 0
    world.holders.reserve(MAX_HOLDERS - 3)
    with pytest.raises(UnavailableError):
        world.holders.reserve(1)


def test_a_full_index_refuses_rows_and_loses_none_of_the_account() -> None:
    world = World()
    world.index = DictIndex(2)
    world.holders = HolderPool(world.index)
    world.engines = EngineDirectory(world.index, world.holders, world.bases.get, GONE)
    world.sync(0.0, INFO)
    world.say(0, stored([1, 2, 3], PROMPT))
    world.engines.on_current(KEY)
    (view,) = world.engines.views()
    assert (view.dropped, view.digest.blocks, view.state) == (1, 2, StreamState.CURRENT)
    world.say(1, {"type": "AllBlocksCleared"})
    assert world.index.size().blocks == 0
    world.check()
