"""What a node tells the global index, in order. Emitted only where the catalog changes.

Conservation law, per tier: stored - removed == resident. `keys` are IndexKeys as a u64 array.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from emberkv_proto.types import Incarnation, NodeId, Seq, Tier

Keys = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class BlocksStored:
    """These blocks are now resident in `tier`: with all parts, or all that no hit can miss."""

    tier: Tier
    keys: Keys


@dataclass(frozen=True, slots=True, eq=False)
class BlocksRemoved:
    """These blocks are no longer in `tier`."""

    tier: Tier
    keys: Keys


@dataclass(frozen=True, slots=True)
class TierCleared:
    """Nothing is left in `tier`."""

    tier: Tier


Event = BlocksStored | BlocksRemoved | TierCleared


def merged(events: Iterable[Event]) -> Iterator[Event]:
    """The same changes in the same order, neighbours of one kind and tier as one event."""
    kind: type[BlocksStored | BlocksRemoved] | None = None
    tier: Tier | None = None
    parts: list[Keys] = []
    for event in events:
        if event.__class__ is kind and event.tier is tier:
            parts.append(event.keys)
            continue
        if kind and tier:
            yield kind(tier, parts[0] if len(parts) == 1 else np.concatenate(parts))
        if isinstance(event, TierCleared):
            kind = tier = None
            yield event
        else:
            kind, tier, parts = event.__class__, event.tier, [event.keys]
    if kind and tier:
        yield kind(tier, parts[0] if len(parts) == 1 else np.concatenate(parts))


@dataclass(frozen=True, slots=True, eq=False)
class EventBatch:
    """Events seq_first .. seq_last of one incarnation."""

    node_id: NodeId
    incarnation: Incarnation
    seq_first: Seq
    events: tuple[Event, ...]
    sent_unix_seconds: float

    @property
    def seq_last(self) -> Seq:
        return Seq(self.seq_first + len(self.events) - 1)


@dataclass(frozen=True, slots=True)
class SnapshotNeeded:
    """The asked events are gone; the state as of `seq` can be had as a snapshot."""

    incarnation: Incarnation
    seq: Seq
    node_id: NodeId | None = None
    """Whose; a daemon older than this field does not say."""


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotPage:
    """A piece of the state right after event `seq`; the last one says so."""

    node_id: NodeId
    incarnation: Incarnation
    seq: Seq
    tier: Tier
    keys: Keys
    is_last: bool


@dataclass(frozen=True, slots=True, eq=False)
class BucketRows:
    """All keys of one bucket of a tier, ascending, right after event `seq`."""

    node_id: NodeId
    incarnation: Incarnation
    seq: Seq
    tier: Tier
    bucket: int
    keys: Keys
