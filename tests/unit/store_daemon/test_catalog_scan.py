"""The catalog's keys gathered a few at a time while blocks come, wake and go."""

from __future__ import annotations

import random

import pytest

from emberkv_proto.buckets import BUCKETS, bucket_numbers
from emberkv_proto.types import BucketChoice, Tier
from store_daemon import catalog as catalog_module
from store_daemon.block import StoredNamespace
from store_daemon.bucket_scan import BucketScan
from store_daemon.catalog import BlockCatalog
from store_daemon.sleeping import SleepingBlocks
from store_daemon.tiers.row_table import RowTable
from store_daemon.tiers.segments import SsdRow
from tests.helpers.store import chain, small_namespace

ONE = StoredNamespace.of(small_namespace())
HASHES = chain(ONE.namespace, 120)
ALL = tuple(range(BUCKETS))


def row(number: int) -> SsdRow:
    parent = HASHES[number - 1] if number else None
    return SsdRow(ONE.id, HASHES[number], 0, parent, 1, 4096 * (1 + 3 * number), 5000, number)


@pytest.mark.parametrize("seed", range(40))
def test_scan_beside_waking_and_vanishing_blocks_ends_with_what_is_resident(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_module, "SCAN_BLOCKS", 9)
    choose = random.Random(seed)
    catalog = BlockCatalog(lambda block: None)
    recovered = choose.sample(range(120), 80)
    catalog.sleeping = SleepingBlocks(RowTable.of([row(n) for n in recovered]), {ONE.id: ONE})
    scan = BucketScan(
        [BucketChoice(Tier.SSD, ALL), BucketChoice(Tier.DRAM, ALL)], catalog.scan_keys
    )
    present = set(recovered)

    def change() -> None:
        number = choose.randrange(120)
        if number in present:
            block = catalog.find(ONE, HASHES[number])  # wakes it
            assert block is not None
            if choose.random() < 0.6:
                catalog.drop_ssd(block)
                present.discard(number)
        else:
            parent = HASHES[number - 1] if number else None
            block = catalog.begin_part(ONE, HASHES[number], parent, 0)
            catalog.add_rows(block, [row(number)])
            catalog.abort_part(block, 0)
            present.add(number)
        for told in catalog.drain_events():  # before the loop turns, as the daemon does
            scan.enter(told.event)

    while scan.step():
        for _ in range(choose.randint(0, 6)):
            change()
    truth = catalog.resident_keys(Tier.SSD)
    assert truth.size == len(present)
    numbers = bucket_numbers(truth)
    for bucket in ALL:
        assert scan.keys(Tier.SSD, bucket).tolist() == sorted(truth[numbers == bucket].tolist())
        assert scan.keys(Tier.DRAM, bucket).size == 0
