"""A client's connection as the store sees it, and the answers it gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from emberkv_proto.errors import InvalidRequestError, UnknownStageError
from emberkv_proto.types import BlockHash, EngineInfo, StageState
from store_daemon.block import Block, StoredNamespace
from store_daemon.leases import SessionId
from store_daemon.tiers.slots import Slot

_STAGE_COUNTERS = {int(state): f"staged_{state.name.lower()}" for state in StageState}


class StagedPart(NamedTuple):
    """One part that a session is writing."""

    block: Block
    slot: Slot


@dataclass(eq=False, slots=True)
class Session:
    """An engine rank's (or an operator's) connection, and what it borrows."""

    id: SessionId
    client: str
    namespace: StoredNamespace | None
    part: int
    engine: EngineInfo | None
    is_remote: bool = False
    """Its engine is on another host: it reads and writes slots through the transport."""
    stages: dict[int, dict[BlockHash, StagedPart]] = field(default_factory=dict)

    @property
    def own(self) -> StoredNamespace:
        """The session's namespace. Raises InvalidRequestError in an operator's session."""
        if self.namespace is None:
            raise InvalidRequestError(
                "an operator's session has no namespace; it may ask STATUS, CHECK and DRAIN only"
            )
        return self.namespace

    @property
    def part_bytes(self) -> int:
        return self.own.size_classes[self.part].payload_bytes

    def check_integrity(self) -> None:
        """Assert that each stage holds parts that are being written, under their blocks' hashes."""
        for stage in self.stages.values():
            assert stage, "an empty stage is kept"
            for block_hash, staged in stage.items():
                assert staged.block.hash == block_hash
                assert staged.block.writers >> self.part & 1


@dataclass(frozen=True, slots=True)
class Staged:
    """Answer to a stage call, block by block. `stage_id` is 0 when nothing was granted."""

    stage_id: int
    states: bytes
    offsets: list[int]


@dataclass(frozen=True, slots=True)
class Probed:
    """Usable prefix, and per asked block a bit `1 << Tier` for each tier it is resident in."""

    hit_blocks: int
    tiers: bytes


def take_staged(
    stage: dict[BlockHash, StagedPart],
    stage_id: int,
    hashes: Sequence[BlockHash],
    checksums: Sequence[int],
) -> list[StagedPart]:
    """Take these blocks out of a stage to commit them; all or none. O(len(hashes)).

    Raises as `BlockStore.commit`.
    """
    if len(hashes) != len(checksums):
        raise InvalidRequestError(
            f"commit of {len(hashes)} hashes with {len(checksums)} checksums; wanted one for each"
        )
    if len(hashes) == len(stage) and hashes == [*stage]:  # all of it, in order: as nearly always
        staged = [*stage.values()]
        stage.clear()
        return staged
    if len(set(hashes)) != len(hashes):
        raise InvalidRequestError("a commit names a hash twice")
    for block_hash in hashes:
        if block_hash not in stage:
            raise UnknownStageError(
                f"block {block_hash.hex()[:16]} is not staged in stage {stage_id}"
            )
    return [stage.pop(block_hash) for block_hash in hashes]


def stage_state(block: Block, namespace: StoredNamespace, part: int, part_bit: int) -> StageState:
    """What a stage of this part of an existing block gets."""
    if block.namespace is not namespace:
        return StageState.NO_SPACE  # a hash that only a forged chain can share
    if block.slots[part] is not None or block.rows[part] is not None:
        return StageState.PRESENT
    if block.writers & part_bit:
        return StageState.IN_PROGRESS
    return StageState.GRANTED


def count_states(states: bytes) -> dict[str, int]:
    """How often each state occurs, by the counter's name; no zeros."""
    counts = {name: states.count(state) for state, name in _STAGE_COUNTERS.items()}
    return {name: count for name, count in counts.items() if count}
