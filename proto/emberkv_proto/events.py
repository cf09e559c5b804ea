"""What a node tells the global index, in order. Emitted only where the catalog changes.

Conservation law, per tier: stored - removed == resident. `keys` are IndexKeys as a u64 array.
"""

from __future__ import annotations

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
