"""Which window and state parts leave DRAM next: least recently needed first. Pure.

Such a part may go while its block stays (a tombstone), for hits that end far enough behind it do
not need it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from store_daemon.tiers.slots import SizeClass

if TYPE_CHECKING:
    from store_daemon.block import Block

MAX_SKIPPED = 64
"""Parts in use that one search moves out of its way."""


@dataclass(frozen=True, slots=True)
class OldPart:
    """A part that may go, and the number of the access that needed it last."""

    block: Block
    part: int
    access: int


class PartQueue:
    """Optional parts in DRAM by size class. All but `oldest_of_all` are O(1)."""

    def __init__(self) -> None:
        self._queues: dict[SizeClass, OrderedDict[Block, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._queues)

    def touch(self, block: Block, part: int, access: int) -> None:
        """The part came to DRAM, or a hit needs it."""
        queue = self._queues.setdefault(block.namespace.size_classes[part], OrderedDict())
        queue[block] = access
        queue.move_to_end(block)

    def discard(self, block: Block, part: int) -> None:
        """The part left DRAM."""
        size_class = block.namespace.size_classes[part]
        queue = self._queues[size_class]
        del queue[block]
        if not queue:
            del self._queues[size_class]

    def oldest(self, size_class: SizeClass, may_go: Callable[[Block], bool]) -> OldPart | None:
        """The class's next victim. It stays queued; dropping it is the caller's."""
        queue = self._queues.get(size_class, OrderedDict())
        for _ in range(min(len(queue), MAX_SKIPPED)):
            block, access = next(iter(queue.items()))
            if may_go(block):
                return OldPart(block, size_class.part, access)
            queue.move_to_end(block)
        return None

    def oldest_of_all(self, may_go: Callable[[Block], bool]) -> OldPart | None:
        """The next victim whatever its class. O(classes)."""
        found = (self.oldest(size_class, may_go) for size_class in self._queues)
        return min((p for p in found if p is not None), key=lambda p: p.access, default=None)

    def __iter__(self) -> Iterator[tuple[Block, int]]:
        for size_class, queue in self._queues.items():
            for block in queue:
                yield block, size_class.part
