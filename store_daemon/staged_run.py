"""Room for blocks that come from a peer: staged slots that land or are given back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from emberkv_proto.errors import InvalidRequestError
from emberkv_proto.types import BlockHash
from store_daemon.block import Block, StoredNamespace
from store_daemon.holdings import Holdings
from store_daemon.ports import PoolRange
from store_daemon.tenants import Tenant
from store_daemon.tiers.slots import Slot


class StagedRun:
    """Implements `ports.PullRoom` over staged slots. `lands`: told of each block before it does."""

    def __init__(
        self, holdings: Holdings, lands: Callable[[Block], None] = lambda block: None
    ) -> None:
        self._lands = lands
        self._ranges: list[Sequence[PoolRange]] = []
        self.ranges: Sequence[Sequence[PoolRange]] = self._ranges
        self._holdings = holdings
        self._blocks: list[Block] = []
        self._slots: list[dict[int, Slot] | None] = []
        """Per block its slots; None once landed."""

    def add(
        self,
        namespace: StoredNamespace,
        block_hash: BlockHash,
        parent: BlockHash | None,
        slots: dict[int, Slot],
        tenant: Tenant | None = None,
    ) -> None:
        for part in range(namespace.parts):
            block = self._holdings.catalog.begin_part(namespace, block_hash, parent, part, tenant)
        self._blocks.append(block)
        self._slots.append(slots)
        self._ranges.append([PoolRange(s.offset, s.payload_bytes) for s in slots.values()])

    def land(self, block: int, checksums: Sequence[int]) -> None:
        slots = self._slots[block]
        if slots is None or len(checksums) != len(slots):
            raise InvalidRequestError(f"block {block} of a pull landed twice or with wrong parts")
        self._slots[block] = None
        own = self._blocks[block]
        self._lands(own)
        required = own.namespace.required
        # Required parts last: who waits for the block finds it whole.
        for part in sorted(slots, key=required.__contains__):
            self._holdings.commit_part(own, part, slots[part], checksums[part])
        self._holdings.counters["pulled_blocks"] += 1

    def publish(self) -> None:
        self._holdings.publish()

    def close(self) -> None:
        for number, slots in enumerate(self._slots):
            if slots is not None:
                self._slots[number] = None
                for part in slots:
                    self._holdings.abort_part(self._blocks[number], part)
                self._holdings.give_back(slots.values())
        self._holdings.publish()
