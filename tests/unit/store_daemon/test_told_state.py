"""What the store says of itself is what its events have said, also while blocks are landing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from emberkv_proto.hashing import checksum
from emberkv_proto.types import BlockHash, Tier
from store_daemon import catalog
from store_daemon.staged_run import StagedRun
from tests.helpers.peer_doubles import xor_of
from tests.helpers.store import SmallStore, chain, payload, small_namespace

SPACE = small_namespace()
HASHES = chain(SPACE, 6)


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[SmallStore]:
    store = SmallStore(tmp_path, ssd_segments=0)
    yield store
    store.check_integrity()
    await store.close()


def land(small: SmallStore, room: StagedRun, hashes: Sequence[BlockHash], number: int) -> None:
    """As a pull does between two announcements."""
    places = room.ranges[number]
    contents = [payload(hashes[number], part, place.length) for part, place in enumerate(places)]
    with small.pool.view() as view:
        for place, content in zip(places, contents, strict=True):
            view[place.offset : place.offset + place.length] = content
    room.land(number, [checksum(content) for content in contents])


async def test_digests_and_rows_are_those_of_the_events(small: SmallStore) -> None:
    room = small.store.arrivals.allot(SPACE, None, HASHES)
    told = small.book.resident[Tier.DRAM]
    land(small, room, HASHES, 0)
    (digest,) = (d for d in small.store.digests() if d.tier is Tier.DRAM)
    assert (digest.blocks, digest.xor) == (1, xor_of(told))
    land(small, room, HASHES, 1)
    assert set(small.store.resident_keys(Tier.DRAM).tolist()) == told
    assert len(told) == 2
    room.close()


async def test_rows_that_are_scanned_while_blocks_land_are_told_before(
    small: SmallStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "SCAN_BLOCKS", 2)
    room = small.store.arrivals.allot(SPACE, None, HASHES)
    for number in range(2):
        land(small, room, HASHES, number)
    found: set[int] = set()
    for number, keys in enumerate(small.store.scan_keys(Tier.DRAM), start=2):
        found |= set(keys.tolist())
        assert found <= small.book.resident[Tier.DRAM]
        land(small, room, HASHES, number)
    assert len(found) > 2, "no block was seen that landed in mid-scan"
    room.close()
