"""Bucket sums by events, and bucket contents gathered while blocks come and go."""

from __future__ import annotations

import random

import numpy as np
import pytest

from emberkv_proto.buckets import BUCKETS, bucket_numbers
from emberkv_proto.events import BlocksRemoved, BlocksStored, Event, TierCleared
from emberkv_proto.types import BucketChoice, Tier
from store_daemon.bucket_ledger import FOLD_EVENTS, BucketLedger
from store_daemon.bucket_scan import BucketScan
from tests.helpers.peer_doubles import MemoryResidency, as_keys

UNIVERSE = np.random.default_rng(1).integers(1, 2**64, 400, np.uint64).tolist()


class Sinks:
    """Gives each event to all."""

    def __init__(self, *sinks: BucketLedger | BucketScan) -> None:
        self.sinks = [*sinks]

    def emit(self, event: Event) -> None:
        for sink in self.sinks:
            sink.enter(event)


def change(residency: MemoryResidency, choose: random.Random) -> None:
    tier = choose.choice((Tier.DRAM, Tier.SSD))
    keys = set(choose.sample(UNIVERSE, choose.randint(1, 30)))
    match choose.randrange(20):
        case 0:
            residency.clear(tier)
        case n if n % 2:
            residency.store(tier, keys)
        case _:
            residency.remove(tier, keys)


def test_ledger_adds_up_to_what_is_resident_after_any_history() -> None:
    choose, ledger = random.Random(3), BucketLedger()
    residency = MemoryResidency(sink=Sinks(ledger))
    for step in range(3 * FOLD_EVENTS):
        change(residency, choose)
        if step % 500 == 0:
            for tier in (Tier.DRAM, Tier.SSD):
                ledger.check(tier, residency.resident_keys(tier))
    for tier in (Tier.DRAM, Tier.SSD):
        ledger.check(tier, residency.resident_keys(tier))
    residency.resident[Tier.DRAM] ^= {UNIVERSE[0]}
    with pytest.raises(AssertionError, match="a bucket drifted"):
        ledger.check(Tier.DRAM, residency.resident_keys(Tier.DRAM))


@pytest.mark.parametrize("seed", range(30))
def test_scan_ends_with_the_state_right_after_the_last_event(seed: int) -> None:
    choose = random.Random(seed)
    sinks = Sinks()
    residency = MemoryResidency(sink=sinks)
    for _ in range(20):
        change(residency, choose)
    buckets = tuple(sorted(choose.sample(range(BUCKETS), 120)))
    choices = [BucketChoice(tier, buckets) for tier in (Tier.DRAM, Tier.SSD)]
    scan = BucketScan(choices, residency.scan_keys)
    sinks.sinks.append(scan)
    while scan.step():
        for _ in range(choose.randint(0, 3)):
            change(residency, choose)
    for tier in (Tier.DRAM, Tier.SSD):
        truth = residency.resident_keys(tier)
        for bucket in buckets:
            keys = scan.keys(tier, bucket)
            assert keys.tolist() == truth[bucket_numbers(truth) == bucket].tolist()


def test_scan_of_one_tier_minds_no_event_of_another() -> None:
    residency = MemoryResidency(sink=Sinks())
    scan = BucketScan([BucketChoice(Tier.DRAM, (0,))], residency.scan_keys)
    key = next(k for k in UNIVERSE if bucket_numbers(as_keys({k}))[0] == 0)
    for event in (
        BlocksStored(Tier.SSD, as_keys({key})),
        BlocksStored(Tier.DRAM, as_keys({key})),
        BlocksRemoved(Tier.SSD, as_keys({key})),
        TierCleared(Tier.SSD),
    ):
        scan.enter(event)
    assert scan.keys(Tier.DRAM, 0).tolist() == [key]
