"""One engine's HBM cache in our block hashes: events in, changes of index rows out. Pure.

    engine block   known: its place in our chain; resident: stored more often than removed
    our block      k engine blocks; it is a row while all k are resident

What is known outlives what is resident for a while, so that a child whose parent was evicted, or
lost with a message, still finds its place in the chain. A child that comes before its parent
waits for it. All memory is bounded; what does not fit is counted and costs hits, nothing else.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from emberkv_proto.errors import InvalidRequestError
from emberkv_proto.events import BlocksRemoved, BlocksStored, Event
from emberkv_proto.hashing import ExtraKey, block_hashes, chain_root, index_key
from emberkv_proto.request_keys import adapter_key, media_key, salt_bytes
from emberkv_proto.types import BlockHash, NamespaceId, Tier
from global_index.hbm.events import (
    EngineCleared,
    EngineEvent,
    EngineHash,
    EngineRemoved,
    EngineStored,
)

MAX_RESIDENT_BLOCKS = 1 << 20
"""Engine blocks of one engine and group that are followed."""
MAX_IDLE_BLOCKS = 1 << 14
"""Known and not resident."""
MAX_PENDING_BLOCKS = 1 << 13
"""Waiting for a parent."""
MAX_GROUPS = 64
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class ChainForm:
    """What an engine's hashes of ours are made of, beside the tokens."""

    namespace_id: NamespaceId
    block_tokens: int
    engine_block_tokens: int = 0
    """0: taken from the first event."""
    adapters: tuple[tuple[str, str], ...] = ()
    """Name and weights id of each adapter that is known; blocks of others are not indexed."""


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


@dataclass(slots=True, eq=False)
class _Link:
    """Where an engine block stands in our chain."""

    whole: BlockHash | None
    """Of our last block that ends at or before the end of this one; None: no hash is possible."""
    tail: bytes = b""
    """Packed tokens after that, this engine block included. Empty: our block ends here."""
    keys: tuple[ExtraKey, ...] = ()
    """Media of the tail."""
    members: tuple[EngineHash, ...] = ()
    """The engine blocks before this one that begin in the same block of ours."""
    missing: int = 0
    """How many of the members are not resident; kept where our block ends."""

    @property
    def ends_block(self) -> bool:
        return self.whole is not None and not self.tail


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
        self._form = form
        self._engine_block_tokens = form.engine_block_tokens
        self._adapters = {name: adapter_key(name, weights) for name, weights in form.adapters}
        self._copies: dict[int, dict[EngineHash, int]] = {}
        """For each counted group, how often each block was stored and not removed."""
        self._known: dict[EngineHash, _Link] = {}
        self._idle: OrderedDict[EngineHash, None] = OrderedDict()
        self._ends_of: dict[EngineHash, set[EngineHash]] = {}
        """For each member, the engine blocks where blocks of ours end that need it."""
        self._pending: OrderedDict[EngineHash, list[EngineStored]] = OrderedDict()
        self._pending_blocks = 0
        self._rows: dict[int, int] = {}
        """Index key of each row, and how many engine blocks end it."""
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
        for block, link in self._known.items():
            assert (block in self._idle) != self._is_resident(block)
            if link.ends_block and link.whole is not None:
                missing = sum(not self._is_resident(member) for member in link.members)
                assert link.missing == missing
                assert all(block in self._ends_of[member] for member in link.members)
                if not missing and self._is_resident(block):
                    rows[index_key(link.whole)] += 1
        assert rows == self._rows
        assert self._idle.keys() <= self._known.keys()
        assert len(self._idle) <= MAX_IDLE_BLOCKS
        for ends in self._ends_of.values():
            assert ends
            assert ends <= self._known.keys()
        waiting = sum(len(event.hashes) for group in self._pending.values() for event in group)
        assert waiting == self._pending_blocks <= MAX_PENDING_BLOCKS
        assert not self._pending.keys() & self._known.keys(), "a parent came and nobody noticed"
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
        if all(block in self._known for block in event.hashes):
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
        self._known.clear()
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
        return size == self._engine_block_tokens and self._form.block_tokens % size == 0

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

    def _arrive(self, block: EngineHash) -> None:
        link = self._known.get(block)
        if link is None or not self._is_resident(block):
            return
        self._idle.pop(block, None)
        if link.ends_block and not link.missing:
            self._add_row(link)
        for end in self._ends_of.get(block, ()):
            other = self._known[end]
            other.missing -= 1
            if not other.missing and self._is_resident(end):
                self._add_row(other)

    def _leave(self, block: EngineHash) -> None:
        """The block was resident until now."""
        link = self._known.get(block)
        if link is None:
            return
        if link.ends_block and not link.missing:
            self._drop_row(link)
        for end in self._ends_of.get(block, ()):
            other = self._known[end]
            if not other.missing and self._is_resident(end):
                self._drop_row(other)
            other.missing += 1
        self._idle[block] = None
        self._trim()

    def _vacate(self) -> None:
        """Nothing counts as resident any more."""
        self._drop_rows()
        for block, link in self._known.items():
            link.missing = len(link.members)
            self._idle.setdefault(block, None)
        self._trim()

    def _drop_rows(self) -> None:
        """One by one: to clear a tier the whole index would be looked through."""
        for key in self._rows:
            self._changes.removed(key)
        self._rows.clear()

    def _add_row(self, link: _Link) -> None:
        key = _key_of(link)
        count = self._rows.get(key, 0)
        self._rows[key] = count + 1
        if not count:
            self._changes.stored(key)

    def _drop_row(self, link: _Link) -> None:
        key = _key_of(link)
        count = self._rows.pop(key)
        if count > 1:
            self._rows[key] = count - 1
        else:
            self._changes.removed(key)

    # Chains

    def _learn(self, event: EngineStored) -> None:
        """Compute our hashes of an event's blocks, and of those that waited for them."""
        ready = [event]
        while ready:
            run = ready.pop()
            if run.parent is None:
                start = _Link(chain_root(self._form.namespace_id, salt_bytes(run.salt)))
            elif run.parent in self._known:
                start = self._known[run.parent]
            else:
                self._pend(run)
                continue
            for block, link in zip(run.hashes, self._links(run, start), strict=True):
                if block in self._known:
                    continue
                self._know(block, link)
                waiting = self._pending.pop(block, ())
                self._pending_blocks -= sum(len(child.hashes) for child in waiting)
                ready += waiting

    def _know(self, block: EngineHash, link: _Link) -> None:
        self._known[block] = link
        if link.ends_block:
            link.missing = sum(not self._is_resident(member) for member in link.members)
            for member in link.members:
                self._ends_of.setdefault(member, set()).add(block)
        if not self._is_resident(block):
            self._idle[block] = None
            self._trim()
        else:
            if link.ends_block and not link.missing:
                self._add_row(link)

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
            link = self._known.pop(block)
            if not link.ends_block:
                continue
            for member in link.members:
                ends = self._ends_of[member]
                ends.discard(block)
                if not ends:
                    del self._ends_of[member]

    def _links(self, run: EngineStored, start: _Link) -> Iterator[_Link]:
        """The place of each block of `run`, which goes on after `start`."""
        adapter = self._adapter_keys(run)
        blocks = len(run.hashes)
        hashed = run.understood_blocks if adapter is not None and start.whole is not None else 0
        self.counts.not_understood += blocks - hashed
        if hashed:
            yield from self._hashed_links(run, start, hashed, adapter or ())
        for _ in range(blocks - hashed):
            yield _Link(None)

    def _hashed_links(
        self, run: EngineStored, start: _Link, blocks: int, adapter: tuple[ExtraKey, ...]
    ) -> Iterator[_Link]:
        size, ours = run.block_tokens, self._form.block_tokens
        tokens = np.concatenate(
            (np.frombuffer(start.tail, "<u4"), run.tokens[: blocks * size])
        ).astype("<u4", copy=False)
        first = len(start.tail) // _TOKEN_BYTES
        keys: dict[int, tuple[ExtraKey, ...]] = {0: start.keys} if start.keys else {}
        links: list[_Link] = []
        members = (*start.members, _hash_before(run)) if first else ()
        for number in range(blocks):
            mine, offset = divmod(first + number * size, ours)
            for medium in run.media[number] if run.media else ():
                key = media_key(medium.identifier, medium.offset_tokens + offset)
                if key not in keys.get(mine, ()):
                    keys[mine] = (*keys.get(mine, ()), key)
            end = offset + size
            link = _Link(None, members=members)
            if end < ours:
                begin = mine * ours
                link.tail = tokens[begin : begin + end].tobytes()
                link.keys = keys.get(mine, ())
                members = (*members, run.hashes[number])
            else:
                members = ()
            links.append(link)
        extra: Mapping[int, tuple[ExtraKey, ...]] | tuple[ExtraKey, ...] = adapter
        if keys:
            extra = {n: (*adapter, *keys.get(n, ())) for n in range(len(tokens) // ours)}
        assert start.whole is not None
        whole = [start.whole]
        whole += block_hashes(
            self._form.namespace_id, tokens, ours, extra_keys=extra, parent=start.whole
        )
        for number, link in enumerate(links):
            link.whole = whole[(first + (number + 1) * size) // ours]
        yield from links

    def _adapter_keys(self, run: EngineStored) -> tuple[ExtraKey, ...] | None:
        """None: an adapter whose weights are not known."""
        if not run.adapter:
            return ()
        key = self._adapters.get(run.adapter)
        return None if key is None else (key,)


def _hash_before(run: EngineStored) -> EngineHash:
    if run.parent is None:
        raise InvalidRequestError("a prompt does not start inside a block")
    return run.parent


def _key_of(link: _Link) -> int:
    assert link.whole is not None
    return index_key(link.whole)
