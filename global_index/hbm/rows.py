"""One engine's HBM cache in our block hashes: events in, changes of index rows out. Pure.

    engine block   known: its place in our chain; resident: stored more often than removed
    our block      k engine blocks; it is a row while all k are resident

What is known outlives what is resident for a while, so that a child whose parent was evicted, or
lost with a message, still finds its place in the chain. A child that comes before its parent
waits for it. All memory is bounded; what does not fit is counted and costs hits, nothing else.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from emberkv_proto.events import BlocksRemoved, BlocksStored, Event
from emberkv_proto.hashing import index_key
from emberkv_proto.types import BlockHash, Tier
from global_index.hbm.events import (
    EngineCleared,
    EngineEvent,
    EngineHash,
    EngineRemoved,
    EngineStored,
)
from global_index.hbm.places import NOWHERE, ChainForm, Part, Place, Placing, Start

MAX_RESIDENT_BLOCKS = 1 << 20
"""Engine blocks of one engine and group that are followed."""
MAX_IDLE_BLOCKS = 1 << 14
"""Known and not resident."""
MAX_PENDING_BLOCKS = 1 << 13
"""Waiting for a parent."""
MAX_GROUPS = 64


@dataclass(slots=True)
class RowCounts:
    """Engine blocks of all events so far, by what became of them; never goes down."""

    stored: int = 0
    removed: int = 0
    cleared: int = 0
    """Times that the whole cache was."""
    not_understood: int = 0
    """Extra keys that we cannot put into our hash: unknown adapters, prompt embeddings."""
    without_tokens: int = 0
    other_groups: int = 0
    """Of window and state layers."""
    odd_sizes: int = 0
    """Not of the engine's block size: entries for parts of a block."""
    over_capacity: int = 0
    orphans: int = 0
    """Given up: the parent did not come in time."""
    unmatched_removals: int = 0


class _Changes:
    """Runs of rows stored and removed, in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._is_storing = True
        self._keys: list[int] = []

    def stored(self, key: int) -> None:
        self._switch(True)
        self._keys.append(key)

    def removed(self, key: int) -> None:
        self._switch(False)
        self._keys.append(key)

    def finish(self) -> list[Event]:
        self._switch(not self._is_storing)
        return self.events

    def _switch(self, is_storing: bool) -> None:
        if is_storing is self._is_storing:
            return
        if self._keys:
            keys = np.array(self._keys, np.uint64)
            kind = BlocksStored if self._is_storing else BlocksRemoved
            self.events.append(kind(Tier.HBM, keys))
        self._is_storing, self._keys = is_storing, []


class EngineRows:
    """The rows of one engine and data-parallel rank. O(blocks) per event, one thread."""

    def __init__(self, form: ChainForm) -> None:
        self._block_tokens = form.block_tokens
        self._engine_block_tokens = form.engine_block_tokens
        self._placing = Placing(form)
        self._copies: dict[int, dict[EngineHash, int]] = {}
        """For each counted group, how often each block was stored and not removed."""
        self._whole: dict[EngineHash, BlockHash | None] = {}
        """For each known block our last hash at its end; None: no hash is possible."""
        self._parts: dict[EngineHash, Part] = {}
        """Of known blocks that share a block of ours with others."""
        self._idle: OrderedDict[EngineHash, None] = OrderedDict()
        self._ends_of: dict[EngineHash, set[EngineHash] | EngineHash] = {}
        """For each member, the engine blocks where blocks of ours end that need it."""
        self._pending: OrderedDict[EngineHash, list[EngineStored]] = OrderedDict()
        self._pending_blocks = 0
        self._rows: set[int] = set()
        """Index keys."""
        self._also: Counter[int] = Counter()
        """Of rows that several engine blocks end, how many beyond one."""
        self._changes = _Changes()
        self.counts = RowCounts()

    @property
    def rows(self) -> int:
        return len(self._rows)

    @property
    def pending_blocks(self) -> int:
        return self._pending_blocks

    def apply(self, events: Iterable[EngineEvent]) -> list[Event]:
        """Take over what the engine says; return how the index's rows change."""
        self._changes = _Changes()
        for event in events:
            match event:
                case EngineStored():
                    self._store(event)
                case EngineRemoved():
                    self._remove(event)
                case EngineCleared():
                    self.counts.cleared += 1
                    self._clear()
        return self._changes.finish()

    def clear(self) -> list[Event]:
        """The engine's cache is empty, or it is a new engine; return how rows change."""
        self._changes = _Changes()
        self._clear()
        return self._changes.finish()

    def lose(self) -> list[Event]:
        """Messages were lost: what is resident is unknown, but what is known stays true."""
        self._changes = _Changes()
        for copies in self._copies.values():
            copies.clear()
        self._vacate()
        return self._changes.finish()

    def check_integrity(self) -> None:
        """Assert that rows are exactly our blocks whose engine blocks are all resident."""
        rows: Counter[int] = Counter()
        for block, whole in self._whole.items():
            assert (block in self._idle) != self._is_resident(block)
            part = self._parts.get(block)
            if part is not None and part.ends_block:
                missing = sum(not self._is_resident(member) for member in part.members)
                assert part.missing == missing
                assert all(block in self._ends(member) for member in part.members)
            if whole is not None and self._is_row(block):
                rows[index_key(whole)] += 1
        assert rows.keys() == self._rows
        assert rows - Counter(self._rows) == self._also
        assert self._idle.keys() <= self._whole.keys()
        assert self._parts.keys() <= self._whole.keys()
        assert len(self._idle) <= MAX_IDLE_BLOCKS
        for member in self._ends_of:
            ends = self._ends(member)
            assert ends
            assert ends <= self._parts.keys()
        waiting = sum(len(event.hashes) for group in self._pending.values() for event in group)
        assert waiting == self._pending_blocks <= MAX_PENDING_BLOCKS
        assert not self._pending.keys() & self._whole.keys(), "a parent came and nobody noticed"
        for copies in self._copies.values():
            assert len(copies) <= MAX_RESIDENT_BLOCKS
            assert all(count > 0 for count in copies.values())

    # Events

    def _store(self, event: EngineStored) -> None:
        blocks = len(event.hashes)
        self.counts.stored += blocks
        if not event.is_full:
            self.counts.other_groups += blocks
            return
        if not self._has_our_size(event):
            self.counts.odd_sizes += blocks
            return
        copies = self._group(event.group)
        if copies is None:
            self.counts.other_groups += blocks
            return
        for block in event.hashes:
            count = copies.get(block, 0)
            if count:
                copies[block] = count + 1
            elif len(copies) < MAX_RESIDENT_BLOCKS:
                copies[block] = 1
                self._arrive(block)
            else:
                self.counts.over_capacity += 1
        if all(block in self._whole for block in event.hashes):
            return
        if not event.tokens.size:
            self.counts.without_tokens += blocks
            return
        self._learn(event)

    def _remove(self, event: EngineRemoved) -> None:
        self.counts.removed += len(event.hashes)
        copies = self._copies.get(event.group)
        if copies is None:
            self.counts.other_groups += len(event.hashes)
            return
        for block in event.hashes:
            count = copies.get(block, 0)
            if count > 1:
                copies[block] = count - 1
            elif count:
                was_resident = self._is_resident(block)
                del copies[block]
                if was_resident:
                    self._leave(block)
            else:
                self.counts.unmatched_removals += 1

    def _clear(self) -> None:
        self._drop_rows()
        self._whole.clear()
        self._parts.clear()
        self._idle.clear()
        self._ends_of.clear()
        self._pending.clear()
        self._pending_blocks = 0
        for copies in self._copies.values():
            copies.clear()

    def _has_our_size(self, event: EngineStored) -> bool:
        size = event.block_tokens
        if event.tokens.size not in (0, size * len(event.hashes)):
            return False
        if not self._engine_block_tokens:
            self._engine_block_tokens = size
        return size == self._engine_block_tokens and self._block_tokens % size == 0

    def _group(self, group: int) -> dict[EngineHash, int] | None:
        """A block is resident when all groups have it; one more group makes that open again."""
        copies = self._copies.get(group)
        if copies is None:
            if len(self._copies) >= MAX_GROUPS:
                return None
            copies = self._copies[group] = {}
            self._vacate()
        return copies

    # Residence

    def _is_resident(self, block: EngineHash) -> bool:
        return bool(self._copies) and all(block in copies for copies in self._copies.values())

    def _is_row(self, block: EngineHash) -> bool:
        """Whether a block of ours ends with this known one and is there as a whole."""
        part = self._parts.get(block)
        is_whole = part is None or (part.ends_block and not part.missing)
        return is_whole and self._is_resident(block)

    def _arrive(self, block: EngineHash) -> None:
        """The first copy. Blocks of ours may need it though its own place was forgotten."""
        if not self._is_resident(block):
            return
        if block in self._whole:
            self._idle.pop(block, None)
            if self._is_row(block):
                self._add_row(block)
        for end in self._ends(block):
            self._parts[end].missing -= 1
            if self._is_row(end):
                self._add_row(end)

    def _leave(self, block: EngineHash) -> None:
        """The block was resident until now."""
        for end in self._ends(block):
            if self._is_row(end):
                self._drop_row(end)
            self._parts[end].missing += 1
        if block not in self._whole:
            return
        part = self._parts.get(block)
        if part is None or (part.ends_block and not part.missing):
            self._drop_row(block)
        self._idle[block] = None
        self._trim()

    def _vacate(self) -> None:
        """Nothing counts as resident any more."""
        self._drop_rows()
        for part in self._parts.values():
            part.missing = len(part.members)
        for block in self._whole:
            self._idle.setdefault(block, None)
        self._trim()

    def _drop_rows(self) -> None:
        """One by one: to clear a tier the whole index would be looked through."""
        for key in self._rows:
            self._changes.removed(key)
        self._rows.clear()
        self._also.clear()

    def _add_row(self, block: EngineHash) -> None:
        whole = self._whole[block]
        if whole is None:
            return
        key = index_key(whole)
        if key in self._rows:
            self._also[key] += 1
        else:
            self._rows.add(key)
            self._changes.stored(key)

    def _drop_row(self, block: EngineHash) -> None:
        whole = self._whole[block]
        if whole is None:
            return
        key = index_key(whole)
        if key not in self._also:
            self._rows.remove(key)
            self._changes.removed(key)
        elif self._also[key] > 1:
            self._also[key] -= 1
        else:
            del self._also[key]

    # Which blocks of ours need an engine block

    def _ends(self, member: EngineHash) -> set[EngineHash]:
        ends = self._ends_of.get(member)
        if ends is None:
            return set()
        return ends if isinstance(ends, set) else {ends}

    def _need(self, member: EngineHash, end: EngineHash) -> None:
        """Most members are needed by one, for whom a set would be large."""
        ends = self._ends_of.setdefault(member, end)
        if isinstance(ends, set):
            ends.add(end)
        elif ends != end:
            self._ends_of[member] = {ends, end}

    def _need_no_longer(self, member: EngineHash, end: EngineHash) -> None:
        ends = self._ends_of[member]
        if isinstance(ends, set) and len(ends) > 1:
            ends.remove(end)
        else:
            del self._ends_of[member]

    # Chains

    def _learn(self, event: EngineStored) -> None:
        """Compute our hashes of an event's blocks, and of those that waited for them."""
        ready = [event]
        while ready:
            run = ready.pop()
            if run.parent is not None and run.parent not in self._whole:
                self._pend(run)
                continue
            for block, place in zip(run.hashes, self._places(run), strict=False):
                if block in self._whole:
                    continue
                self._know(block, place)
                waiting = self._pending.pop(block, ())
                self._pending_blocks -= sum(len(child.hashes) for child in waiting)
                ready += waiting

    def _places(self, run: EngineStored) -> Iterable[Place]:
        """Of the blocks of a run whose parent is known."""
        blocks = len(run.hashes)
        whole = None if run.parent is None else self._whole[run.parent]
        if run.parent is not None and whole is None:
            self.counts.not_understood += blocks
            return [NOWHERE] * blocks
        start = self._placing.root(run) if run.parent is None else self._start(run.parent)
        if start is None:
            self.counts.orphans += blocks
            return ()
        self.counts.not_understood += blocks - self._placing.understood_blocks(run)
        return self._placing.places(run, start)

    def _start(self, parent: EngineHash) -> Start | None:
        """After a known block; None when one before it, in the same block of ours, is forgotten."""
        whole = self._whole[parent]
        assert whole is not None
        part = self._parts.get(parent)
        if part is None or part.ends_block:
            return Start(whole)
        tail, keys, members = [part.tokens], part.keys, [parent]
        while part.before is not None:
            if len(members) == self._block_tokens:
                return None  # in a circle: nonsense
            members.append(part.before)
            part = self._parts.get(part.before)
            if part is None:
                return None
            tail.append(part.tokens)
            keys = (*part.keys, *keys)
        return Start(whole, b"".join(reversed(tail)), keys, tuple(reversed(members)))

    def _know(self, block: EngineHash, place: Place) -> None:
        self._whole[block] = place.whole
        part = place.part
        if part is not None:
            self._parts[block] = part
            part.missing = sum(not self._is_resident(member) for member in part.members)
            for member in part.members:
                self._need(member, block)
        if not self._is_resident(block):
            self._idle[block] = None
            self._trim()
        elif self._is_row(block):
            self._add_row(block)

    def _pend(self, event: EngineStored) -> None:
        assert event.parent is not None
        if len(event.hashes) > MAX_PENDING_BLOCKS:
            self.counts.orphans += len(event.hashes)
            return
        self._pending.setdefault(event.parent, []).append(event)
        self._pending_blocks += len(event.hashes)
        while self._pending_blocks > MAX_PENDING_BLOCKS:
            _, oldest = self._pending.popitem(last=False)
            blocks = sum(len(child.hashes) for child in oldest)
            self._pending_blocks -= blocks
            self.counts.orphans += blocks

    def _trim(self) -> None:
        while len(self._idle) > MAX_IDLE_BLOCKS:
            block, _ = self._idle.popitem(last=False)
            del self._whole[block]
            part = self._parts.pop(block, None)
            for member in part.members if part else ():
                self._need_no_longer(member, block)
