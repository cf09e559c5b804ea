"""Blocks that sleep: which may, how they wake, and that sums and events know them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from emberkv_proto.hashing import index_keys
from emberkv_proto.layout import Group, GroupKind
from emberkv_proto.types import AcquirePolicy, BlockHash, SaltId, Tier
from store_daemon import operations
from store_daemon.block import StoredNamespace
from store_daemon.sleeping import FEW_HASHES, MOST_PARTS, SleepingBlocks
from store_daemon.tiers.row_table import RowTable
from store_daemon.tiers.segments import SsdRow, record_bytes
from tests.helpers.store import SmallStore, chain, hybrid_namespace, small_namespace

ONE = StoredNamespace.of(small_namespace())
TWO = StoredNamespace.of(small_namespace(groups=2, model="two"))
HYBRID = StoredNamespace.of(
    hybrid_namespace(Group(GroupKind.FULL, 1, 4096), Group(GroupKind.SLIDING_WINDOW, 1, 4096, 8))
)
HASHES = chain(ONE.namespace, 200)
SALT = SaltId(b"s" * 16)


def row(
    number: int,
    namespace: StoredNamespace = ONE,
    part: int = 0,
    block_hash: bytes | None = None,
    salt_id: SaltId | None = None,
) -> SsdRow:
    own = HASHES[number] if block_hash is None else BlockHash(block_hash)
    parent = HASHES[number - 1] if number else None
    place = 4096 * (1 + 3 * (number * 4 + part))
    return SsdRow(namespace.id, own, part, parent, 1, place, 5000, number, salt_id)


def asleep(rows: Sequence[SsdRow], *namespaces: StoredNamespace) -> SleepingBlocks:
    known = {namespace.id: namespace for namespace in namespaces or (ONE, TWO, HYBRID)}
    sleeping = SleepingBlocks(RowTable.of(rows), known)
    sleeping.check_integrity()
    return sleeping


@pytest.mark.parametrize("count", [1, FEW_HASHES, FEW_HASHES + 1, 150])
def test_blocks_wake_once_with_their_rows_and_only_those_asked_for(count: int) -> None:
    rows = [row(n) for n in range(160)]
    sleeping = asleep(rows[::-1])
    assert len(sleeping) == 160
    asked = [*HASHES[:count], *HASHES[160:190]]
    woken = sleeping.wake(asked)
    assert [found.rows for found in woken] == [[r] for r in rows[:count]]
    assert all(found.namespace is ONE for found in woken)
    assert sleeping.wake(asked) == []
    assert len(sleeping) == 160 - count
    assert set(sleeping) == set(HASHES[count:160])
    assert sorted(sleeping.keys()) == sorted(index_keys(HASHES[count:160]))
    sleeping.check_integrity()


@pytest.mark.parametrize("count", [10, 90])
def test_a_hash_named_twice_wakes_once(count: int) -> None:
    sleeping = asleep([row(n) for n in range(100)])
    woken = sleeping.wake([*HASHES[:count], *HASHES[:count]])
    assert [found.rows[0].block_hash for found in woken] == HASHES[:count]
    sleeping.check_integrity()


@pytest.mark.parametrize("count", [3, 60])
def test_a_block_of_several_parts_sleeps_and_wakes_whole(count: int) -> None:
    rows = [row(n, TWO, part) for part in (1, 0) for n in range(80)]
    sleeping = asleep(rows)
    assert len(sleeping) == 80
    woken = sleeping.wake(HASHES[:count])
    assert [{r.part for r in found.rows} for found in woken] == [{0, 1}] * count
    assert [{r.block_hash for r in found.rows} for found in woken] == [{h} for h in HASHES[:count]]
    sleeping.check_integrity()


def test_what_is_not_as_it_should_be_stays_awake() -> None:
    stranger = StoredNamespace.of(small_namespace(model="unknown here"))
    alike = HASHES[9][:8] + bytes(24)
    outside = [
        row(0, TWO, 0),  # part 1 is missing
        row(1, stranger),
        row(2, ONE, 7),  # no such part
        row(3, HYBRID, 1),  # only what may be missing
        row(9),  # two hashes that begin alike
        row(9, block_hash=alike),
        row(10, TWO, 0, salt_id=SALT),  # two tenants
        row(10, TWO, 1),
        row(11),  # two namespaces
        row(11, HYBRID, 0),
    ]
    whole = [row(20), row(21, TWO, 0), row(21, TWO, 1), row(22, HYBRID, 0)]
    sleeping = asleep([*outside, *whole])
    assert sorted(sleeping.outsiders()) == sorted(outside)
    assert set(sleeping) == {HASHES[20], HASHES[21], HASHES[22]}
    assert sleeping.wake([HASHES[9], BlockHash(alike), HASHES[0]]) == []


def test_a_block_of_too_many_parts_stays_awake() -> None:
    group = Group(GroupKind.FULL, 1, 4096)
    many = StoredNamespace.of(hybrid_namespace(group, shards=MOST_PARTS + 1))
    rows = [row(0, many, part) for part in range(many.parts)]
    sleeping = asleep(rows, many)
    assert len(sleeping) == 0
    assert len(sleeping.outsiders()) == len(rows)


def test_no_rows_and_no_namespaces_are_no_trouble() -> None:
    assert len(asleep([])) == 0
    assert asleep([]).wake(HASHES) == []
    lost = SleepingBlocks(RowTable.of([row(1)]), {})
    assert len(lost.outsiders()) == 1
    assert len(lost.keys()) == 0


def test_bytes_are_counted_for_each_tenant_also_where_their_ids_begin_alike() -> None:
    other = SaltId(SALT[:8] + b"t" * 8)
    rows = [row(0), row(1, salt_id=SALT), row(2, salt_id=SALT), row(3, salt_id=other)]
    sleeping = asleep(rows)
    size = record_bytes(5000)
    assert sleeping.bytes_by_salt() == {SALT: 2 * size, other: size}
    assert sleeping.of_salt(other, 9) == [HASHES[3]]
    sleeping.wake([HASHES[1], HASHES[3]])
    assert sleeping.bytes_by_salt() == {SALT: size}
    assert sleeping.of_salt(other, 9) == []


@pytest_asyncio.fixture
async def restarted(tmp_path: Path) -> AsyncIterator[SmallStore]:
    """20 blocks on SSD, of which the machine's reboot left none in DRAM."""
    before = SmallStore(tmp_path)
    session = before.open(ONE.namespace)
    before.put(session, HASHES[:20])
    await before.flush()
    await before.close()
    small = SmallStore(tmp_path, boot_id=b"after a reboot..")
    yield small
    if not small.is_closed:
        small.check_integrity()
        await small.close()


async def test_recovered_blocks_are_announced_and_hit_though_they_sleep(
    restarted: SmallStore,
) -> None:
    catalog = restarted.store.holdings.catalog
    assert catalog.blocks == {}
    assert restarted.book.resident[Tier.SSD] == set(index_keys(HASHES[:20]).tolist())
    restarted.check_integrity()
    session = restarted.open(ONE.namespace)
    assert restarted.store.probe(session, HASHES[:8]).hit_blocks == 8
    assert set(catalog.blocks) == set(HASHES[:8])
    lease = restarted.store.acquire(session, HASHES[:30], AcquirePolicy.WAIT_COMPLETE, 20.0)
    assert lease is not None
    while not lease.is_complete:
        lease = await restarted.store.wait(session, lease.id, lease.ready, 5.0)
    assert lease.ready == 20
    restarted.assert_readable(lease)
    assert catalog.sleeping is None
    restarted.check_integrity()


async def test_staging_a_block_that_sleeps_finds_it_present(restarted: SmallStore) -> None:
    session = restarted.open(ONE.namespace)
    assert restarted.put(session, HASHES[10:30], HASHES[9]) == 10
    restarted.check_integrity()


async def test_a_reclaimed_row_of_a_block_that_sleeps_is_announced_as_removed(
    restarted: SmallStore,
) -> None:
    assert restarted.ssd is not None
    gone = [r for r in restarted.ssd.recovered_rows() if r.block_hash in HASHES[:5]]
    restarted.ssd.forget(gone)
    restarted.store.holdings.drop_rows(gone)
    restarted.store.holdings.publish()
    left = set(index_keys(HASHES[5:20]).tolist())
    assert restarted.book.resident[Tier.SSD] == left
    assert np.isin(restarted.store.resident_keys(Tier.SSD), np.array(list(left), np.uint64)).all()
    restarted.check_integrity()


async def test_clearing_the_ssd_reaches_blocks_that_sleep(restarted: SmallStore) -> None:
    cleared = await restarted.store.operations.clear(Tier.SSD, None)
    assert cleared.evicted_blocks == 20
    assert restarted.book.resident[Tier.SSD] == set()


async def test_others_run_while_an_operator_has_all_blocks_woken(
    restarted: SmallStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "TURN_BLOCKS", 4)
    catalog = restarted.store.holdings.catalog
    clearing = asyncio.create_task(restarted.store.operations.clear(Tier.SSD, None))
    seen = []
    while catalog.sleeping is not None:
        seen.append(len(catalog.sleeping))
        await asyncio.sleep(0)
    assert seen == [20, 16, 12, 8, 4]
    assert (await clearing).evicted_blocks == 20
    restarted.check_integrity()
