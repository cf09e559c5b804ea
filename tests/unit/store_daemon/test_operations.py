from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from emberkv_proto.errors import InvalidRequestError, UnknownNamespaceError
from emberkv_proto.types import AcquirePolicy, BlockHash, NamespaceId, SaltId, StageState, Tier
from store_daemon.operations import Evicted, Pinned
from store_daemon.tenants import Quota, TenantUsage
from tests.helpers.store import SmallStore, chain, small_namespace

SPACE = small_namespace(5000)
SLOT = 8192
RECORD = 8192 + 4096
CAPACITY = 6 * 65536
ANN, BEN = SaltId(b"a" * 16), SaltId(b"b" * 16)


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[SmallStore]:
    small = SmallStore(tmp_path)
    yield small
    small.check_integrity()
    await small.close()


def resident(small: SmallStore, hashes: list[BlockHash]) -> list[tuple[bool, bool]]:
    blocks = [small.store.holdings.catalog.blocks.get(h) for h in hashes]
    return [(False, False) if b is None else (b.in_dram, b.in_ssd) for b in blocks]


def in_dram(small: SmallStore, hashes: list[BlockHash]) -> list[bool]:
    return [is_in_dram for is_in_dram, _ in resident(small, hashes)]


async def fill(small: SmallStore) -> None:
    """Stage and commit strangers' blocks until twice the pool has gone through it."""
    session = small.open(SPACE)
    for seed in range(100, 112):
        small.put(session, chain(SPACE, 7, seed))
        await small.flush()
        small.check_integrity()


async def test_a_soft_pin_keeps_a_chain_in_dram_until_its_time_is_over(small: SmallStore) -> None:
    hashes = chain(SPACE, 4)
    small.put(small.open(SPACE), hashes)
    pinned = small.store.operations.pin(SPACE.id, [*hashes, *chain(SPACE, 1, 9)], 30.0)
    assert pinned == Pinned(4, 0, CAPACITY // 2)
    await fill(small)
    assert in_dram(small, hashes) == [True] * 4
    small.clock.now += 30.0
    small.store.tick()
    await fill(small)
    assert in_dram(small, hashes) == [False] * 4


async def test_hard_pins_stop_at_the_limit_and_last_until_unpinned(small: SmallStore) -> None:
    session = small.open(SPACE)
    hashes = chain(SPACE, 30)
    small.put(session, hashes)
    fit = CAPACITY // 2 // SLOT
    pinned = small.store.operations.pin(SPACE.id, hashes, None)
    assert pinned == Pinned(fit, fit * SLOT, CAPACITY // 2) == Pinned(24, 196608, 196608)
    assert small.store.holdings.counters["refused_pins"] == 6
    small.clock.now += 1e9
    small.store.tick()
    await fill(small)
    assert in_dram(small, hashes[:24]) == [True] * 24
    assert in_dram(small, hashes[24:]) == [False] * 6
    assert small.store.operations.unpin(SPACE.id, hashes[20:]) == 4
    assert small.store.operations.unpin(SPACE.id) == 20
    assert small.store.operations.unpin(None) == 0
    await fill(small)
    assert in_dram(small, hashes) == [False] * 30


async def test_hard_pins_outlive_a_restart_and_soft_ones_do_not(tmp_path: Path) -> None:
    small = SmallStore(tmp_path)
    hashes, soft = chain(SPACE, 3), chain(SPACE, 2, 1)
    small.put(small.open(SPACE), hashes)
    small.put(small.open(SPACE), soft)
    operations = small.store.operations
    operations.pin(SPACE.id, hashes, None)
    operations.pin(SPACE.id, soft, 1000.0)
    assert operations.unpin(SPACE.id, hashes[2:]) == 1
    await small.close()

    again = SmallStore(tmp_path)
    again.check_integrity()
    pins = again.store.holdings.pins
    assert set(pins.hard) == set(hashes[:2])
    assert (pins.hard_bytes, len(pins.soft)) == (2 * SLOT, 0)
    await again.close()


async def test_a_hard_pin_ends_with_a_block_whose_bytes_are_wrong(tmp_path: Path) -> None:
    small = SmallStore(tmp_path)
    hashes = chain(SPACE, 2)
    small.put(small.open(SPACE), hashes)
    small.store.operations.pin(SPACE.id, hashes, None)
    holdings = small.store.holdings
    holdings.quarantine(holdings.catalog.blocks[hashes[1]])
    holdings.publish()
    small.check_integrity()
    assert (holdings.pins.hard_bytes, holdings.lost_pins) == (SLOT, [(SPACE.id, hashes[1])])
    small.store.tick()
    assert holdings.lost_pins == []
    small.put(small.open(SPACE), hashes)
    await small.close()
    again = SmallStore(tmp_path)
    assert set(again.store.holdings.pins.hard) == {hashes[0]}
    await again.close()


async def test_what_cannot_be_pinned_says_why(small: SmallStore) -> None:
    operations = small.store.operations
    with pytest.raises(UnknownNamespaceError, match="is not known here"):
        operations.pin(NamespaceId(bytes(16)), chain(SPACE, 1), None)
    small.put(small.open(SPACE), chain(SPACE, 1))
    for seconds in (0.0, -1.0, float("nan"), float("inf"), 604800.1):
        with pytest.raises(InvalidRequestError, match="soft pin"):
            operations.pin(SPACE.id, chain(SPACE, 1), seconds)
    with pytest.raises(InvalidRequestError, match="without the namespace"):
        operations.unpin(None, chain(SPACE, 1))
    assert operations.pin(SPACE.id, chain(SPACE, 1, 5), None) == Pinned(0, 0, CAPACITY // 2)


async def test_evict_takes_a_chain_out_of_dram_and_keeps_what_is_held(small: SmallStore) -> None:
    hashes, held = chain(SPACE, 4), chain(SPACE, 3, 1)
    session = small.open(SPACE)
    small.put(session, hashes)
    small.put(session, held)
    await small.flush()
    small.store.operations.pin(SPACE.id, held, 10.0)
    operations = small.store.operations
    answer = await operations.evict(Tier.DRAM, SPACE.id, [*hashes, *chain(SPACE, 1, 7)])
    assert answer == Evicted(4, 4 * SLOT, 0)
    assert resident(small, hashes) == [(False, True)] * 4
    assert await operations.evict(Tier.DRAM, SPACE.id, held) == Evicted(0, 0, 3)
    assert await operations.evict(Tier.SSD, SPACE.id, held) == Evicted(0, 0, 3)
    assert await operations.evict(Tier.SSD, SPACE.id, hashes) == Evicted(4, 4 * RECORD, 0)
    assert resident(small, hashes) == [(False, False)] * 4
    with pytest.raises(InvalidRequestError, match="HBM is not kept here"):
        await operations.evict(Tier.HBM, SPACE.id, hashes)


async def test_evicting_the_head_of_a_chain_keeps_it_for_its_children(small: SmallStore) -> None:
    hashes = chain(SPACE, 4)
    small.put(small.open(SPACE), hashes)
    answer = await small.store.operations.evict(Tier.DRAM, SPACE.id, hashes[:2])
    assert answer == Evicted(0, 0, 2)


async def test_evict_by_bytes_takes_the_least_recently_used(small: SmallStore) -> None:
    old, new = chain(SPACE, 3, 1), chain(SPACE, 3, 2)
    session = small.open(SPACE)
    small.put(session, old)
    small.put(session, new)
    await small.flush()
    operations = small.store.operations
    answer = await operations.evict_bytes(Tier.DRAM, None, 2 * SLOT + 1)
    assert answer == Evicted(3, 3 * SLOT, 0)
    assert resident(small, old + new) == [(False, True)] * 3 + [(True, True)] * 3
    answer = await operations.evict_bytes(Tier.SSD, SPACE.id, 4 * RECORD)
    assert answer == Evicted(4, 4 * RECORD, 0)
    assert resident(small, old) == [(False, False)] * 3
    assert resident(small, new) == [(True, True), (True, True), (True, False)]
    operations.pin(SPACE.id, new[:1], None)
    answer = await operations.evict_bytes(Tier.DRAM, SPACE.id, 10 * SLOT)
    assert answer == Evicted(2, 2 * SLOT, 1)
    with pytest.raises(InvalidRequestError, match="0 bytes"):
        await operations.evict_bytes(Tier.DRAM, None, 0)


async def test_clear_empties_both_tiers_but_for_hard_pins_and_what_is_read(
    small: SmallStore,
) -> None:
    hard, soft, other = chain(SPACE, 2, 1), chain(SPACE, 3, 2), chain(SPACE, 4, 3)
    session = small.open(SPACE)
    for hashes in (hard, soft, other):
        small.put(session, hashes)
    await small.flush()
    operations = small.store.operations
    operations.pin(SPACE.id, hard, None)
    operations.pin(SPACE.id, soft, 100.0)
    writing = small.store.stage(session, chain(SPACE, 1, 4), None)
    answer = await operations.clear(None, None)
    assert answer == Evicted(14, 7 * (SLOT + RECORD), 4)
    assert resident(small, hard) == [(True, True)] * 2
    assert resident(small, soft + other) == [(False, False)] * 7
    assert writing.states == bytes([StageState.GRANTED])
    await small.flush()
    assert small.ssd is not None
    assert len(small.ssd.recovered_rows()) == 2


async def test_clear_of_one_namespace_leaves_the_others(small: SmallStore) -> None:
    wide = small_namespace(9000, model="wide")
    mine, theirs = chain(SPACE, 2), chain(wide, 2)
    small.put(small.open(SPACE), mine)
    small.put(small.open(wide), theirs)
    answer = await small.store.operations.clear(Tier.DRAM, wide.id)
    assert answer == Evicted(2, 2 * 12288, 0)
    assert resident(small, mine + theirs) == [(True, False)] * 2 + [(False, False)] * 2


async def test_a_tenant_at_its_quota_evicts_its_own_blocks_and_nobody_elses(
    small: SmallStore,
) -> None:
    operations, session = small.store.operations, small.open(SPACE)
    operations.set_quota(ANN, Quota(dram_bytes=4 * SLOT))
    others, first, second = chain(SPACE, 3), chain(SPACE, 3, 1), chain(SPACE, 3, 2)
    small.put(session, others)
    for hashes in (first, second):
        staged = small.store.stage(session, hashes, None, ANN)
        assert staged.states == bytes([StageState.GRANTED] * 3)
        small.store.abort(session, staged.stage_id)
        small.put(session, hashes, salt_id=ANN)
        small.check_integrity()
    assert resident(small, first) == [(True, False), (False, False), (False, False)]
    assert resident(small, second + others) == [(True, False)] * 6
    assert operations.usage() == (TenantUsage(ANN, 4 * SLOT, 0, Quota(dram_bytes=4 * SLOT), 2),)
    assert small.store.holdings.counters["over_quota_blocks"] == 2


async def test_a_tenant_whose_blocks_are_all_held_gets_no_space_and_others_do_not_suffer(
    small: SmallStore,
) -> None:
    operations, session = small.store.operations, small.open(SPACE)
    operations.set_quota(ANN, Quota(dram_bytes=2 * SLOT))
    held = chain(SPACE, 2, 1)
    small.put(session, held, salt_id=ANN)
    operations.pin(SPACE.id, held, None)
    staged = small.store.stage(session, chain(SPACE, 2, 2), None, ANN)
    assert (staged.stage_id, staged.states) == (0, bytes([StageState.NO_SPACE] * 2))
    assert small.store.holdings.counters["over_quota_refused"] == 1
    staged = small.store.stage(session, chain(SPACE, 2, 3), None, BEN)
    assert staged.states == bytes([StageState.GRANTED] * 2)
    assert [u.dram_bytes for u in operations.usage()] == [2 * SLOT, 2 * SLOT]


async def test_who_is_over_a_lowered_quota_goes_first_when_room_is_needed(
    small: SmallStore,
) -> None:
    operations, session = small.store.operations, small.open(SPACE)
    old, rich = chain(SPACE, 10), chain(SPACE, 20, 1)
    small.put(session, old)
    small.put(session, rich, salt_id=ANN)
    await small.flush()
    operations.set_quota(ANN, Quota(dram_bytes=15 * SLOT))
    usage = operations.usage()[0]
    assert (usage.dram_bytes, usage.evicted_blocks) == (20 * SLOT, 0)
    slots = CAPACITY // 65536 * 7
    small.put(session, chain(SPACE, slots - 30 + 3, 2))
    assert in_dram(small, old) == [True] * 10
    usage = operations.usage()[0]
    assert (usage.dram_bytes, usage.evicted_blocks) == (17 * SLOT, 3)
    small.put(session, chain(SPACE, 4, 3))
    usage = operations.usage()[0]
    assert (usage.dram_bytes, usage.evicted_blocks) == (15 * SLOT, 5)
    assert in_dram(small, old) == [True] * 8 + [False] * 2


async def test_usage_in_both_tiers_is_the_same_after_a_restart(tmp_path: Path) -> None:
    small = SmallStore(tmp_path)
    session = small.open(SPACE)
    anns, bens, nobodys = chain(SPACE, 5, 1), chain(SPACE, 2, 2), chain(SPACE, 3, 3)
    small.put(session, anns[:3], salt_id=ANN)
    small.put(session, bens, salt_id=BEN)
    await small.flush()
    small.put(session, anns[3:], anns[2], salt_id=ANN)
    small.put(session, nobodys)
    usage = small.store.operations.usage()
    assert [(u.dram_bytes, u.ssd_bytes) for u in usage] == [
        (5 * SLOT, 3 * RECORD),
        (2 * SLOT, 2 * RECORD),
    ]
    await small.store.operations.evict(Tier.DRAM, SPACE.id, bens)
    small.check_integrity()
    image = small.settings.dram.path.read_bytes()
    await small.close()
    small.settings.dram.path.write_bytes(image)

    again = SmallStore(tmp_path)
    again.check_integrity()
    assert [(u.salt_id, u.dram_bytes) for u in again.store.operations.usage()] == [
        (ANN, 5 * SLOT),
        (BEN, 0),
    ]
    assert again.store.operations.usage()[1].ssd_bytes == 2 * RECORD
    await again.close()


async def test_a_block_found_wrong_while_it_is_read_is_not_there_after_a_kill(
    tmp_path: Path,
) -> None:
    small = SmallStore(tmp_path)
    session, hashes = small.open(SPACE), chain(SPACE, 3)
    small.put(session, hashes)
    lease = small.store.acquire(session, hashes, AcquirePolicy.BEST_EFFORT, 1.0)
    assert lease is not None
    holdings = small.store.holdings
    holdings.quarantine(holdings.catalog.blocks[hashes[2]])
    holdings.publish()
    small.check_integrity()
    small.assert_readable(lease)  # the reader's slots are nobody else's yet
    image = small.settings.dram.path.read_bytes()
    await small.close()
    small.settings.dram.path.write_bytes(image)

    again = SmallStore(tmp_path)
    again.check_integrity()
    assert in_dram(again, hashes) == [True, True, False]
    await again.close()


async def test_a_block_that_comes_from_a_peer_counts_against_its_tenant(
    small: SmallStore, tmp_path_factory: pytest.TempPathFactory
) -> None:
    hashes = chain(SPACE, 3)
    small.put(small.open(SPACE), hashes[:1])
    small.put(small.open(SPACE), hashes[1:], hashes[0], ANN)
    grant = await small.store.peer_acquire(SPACE.id, hashes, 1.0, "node-2")
    assert grant.salt_ids == (None, ANN, ANN)
    small.store.peer_release(grant.lease_id)

    there = SmallStore(tmp_path_factory.mktemp("there"))
    there.store.operations.set_quota(ANN, Quota(dram_bytes=SLOT))
    room = there.store.replica_arrivals.allot(SPACE, None, hashes, grant.salt_ids)
    assert len(room.ranges) == 2
    assert there.store.holdings.counters["no_space_pulls"] == 1
    there.check_integrity()
    assert [(u.salt_id, u.dram_bytes) for u in there.store.operations.usage()] == [(ANN, SLOT)]
    room.close()
    there.check_integrity()
    assert there.store.operations.usage()[0].dram_bytes == 0
    await there.close()


async def test_a_tenant_finds_each_of_its_many_victims(tmp_path: Path) -> None:
    small = SmallStore(tmp_path, extents=24)
    session = small.open(SPACE)
    for seed in range(140):
        assert small.put(session, chain(SPACE, 1, seed), salt_id=ANN) == 1
        small.check_integrity()
    await small.close()


async def test_a_pin_laid_anew_on_a_block_that_was_lost_outlives_a_restart(tmp_path: Path) -> None:
    small = SmallStore(tmp_path)
    session, hashes = small.open(SPACE), chain(SPACE, 3)
    small.put(session, hashes)
    small.store.operations.pin(SPACE.id, hashes, None)
    small.store.holdings.quarantine(small.store.holdings.catalog.blocks[hashes[2]])
    assert small.put(session, hashes) == 1
    small.store.operations.pin(SPACE.id, hashes, None)
    small.store.tick()
    small.check_integrity()
    await small.close()
    small = SmallStore(tmp_path)
    assert set(small.store.holdings.pins.hard) == set(hashes)
    small.check_integrity()
    await small.close()
