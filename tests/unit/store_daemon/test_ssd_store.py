"""The store over the SSD tier's own doings: lost and returned drives, moves, scrub, byte rate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest_asyncio

from emberkv_proto.types import Tier
from store_daemon import scrubbing
from store_daemon.config import SsdSection
from store_daemon.sessions import Session
from store_daemon.ssd_changes import follow
from store_daemon.tiers.changes import Moved, TierChanges
from tests.helpers.store import SmallStore, chain, small_namespace

NAMESPACE = small_namespace()
HASHES = chain(NAMESPACE, 12)
Make = Callable[..., SmallStore]


@pytest_asyncio.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[SmallStore] = []

    def build(**options: object) -> SmallStore:
        config = {
            "capacity_bytes": 8 * 65536,
            "segment_bytes": 65536,
            "direct_io": False,
            "io_threads": 2,
            **options,
        }
        if "paths" not in config:
            config["path"] = tmp_path / "ssd"
        made.append(SmallStore(tmp_path, ssd=SsdSection(**config)))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for small in made:
        if not small.is_closed:
            small.check_integrity()
            await small.close()


def two_drives(make: Make, tmp_path: Path) -> SmallStore:
    return make(paths=(tmp_path / "a", tmp_path / "b"))


async def stored(small: SmallStore) -> Session:
    session = small.open(NAMESPACE)
    assert small.put(session, HASHES) == len(HASHES)
    await small.flush()
    return session


def evict_all(small: SmallStore) -> None:
    holdings = small.store.holdings
    while (victim := holdings.queue.oldest_of_all(holdings.catalog.is_evictable)) is not None:
        holdings.evict(victim)
    holdings.publish()


async def look_after(small: SmallStore) -> None:
    """What the tick and the writeback task do about drives."""
    assert small.store.writeback is not None
    await small.store.writeback.write_batch()


def resident(small: SmallStore, tier: Tier) -> int:
    return len(small.book.resident[tier])


def lose_drive(small: SmallStore, path: Path) -> int:
    """Take the directory away and let the tier notice; how many blocks are on it."""
    assert small.ssd is not None
    rows = [row for row in small.ssd.recovered_rows() if small.ssd.segment_path(row).parent == path]
    path.rename(path.with_name("away"))
    path.mkdir()
    small.ssd._drives[0].is_doubted = small.ssd._drives[1].is_doubted = True
    return len(rows)


async def test_a_lost_drives_blocks_are_announced_as_removed_and_its_return_as_stored(
    make: Make, tmp_path: Path
) -> None:
    small = two_drives(make, tmp_path)
    assert small.ssd is not None
    await stored(small)
    evict_all(small)
    assert resident(small, Tier.SSD) == 12
    lost = lose_drive(small, tmp_path / "a")
    assert 0 < lost < 12
    await look_after(small)
    assert resident(small, Tier.SSD) == 12 - lost
    assert small.store.tier_states()[1].state.startswith(f"degraded: {tmp_path / 'a'}: ")
    small.check_integrity()

    (tmp_path / "a").rmdir()
    (tmp_path / "away").rename(tmp_path / "a")
    small.clock.now += 60
    await look_after(small)
    assert resident(small, Tier.SSD) == 12
    assert small.store.tier_states()[1].state == "ok"
    small.check_integrity()


async def test_blocks_of_a_lost_drive_that_dram_has_are_written_to_the_others(
    make: Make, tmp_path: Path
) -> None:
    small = two_drives(make, tmp_path)
    assert small.ssd is not None
    await stored(small)
    lost = lose_drive(small, tmp_path / "a")
    await look_after(small)
    assert small.store.writeback is not None
    assert len(small.store.writeback) == lost
    await small.flush()
    assert resident(small, Tier.SSD) == 12
    assert {small.ssd.segment_path(row).parent.name for row in small.ssd.recovered_rows()} == {"b"}
    (tmp_path / "a").rmdir()
    (tmp_path / "away").rename(tmp_path / "a")
    small.clock.now += 60
    await look_after(small)  # what it brings is there already
    await small.flush()
    assert resident(small, Tier.SSD) == 12


async def test_a_block_used_in_dram_keeps_its_copy_when_its_segment_is_reclaimed(
    make: Make,
) -> None:
    small = make(capacity_bytes=3 * 65536)
    assert small.ssd is not None
    session = await stored(small)
    used = small.store.holdings.catalog.blocks[HASHES[0]]
    used.uses = 1
    first = used.rows[0]
    assert first is not None
    other = chain(NAMESPACE, 80, seed=1)
    for start in range(0, 80, 8):
        small.put(session, other[start : start + 8], other[start - 1] if start else None)
        await small.flush()
        if used.rows[0] != first:
            break
    assert used.in_ssd
    assert used.rows[0] is not None
    assert used.rows[0].segment > first.segment
    assert small.ssd.holds(used.rows[0])
    assert small.ssd.reappended_records >= 1


async def test_scrub_drops_bad_records_before_a_reader_meets_them(make: Make) -> None:
    small = make()
    assert small.ssd is not None
    assert small.store.scrubbing is not None
    await stored(small)
    evict_all(small)
    blocks = small.store.holdings.catalog.blocks
    bad = [blocks[HASHES[number]].rows[0] for number in (2, 7)]
    for row in bad:
        assert row is not None
        with small.ssd.segment_path(row).open("r+b") as file:
            file.seek(row.offset + 4096)
            file.write(b"\xff\xfe\xfd")
    while not (await small.store.scrubbing.step()).is_end:
        pass
    counters = small.store.holdings.counters
    assert (counters["scrub_corrupt"], counters["scrubbed_records"]) == (2, 12)
    assert counters["scrub_passes"] == 1
    assert resident(small, Tier.SSD) == 10
    assert HASHES[2] not in blocks
    assert small.store.holdings.rows_to_forget == bad
    await small.flush()
    assert small.ssd.live_records == 10


async def test_scrub_drops_a_bad_record_of_a_block_that_sleeps(make: Make, tmp_path: Path) -> None:
    small = make()
    await stored(small)
    await small.close()
    (tmp_path / "pool").unlink()
    small = make()
    catalog = small.store.holdings.catalog
    assert small.ssd is not None
    assert small.store.scrubbing is not None
    assert catalog.sleeping is not None
    assert len(catalog.sleeping) == len(HASHES)
    row = catalog.sleeping.rows()[0]
    path = small.ssd.segment_path(row)
    content = bytearray(path.read_bytes())
    content[row.offset + 4096] ^= 1
    path.write_bytes(content)
    await small.store.scrubbing.step()
    assert small.store.holdings.counters["scrub_corrupt"] == 1
    assert small.store.holdings.blocks_of(Tier.SSD) == len(HASHES) - 1
    assert row.block_hash not in catalog.sleeping
    small.check_integrity()


async def test_a_record_that_moved_and_went_in_one_step_is_not_named(make: Make) -> None:
    small = make()
    await stored(small)
    holdings = small.store.holdings
    block = holdings.catalog.blocks[HASHES[0]]
    old = block.rows[0]
    assert old is not None
    new = old._replace(segment=old.segment + 1)
    follow(holdings, TierChanges(moved=[Moved(old, new)], gone=[new]))
    assert not block.in_ssd
    assert block.rows == [None]
    holdings.publish()
    holdings.rows_to_forget.append(old)
    small.check_integrity()


async def test_a_bad_record_whose_block_is_in_dram_is_written_anew(make: Make) -> None:
    small = make()
    assert small.ssd is not None
    assert small.store.scrubbing is not None
    await stored(small)
    row = small.store.holdings.catalog.blocks[HASHES[4]].rows[0]
    assert row is not None
    with small.ssd.segment_path(row).open("r+b") as file:
        file.seek(row.offset + 4096)
        file.write(b"\xff\xfe\xfd")
    while not (await small.store.scrubbing.step()).is_end:
        pass
    assert resident(small, Tier.SSD) == 11
    await small.flush()
    assert resident(small, Tier.SSD) == 12
    while not (await small.store.scrubbing.step()).is_end:
        pass
    assert small.store.holdings.counters["scrub_corrupt"] == 1


async def test_scrub_on_demand_says_how_much_and_how_long_and_runs_once(make: Make) -> None:
    small = make(scrub_bytes_per_second=0)
    assert small.ssd is not None
    scrub = small.store.scrubbing
    assert scrub is not None
    await stored(small)
    assert scrub._rest_seconds() > 0
    plan = scrub.scrub_now()
    assert plan.records == 12
    assert plan.expected_seconds == small.ssd.live_bytes / scrubbing.ASKED_BYTES_PER_SECOND
    assert scrub.is_asked
    task = asyncio.get_running_loop().create_task(scrub.run())
    for _ in range(2000):
        if small.store.holdings.counters["scrub_passes"]:
            break
        await asyncio.sleep(0.01)
    assert not scrub.is_asked
    assert scrub._rest_seconds() > 0
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert small.store.holdings.counters["scrubbed_records"] == 12


async def test_background_scrub_keeps_its_rate_and_rests_between_passes(make: Make) -> None:
    small = make(scrub_bytes_per_second=1000)
    assert small.ssd is not None
    scrub = small.store.scrubbing
    assert scrub is not None
    await stored(small)
    assert scrub._rest_seconds() == scrubbing.FIRST_PASS_SECONDS
    small.clock.now += scrubbing.FIRST_PASS_SECONDS
    assert scrub._rest_seconds() == 0
    done = await scrub.step()
    assert done.read_bytes == small.ssd.live_bytes
    assert done.is_end
    assert scrub._rest_seconds() == scrubbing.PASS_SECONDS
    scrub.set_rate(0)
    small.clock.now += 2 * scrubbing.PASS_SECONDS
    assert scrub._rest_seconds() > 0
    scrub.set_rate(1000)
    scrub.scrub_now()
    await scrub.step()
    scrub.scrub_now()
    assert scrub._rest_seconds() > (small.ssd.live_bytes - 2000) / 1000


async def test_over_the_byte_rate_the_queue_waits_and_stages_go_on(make: Make) -> None:
    small = make(write_bytes_per_second=40_000)
    assert small.ssd is not None
    writeback = small.store.writeback
    assert writeback is not None
    session = small.open(NAMESPACE)
    small.put(session, HASHES)
    await writeback.write_batch()
    assert len(writeback) == 7, "one second's worth at a time"
    assert small.ssd.write_delay_seconds > 0
    before = small.ssd.bytes_written
    await writeback.write_batch()
    assert len(writeback) == 7
    assert small.ssd.bytes_written == before
    assert small.put(session, chain(NAMESPACE, 3, seed=1)) == 3
    while len(writeback):
        small.clock.now += small.ssd.write_delay_seconds
        await writeback.write_batch()
    assert resident(small, Tier.SSD) == 15
    assert small.ssd.bytes_written > 40_000


async def test_what_waits_for_the_byte_rate_may_be_evicted(make: Make) -> None:
    small = make(write_bytes_per_second=1, writeback="on_evict")
    assert small.ssd is not None
    assert small.store.writeback is not None
    small.ssd._writer.budget.spend(1000, small.clock.now)
    session = small.open(NAMESPACE)
    for seed in range(1, 12):
        assert small.put(session, chain(NAMESPACE, 6, seed=seed)) == 6
    assert small.store.holdings.counters["evicted_blocks"] > 0
    assert small.ssd.appended_records == 0


async def test_what_waits_for_the_byte_rate_is_written_when_the_store_closes(make: Make) -> None:
    small = make(write_bytes_per_second=1)
    assert small.ssd is not None
    session = small.open(NAMESPACE)
    small.store.start()
    small.put(session, HASHES)
    await small.close()
    assert small.store.holdings.counters["writeback_blocks"] == 12
