"""Pages between SGLang's host pool and the store's slots, one batch of a chain at a time.

SGLang calls from threads of its own, which may wait: one looks up, one loads, one saves. Each has
a client of its own, since who waits for blocks keeps a client's other callers waiting. Each call
ends by its deadlines, and a daemon that is away, stopped or another than before is a miss.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from client_sdk.engine.sglang_backend.lanes import Bytes, read_slot, write_slot
from client_sdk.engine.sglang_backend.settings import BackendSettings
from client_sdk.engine.sglang_backend.stats import BackendStats, Moved
from client_sdk.sync_borrowed import Lease
from client_sdk.sync_client import SyncClient
from emberkv_proto.errors import ChecksumUnknownError, CorruptionError, EmberError
from emberkv_proto.types import AcquirePolicy, BlockHash, Source, StageState

log = logging.getLogger("sglang.emberkv")


class Pages(Protocol):
    """Where the pages of a batch are: for each its lanes, in the order of a slot."""

    def __iter__(self) -> Iterator[Sequence[Bytes]]: ...


class PageTransfer:
    """Looks up, loads and saves. No call raises what a store's trouble is made of."""

    def __init__(
        self,
        seeker: SyncClient,
        loader: SyncClient,
        saver: SyncClient,
        settings: BackendSettings,
        stats: BackendStats,
    ) -> None:
        self._seeker, self._loader, self._saver = seeker, loader, saver
        self._settings, self._stats = settings, stats

    def connect(self) -> None:
        """Announce this engine and learn whether the daemon will have it; heartbeats keep trying.

        Raises:
            UnavailableError: it is away; the engine may start without it.
            AccessDeniedError, LayoutMismatchError, InvalidRequestError: it will not have us.
        """
        for client in (self._loader, self._seeker, self._saver):
            client.connect()

    def found(self, hashes: Sequence[BlockHash]) -> int:
        """How many leading blocks can be had, peers' included. A promise to try, no more."""
        self._stats.count("lookups")
        if not hashes:
            return 0
        try:
            blocks = self._found(hashes)
        except EmberError as error:
            self._stats.count("failed_lookups")
            log.info("lookup of %d pages: %s", len(hashes), str(error))
            return 0
        self._stats.count("hit_pages", blocks)
        return blocks

    def _found(self, hashes: Sequence[BlockHash]) -> int:
        with self._seeker.acquire(
            hashes, policy=AcquirePolicy.TIMEOUT, deadline_seconds=self._settings.load_seconds
        ) as lease:
            if _peers_from(lease) is not None and self._settings.peer_seconds:
                deadline = time.monotonic() + self._settings.peer_seconds
                while (first := _peers_from(lease)) is not None:
                    seconds = deadline - time.monotonic()
                    if seconds <= 0:
                        break
                    lease.wait(first + 1, timeout_seconds=seconds)
            first = _peers_from(lease)
            return lease.usable_blocks if first is None else first

    def load(self, hashes: Sequence[BlockHash], pages: Pages) -> int:
        """Fill leading pages; return how many hold what was saved under their hashes.

        What is in the others' memory is of no use.
        """
        began = time.monotonic()
        filled, size = 0, 0
        try:
            with self._loader.acquire(
                hashes, policy=AcquirePolicy.TIMEOUT, deadline_seconds=self._settings.load_seconds
            ) as lease:
                if lease.usable_blocks:
                    deadline = began + self._settings.load_seconds
                    for block, lanes in enumerate(pages):
                        if not self._is_readable(lease, block, deadline):
                            break
                        read_slot(lease.view(block), lanes)
                        filled, size = block + 1, size + sum(map(len, lanes))
                    # Only now: the daemon guarded the slots, and is the one that lent them.
                    lease.require_valid()
        except EmberError as error:
            filled = 0
            log.info("load of %d pages: %s", len(hashes), str(error))
        self._stats.count("loaded_pages", filled)
        self._stats.count("failed_pages", len(hashes) - filled)
        if filled:
            self._stats.loaded(_moved(filled, size, began))
        return filled

    def _is_readable(self, lease: Lease, block: int, deadline: float) -> bool:
        """Whether a block came by the deadline, and is what was saved."""
        while block >= lease.ready_blocks:
            seconds = deadline - time.monotonic()
            if block >= lease.usable_blocks or seconds <= 0:
                return False
            lease.wait(block + 1, timeout_seconds=seconds)
        if self._settings.verify:
            try:
                lease.verify(block)
            except CorruptionError as error:
                self._stats.count("corrupt_pages")
                log.warning("%s", str(error))
                return False
            except ChecksumUnknownError as error:
                log.info("%s", str(error))
                return False
        return True

    def save(
        self, hashes: Sequence[BlockHash], parent: BlockHash | None, pages: Pages
    ) -> list[bool]:
        """Save pages that the store lacks; which of them it has now.

        `parent` is the hash before hashes[0]; None: not known, or there is none.
        """
        kept = [False] * len(hashes)
        began = time.monotonic()
        try:
            self._save(hashes, parent, list(pages), kept, began)
        except EmberError as error:
            self._stats.count("lost_saves")
            log.info("save of %d pages: %s", len(hashes), str(error))
        return kept

    def _save(
        self,
        hashes: Sequence[BlockHash],
        parent: BlockHash | None,
        pages: Sequence[Sequence[Bytes]],
        kept: list[bool],
        began: float,
    ) -> None:
        first, saved, present, size = 0, 0, 0, 0
        while first < len(hashes):
            with self._saver.stage(hashes[first:], parent=parent) as staged:
                granted, states = staged.granted, staged.states
                for block in granted:
                    write_slot(pages[first + block], staged.view(block))
                    size += sum(map(len, pages[first + block]))
                if granted and staged.commit(granted) != len(granted):
                    break  # which of them were taken is not known
            saved += len(granted)
            full = states.index(StageState.NO_SPACE) if StageState.NO_SPACE in states else None
            settled = full if full and granted else len(states)
            for block, state in enumerate(states[:settled]):
                kept[first + block] = state is not StageState.NO_SPACE
                present += state in (StageState.PRESENT, StageState.IN_PROGRESS)
            # What was committed makes room now, as it did not while it was being written.
            first, parent = first + settled, hashes[first + settled - 1]
        self._stats.count("present_pages", present)
        self._stats.count("saved_pages", saved)
        self._stats.count("skipped_pages", kept.count(False))
        if saved:
            self._stats.saved(_moved(saved, size, began))

    def close(self) -> None:
        for client in (self._seeker, self._loader, self._saver):
            client.close()

    def check_integrity(self) -> None:
        for client in (self._seeker, self._loader, self._saver):
            client.check_integrity()
        self._stats.check_integrity()


def _peers_from(lease: Lease) -> int | None:
    """The first block of which it is open whether a peer has it; None: it is known of all."""
    waiting = lease.sources[lease.ready_blocks :]
    return lease.ready_blocks + waiting.index(Source.PEER) if Source.PEER in waiting else None


def _moved(pages: int, size: int, began: float) -> Moved:
    seconds = max(time.monotonic() - began, 1e-9)
    return Moved(pages, size / seconds / (1 << 30))
