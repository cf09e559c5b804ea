from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest

from emberkv_proto.events import BlocksRemoved, BlocksStored
from emberkv_proto.hashing import index_key
from emberkv_proto.layout import Group, GroupKind
from emberkv_proto.types import BlockHash, Tier
from store_daemon import catalog
from store_daemon.block import Block, StoredNamespace
from store_daemon.catalog import BlockCatalog
from store_daemon.eviction import EvictionQueue
from store_daemon.extents import choose_extent
from store_daemon.tiers.slots import Slot, SlotAllocator
from store_daemon.tiers.ssd import SsdRow
from tests.helpers.store import chain, hybrid_namespace, small_namespace

PLAIN = StoredNamespace.of(small_namespace())
TWO_PARTS = StoredNamespace.of(small_namespace(groups=2, model="two"))


class Fixture:
    def __init__(self) -> None:
        self.queue = EvictionQueue()
        self.catalog = BlockCatalog(self.queue.offer, self.queue.entered, self.queue.left)
        self.slots = SlotAllocator(65536, 4)

    def slot(self, namespace: StoredNamespace = PLAIN, part: int = 0) -> Slot:
        size_class = namespace.size_classes[part]
        slot = self.slots.take(size_class)
        if slot is None:
            self.slots.carve(size_class)
            slot = self.slots.take(size_class)
        assert slot is not None
        return slot

    def put(self, block_hash: BlockHash, parent: BlockHash | None = None) -> Block:
        self.queue.next_access()
        block = self.catalog.begin_part(PLAIN, block_hash, parent, 0)
        self.catalog.commit_part(block, 0, self.slot())
        return block

    def put_chain(self, hashes: list[BlockHash]) -> list[Block]:
        parents = [None, *hashes]
        return [self.put(h, p) for h, p in zip(hashes, parents, strict=False)]

    def victims(self) -> list[Block]:
        """Evict everything; return the order."""
        order = []
        while (block := self.queue.oldest_of_all(self.catalog.is_evictable)) is not None:
            order.append(block)
            for slot in self.catalog.drop_dram(block).slots:
                self.slots.give_back(slot)
        return order

    def check(self) -> None:
        self.catalog.check_integrity()
        self.queue.check_integrity()
        self.slots.check_integrity()


@pytest.fixture
def fixture() -> Fixture:
    return Fixture()


def row(block_hash: BlockHash, part: int = 0, offset: int = 0) -> SsdRow:
    return SsdRow(PLAIN.id, block_hash, part, None, 1, offset, 5000, 7)


def test_a_block_is_resident_only_when_all_its_parts_are(fixture: Fixture) -> None:
    block_hash = chain(TWO_PARTS.namespace, 1)[0]
    catalog = fixture.catalog
    block = catalog.begin_part(TWO_PARTS, block_hash, None, 0)
    catalog.begin_part(TWO_PARTS, block_hash, None, 1)
    catalog.commit_part(block, 0, fixture.slot(TWO_PARTS, 0))
    assert not block.in_dram
    assert catalog.drain_events() == []
    assert catalog.usable_prefix(TWO_PARTS, [block_hash]) == []
    catalog.commit_part(block, 1, fixture.slot(TWO_PARTS, 1))
    (told,) = catalog.drain_events()
    event = told.event
    assert told.hashes == [block_hash]
    assert isinstance(event, BlocksStored)
    assert event.tier is Tier.DRAM
    assert event.keys.tolist() == [index_key(block_hash)]
    fixture.check()


def test_an_aborted_block_leaves_nothing(fixture: Fixture) -> None:
    block_hash = chain(PLAIN.namespace, 1)[0]
    block = fixture.catalog.begin_part(PLAIN, block_hash, None, 0)
    fixture.catalog.abort_part(block, 0)
    assert fixture.catalog.blocks == {}
    assert fixture.catalog.drain_events() == []
    fixture.check()


def test_neighbouring_changes_become_one_event_and_keep_their_order(fixture: Fixture) -> None:
    blocks = fixture.put_chain(chain(PLAIN.namespace, 3))
    fixture.catalog.drop_dram(blocks[2])
    fixture.put(blocks[2].hash, blocks[1].hash)
    kinds = [(type(t.event), len(t.event.keys)) for t in fixture.catalog.drain_events()]  # type: ignore[union-attr]
    assert kinds == [(BlocksStored, 3), (BlocksRemoved, 1), (BlocksStored, 1)]


def test_another_namespace_does_not_see_the_block(fixture: Fixture) -> None:
    block = fixture.put(chain(PLAIN.namespace, 1)[0])
    assert fixture.catalog.find(TWO_PARTS, block.hash) is None
    assert fixture.catalog.usable_prefix(TWO_PARTS, [block.hash]) == []


def test_a_demoted_block_stays_resident_on_ssd(fixture: Fixture) -> None:
    block = fixture.put(chain(PLAIN.namespace, 1)[0])
    fixture.catalog.add_rows(block, [row(block.hash)])
    fixture.catalog.drop_dram(block)
    assert fixture.catalog.usable_prefix(PLAIN, [block.hash]) == [block]
    assert fixture.catalog.ledgers[Tier.DRAM].blocks == 0
    assert fixture.catalog.ledgers[Tier.SSD].blocks == 1
    fixture.check()
    assert fixture.catalog.drop_row(row(block.hash, offset=4096)).rows == []
    assert block.in_ssd, "a row that was replaced is not the block's"
    fixture.catalog.drop_row(row(block.hash))
    assert fixture.catalog.blocks == {}
    fixture.check()


def test_a_doomed_block_keeps_its_slots_until_the_last_pin_goes(fixture: Fixture) -> None:
    block = fixture.put(chain(PLAIN.namespace, 1)[0])
    slot = block.slots[0]
    fixture.catalog.pin(block)
    fixture.catalog.pin(block)
    assert fixture.catalog.doom(block).slots == []
    assert fixture.catalog.blocks == {}
    fixture.check()
    again = fixture.put(block.hash)
    assert again is not block
    assert again.slots[0] is not slot
    assert fixture.catalog.unpin([block]) == []
    assert fixture.catalog.unpin([block]) == [slot]
    fixture.check()


def test_children_go_before_their_parents_and_older_chains_first(fixture: Fixture) -> None:
    old = fixture.put_chain(chain(PLAIN.namespace, 3, seed=1))
    new = fixture.put_chain(chain(PLAIN.namespace, 3, seed=2))
    assert fixture.victims() == [*reversed(old), *reversed(new)]
    fixture.check()


def test_a_touched_chain_outlives_an_untouched_one(fixture: Fixture) -> None:
    old = fixture.put_chain(chain(PLAIN.namespace, 2, seed=1))
    new = fixture.put_chain(chain(PLAIN.namespace, 2, seed=2))
    fixture.queue.touch(old)
    assert fixture.victims() == [*reversed(new), *reversed(old)]


def test_a_pinned_leaf_keeps_its_whole_prefix(fixture: Fixture) -> None:
    blocks = fixture.put_chain(chain(PLAIN.namespace, 3))
    fixture.catalog.pin(blocks[2])
    assert fixture.victims() == []
    fixture.catalog.unpin([blocks[2]])
    assert fixture.victims() == blocks[::-1]


def test_a_pin_between_choice_and_eviction_is_seen(fixture: Fixture) -> None:
    block = fixture.put(chain(PLAIN.namespace, 1)[0])
    assert fixture.queue.oldest_of_all(fixture.catalog.is_evictable) is block
    fixture.catalog.pin(block)
    with pytest.raises(AssertionError):
        fixture.catalog.drop_dram(block)


def test_a_staged_child_keeps_its_parent(fixture: Fixture) -> None:
    first, second = chain(PLAIN.namespace, 2)
    fixture.put(first)
    child = fixture.catalog.begin_part(PLAIN, second, first, 0)
    assert fixture.victims() == []
    fixture.catalog.abort_part(child, 0)
    assert [b.hash for b in fixture.victims()] == [first]


def test_children_that_came_before_their_parent_count(fixture: Fixture) -> None:
    first, second = chain(PLAIN.namespace, 2)
    fixture.put(second, first)
    assert fixture.catalog.holes == 1
    fixture.put(first)
    assert [b.hash for b in fixture.victims()] == [second, first]


@pytest.mark.parametrize("length", [1, 2, 3, 20])
def test_a_ring_of_forged_parents_can_be_evicted(fixture: Fixture, length: int) -> None:
    hashes = chain(PLAIN.namespace, length)
    for number, block_hash in enumerate(hashes):
        fixture.put(block_hash, hashes[number - 1])
    fixture.check()
    assert {b.hash for b in fixture.victims()} == set(hashes)
    fixture.check()


def test_a_block_below_more_ancestors_than_are_asked_leans_on_nobody(fixture: Fixture) -> None:
    hashes = chain(PLAIN.namespace, 8)
    with mock.patch.object(catalog, "MAX_ANCESTORS_ASKED", 3):
        fixture.put(hashes[7], hashes[6])
        fixture.put_chain(hashes[:6])
        fixture.put(hashes[6], hashes[5])
    fixture.check()
    assert fixture.catalog.children(hashes[5]) == 0
    assert len(fixture.victims()) == 8
    fixture.check()


@pytest.mark.parametrize(
    ("hold", "is_movable"),
    [
        (lambda f, blocks: None, True),
        (lambda f, blocks: f.catalog.pin(blocks[0]), False),
        (lambda f, blocks: f.put(chain(PLAIN.namespace, 1, seed=9)[0], blocks[0].hash), True),
        (lambda f, blocks: f.slot(), False),
    ],
    ids=["free to go", "one pinned", "child in the same extent", "a slot being written"],
)
def test_an_extent_moves_only_when_all_in_it_can_go(
    fixture: Fixture, hold: Callable[[Fixture, list[Block]], object], is_movable: bool
) -> None:
    blocks = fixture.put_chain(chain(PLAIN.namespace, 3))
    hold(fixture, blocks)
    chosen = choose_extent(fixture.slots, TWO_PARTS.size_classes[0], fixture.catalog)
    assert (chosen is not None) == is_movable
    own = choose_extent(fixture.slots, PLAIN.size_classes[0], fixture.catalog)
    assert own is None, "an extent of the wanted class is not moved"


def test_a_doomed_block_without_all_its_parts_keeps_the_others_in_their_places(
    fixture: Fixture,
) -> None:
    hybrid = StoredNamespace.of(
        hybrid_namespace(
            Group(GroupKind.FULL, 1, 5000),
            Group(GroupKind.SLIDING_WINDOW, 1, 3000, window_tokens=8),
            Group(GroupKind.MAMBA, 1, 7000),
        )
    )
    block_hash = chain(hybrid.namespace, 1)[0]
    for part in (0, 2):
        block = fixture.catalog.begin_part(hybrid, block_hash, None, part)
        fixture.catalog.commit_part(block, part, fixture.slot(hybrid, part))
    before = list(block.slots)
    assert before[1] is None
    fixture.catalog.pin(block)
    assert fixture.catalog.doom(block).slots == []
    assert block.slots == before
    fixture.check()
    freed = fixture.catalog.unpin([block])
    assert freed == [before[0], before[2]]
    for slot in freed:
        fixture.slots.give_back(slot)
    fixture.check()
