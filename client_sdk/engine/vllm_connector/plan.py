"""What the scheduler's half tells the worker's half in each step, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from emberkv_proto.types import BlockHash, SaltId


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """Fill `pages` of a group from consecutive blocks, whose first `skip_pages` are left out."""

    group: int
    hashes: tuple[BlockHash, ...]
    skip_pages: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What a request waits for: of each group the pages that a hit of its length needs."""

    request_id: str
    groups: tuple[GroupLoad, ...]


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Keep full blocks of one group: `pages` are theirs, block by block."""

    number: int
    """Names this save in reports."""
    request_id: str
    group: int
    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    pages: tuple[int, ...]
    salt_id: SaltId | None
    """Whose quota the blocks count against."""


@dataclass(slots=True)
class StepPlan(KVConnectorMetadata):  # type: ignore[misc]
    """One engine step."""

    loads: list[LoadPlan] = field(default_factory=list)
    saves: list[SavePlan] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)
    """Their pages are about to be overwritten."""
    finished: set[str] = field(default_factory=set)
    """Requests whose pages are kept until their saves are over."""
    computes: bool = True
    """Whether it has tokens to compute. Else the engine only asks what has ended, over and over."""


@dataclass(slots=True)
class StepReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What ended in this step."""

    saves_ended: dict[int, int] = field(default_factory=dict)
    """Of each save how many ranks have ended it, well or not."""
    failed_loads: set[str] = field(default_factory=set)
    """Requests whose load did not fill every page."""

    @property
    def is_empty(self) -> bool:
        return not self.saves_ended and not self.failed_loads

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        assert isinstance(other, StepReport)
        for number, ranks in other.saves_ended.items():
            self.saves_ended[number] = self.saves_ended.get(number, 0) + ranks
        self.failed_loads |= other.failed_loads
        return self
