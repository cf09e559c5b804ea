"""Copies of a node's rows that are taken while the rows change."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from emberkv_proto.events import BlocksRemoved, BlocksStored, Event, TierCleared
from emberkv_proto.types import Tier
from global_index import row_copy
from global_index.dict_index import DictIndex
from global_index.index import BlockIndex, Holder
from global_index.memory_index import MemoryIndex
from global_index.naive_index import NaiveIndex
from global_index.row_copy import RowsCopy
from tests.helpers.model_daemon import as_keys

MINE, OTHER = Holder(1), Holder(2)
BACKENDS = [MemoryIndex, DictIndex, NaiveIndex]


def apply(index: BlockIndex, holder: Holder, event: Event, *copies: RowsCopy) -> None:
    match event:
        case BlocksStored(tier, keys):
            index.apply_stored(holder, tier, keys)
        case BlocksRemoved(tier, keys):
            index.apply_removed(holder, tier, keys)
        case TierCleared(tier):
            index.clear_tier(holder, tier)
    for copy in copies:
        copy.note(event)


def held(index: BlockIndex, tier: Tier) -> list[int]:
    return sorted(index.rows(MINE, tier).tolist())


@pytest.mark.parametrize("backend", BACKENDS)
def test_collect_finds_every_key_of_one_holder_in_one_tier(
    backend: Callable[[int], BlockIndex],
) -> None:
    index = backend(10_000)
    for holder in range(8):  # more than fit inline: bitmap rows too
        index.apply_stored(Holder(holder), Tier.DRAM, as_keys(range(1, 101 + holder)))
    index.apply_stored(MINE, Tier.SSD, as_keys(range(500, 2000)))
    assert held(index, Tier.DRAM) == list(range(1, 102))
    assert held(index, Tier.SSD) == list(range(500, 2000))
    assert held(index, Tier.HBM) == []
    pieces, start = [], 0
    while start is not None:
        piece = index.collect(MINE, Tier.SSD, start, 100)
        pieces += piece.keys.tolist()
        start = piece.next_slot
    assert sorted(pieces) == list(range(500, 2000))


@pytest.mark.parametrize("backend", [MemoryIndex, DictIndex])
@pytest.mark.parametrize("seed", range(30))
def test_copy_equals_the_rows_at_its_end_whatever_happened_meanwhile(
    backend: Callable[[int], BlockIndex], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_copy, "PIECE_SLOTS", 200)
    monkeypatch.setattr(row_copy, "OVERLAP_SLOTS", 8)
    choose = random.Random(seed)
    index = backend(100_000)
    index.apply_stored(MINE, Tier.DRAM, as_keys(choose.sample(range(1, 6000), 2000)))
    index.apply_stored(MINE, Tier.SSD, as_keys(choose.sample(range(1, 6000), 500)))
    copy = RowsCopy(index, MINE)
    while copy.step():
        for _ in range(choose.randrange(3)):
            tier = choose.choice((Tier.DRAM, Tier.SSD))
            keys = as_keys(choose.sample(range(1, 9000), choose.randrange(1, 200)))
            kinds: list[Event] = [BlocksStored(tier, keys), BlocksRemoved(tier, keys)]
            event = TierCleared(tier) if choose.random() < 0.02 else choose.choice(kinds)
            apply(index, MINE, event, copy)
            other = choose.choice(kinds)
            apply(index, OTHER, other)  # moves entries of all holders
    rows = copy.settle()
    for tier in row_copy.COPIED_TIERS:
        assert sorted(rows[tier].tolist()) == held(index, tier)
    index.check_integrity()


def test_quiet_table_is_copied_in_pieces_without_a_second_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_copy, "PIECE_SLOTS", 500)
    index = MemoryIndex(100_000)
    index.apply_stored(MINE, Tier.DRAM, as_keys(range(1, 5000)))
    copy = RowsCopy(index, MINE)
    steps = 1
    while copy.step():
        steps += 1
    assert steps > 10
    assert sorted(copy.settle()[Tier.DRAM].tolist()) == list(range(1, 5000))
    assert copy.rereads == 0


def test_more_changes_than_are_noted_end_in_one_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_copy, "MAX_NOTED_KEYS", 100)
    monkeypatch.setattr(row_copy, "PIECE_SLOTS", 100)
    index = MemoryIndex(100_000)
    index.apply_stored(MINE, Tier.DRAM, as_keys(range(1, 1000)))
    copy = RowsCopy(index, MINE)
    assert copy.step()
    for start in range(1000, 3000, 50):
        apply(index, MINE, BlocksStored(Tier.DRAM, as_keys(range(start, start + 50))), copy)
    assert not copy.step()
    assert sorted(copy.settle()[Tier.DRAM].tolist()) == list(range(1, 3000))
    assert copy.rereads == 2


def test_rows_cleared_and_stored_again_are_those_stored_last() -> None:
    index = MemoryIndex(10_000)
    index.apply_stored(MINE, Tier.DRAM, as_keys(range(1, 100)))
    copy = RowsCopy(index, MINE)
    while copy.step():
        pass
    apply(index, MINE, TierCleared(Tier.DRAM), copy)
    apply(index, MINE, BlocksStored(Tier.DRAM, as_keys((3, 4, 5))), copy)
    apply(index, MINE, BlocksRemoved(Tier.DRAM, as_keys((4,))), copy)
    apply(index, MINE, BlocksStored(Tier.DRAM, np.array([0, 9], np.uint64)), copy)
    assert sorted(copy.settle()[Tier.DRAM].tolist()) == [3, 5, 9]
    assert copy.rereads == 0
