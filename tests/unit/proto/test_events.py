"""Events of a batch joined for whoever applies them."""

from __future__ import annotations

import numpy as np

from emberkv_proto.events import BlocksRemoved, BlocksStored, Event, TierCleared, merged
from emberkv_proto.types import Tier


def stored(tier: Tier, *keys: int) -> BlocksStored:
    return BlocksStored(tier, np.array(keys, np.uint64))


def removed(tier: Tier, *keys: int) -> BlocksRemoved:
    return BlocksRemoved(tier, np.array(keys, np.uint64))


def told(events: list[Event]) -> list[tuple[object, ...]]:
    return [
        (type(event), event.tier, *([] if isinstance(event, TierCleared) else event.keys.tolist()))
        for event in events
    ]


def test_neighbours_of_one_kind_and_tier_become_one_event_and_order_stays() -> None:
    events: list[Event] = [
        stored(Tier.DRAM, 1, 2),
        stored(Tier.DRAM),
        stored(Tier.DRAM, 2, 3),
        stored(Tier.SSD, 1),
        removed(Tier.SSD, 1),
        removed(Tier.SSD, 4),
        TierCleared(Tier.DRAM),
        TierCleared(Tier.DRAM),
        removed(Tier.SSD, 5),
        stored(Tier.SSD, 5),
        removed(Tier.SSD, 5),
    ]
    assert told([*merged(events)]) == told(
        [
            stored(Tier.DRAM, 1, 2, 2, 3),
            stored(Tier.SSD, 1),
            removed(Tier.SSD, 1, 4),
            TierCleared(Tier.DRAM),
            TierCleared(Tier.DRAM),
            removed(Tier.SSD, 5),
            stored(Tier.SSD, 5),
            removed(Tier.SSD, 5),
        ]
    )


def test_no_events_and_one_event_stay_as_they_are() -> None:
    alone = stored(Tier.HBM, 7)
    assert [*merged([])] == []
    assert told([*merged([alone])]) == told([alone])
