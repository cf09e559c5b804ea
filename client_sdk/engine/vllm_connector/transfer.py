"""The worker's half: moves blocks between the engine's pages and the store's slots.

Loads and saves have a thread each, and a session for each group of layers, so neither holds up the
other nor the engine. A load that fails anywhere names every page it did not fill; a save that fails
is a later miss.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from client_sdk.attached_pool import AttachedPool
from client_sdk.engine.vllm_connector.device import Device, Fence
from client_sdk.engine.vllm_connector.pages import EnginePages
from client_sdk.engine.vllm_connector.pieces import PIECE_BYTES, Piece, pieces
from client_sdk.engine.vllm_connector.plan import GroupLoad, LoadPlan, SavePlan, StepReport
from client_sdk.engine.vllm_connector.stats import EmberStats
from client_sdk.pinning import PoolPinning
from client_sdk.prefaulting import PoolPrefault
from client_sdk.sync_borrowed import Lease, StagedWrite
from client_sdk.sync_client import SyncClient
from emberkv_proto.errors import ChecksumUnknownError, CorruptionError, EmberError
from emberkv_proto.hashing import checksum
from emberkv_proto.types import AcquirePolicy, StageState

log = logging.getLogger("vllm.emberkv.transfer")
DOUBTED_STEPS = 8
"""Steps whose saves are dropped after a load that a step waited for has failed: that step computed
on pages that were not filled, and the engine may have queued a few more before it learns of it."""


@dataclass(eq=False, slots=True)
class _Save:
    """One save under way. Whoever holds `lock` may read the engine's pages for it."""

    plan: SavePlan
    fence: Fence
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_cancelled: bool = False


@dataclass(eq=False, slots=True)
class _Load:
    plan: LoadPlan
    fence: Fence
    layers_done: dict[str, threading.Event]
    """Of a load that a step waits for; of one between steps nobody asks."""
    missing_pages: set[int] = field(default_factory=set)
    """Once it has ended: pages of the plan that are not known to be filled."""


@dataclass(frozen=True, slots=True)
class _PartToLoad:
    """Some of a plan's blocks."""

    piece: Piece
    skipped: int
    """Pages at its begin that are not wanted."""
    pages: slice
    """Where those that are wanted are among the plan's."""


@dataclass(frozen=True, slots=True)
class GroupLink:
    """One group's pages, and this rank's sessions for their part of blocks."""

    pages: EnginePages
    loader: SyncClient
    saver: SyncClient


@dataclass(slots=True)
class Ended:
    """What ended since it was last asked."""

    received: set[str] = field(default_factory=set)
    sent: set[str] = field(default_factory=set)
    failed_pages: set[int] = field(default_factory=set)
    report: StepReport = field(default_factory=StepReport)


class WorkerHalf:
    """Loads and saves of one rank. The engine's thread calls it; its own threads do the work.

    Args:
        links: of each group, in the namespace's order.
        device: where all their pages are.
        load_seconds: how long a load may wait for blocks that are not in DRAM.
        verifies: compare what is loaded with its checksum.
    """

    def __init__(
        self, links: Sequence[GroupLink], device: Device, load_seconds: float, verifies: bool
    ) -> None:
        self._links = links
        self._device = device
        self._load_queue, self._save_queue = device.queue(), device.queue()
        self._pinning = PoolPinning(device.registry, lambda: self._count("pin_failures"))
        self._prefault = PoolPrefault() if device.registry is None else None
        """Where nothing pins the pool."""
        self._load_seconds = load_seconds
        self._verifies = verifies
        self._loads = ThreadPoolExecutor(1, "emberkv-load")
        self._saves = ThreadPoolExecutor(1, "emberkv-save")
        self._lock = threading.Lock()
        self._has_ended = threading.Condition(self._lock)
        """Told when a load ends, or the last save of a request."""
        self._ended = Ended()
        self._stats = EmberStats()
        self._loading = 0
        """Loads that have not ended."""
        self._awaited: list[_Load] = []
        """Loads that this step's forward pass waits for, layer by layer."""
        self._doubted_steps = 0
        self._saving: dict[str, list[_Save]] = {}
        self._leaving: set[str] = set()
        """Finished requests whose pages are kept for us."""
        self._saves.submit(self._attach)

    # ---- the engine's thread ----

    def load(self, plans: Sequence[LoadPlan]) -> None:
        """Begin loads; each is reported by `take` once it ended."""
        for plan in plans:
            self._begin(plan, {})

    def load_for_this_step(self, plans: Sequence[LoadPlan]) -> None:
        """Begin loads that `wait_for_layer` waits for."""
        self._awaited = [self._begin(plan, self._layer_events(plan)) for plan in plans]

    def wait_for_layer(self, name: str) -> None:
        """Return once the layer is filled for this step, or is not going to be."""
        for load in self._awaited:
            done = load.layers_done.get(name)
            if done is not None:
                done.wait()

    def wait_for_step(self) -> None:
        """Return once every load that this step waits for has ended."""
        self._doubted_steps = max(self._doubted_steps - 1, 0)
        for load in self._awaited:
            for done in load.layers_done.values():
                done.wait()
            if load.missing_pages:
                self._doubted_steps = DOUBTED_STEPS
        self._awaited = []

    def save(self, plans: Sequence[SavePlan]) -> None:
        """Begin saves of pages that the work queued so far makes final.

        They must stay until the report says that the save ended.
        """
        if not plans:
            return
        if self._doubted_steps:
            with self._lock:
                self._ended.report.saves_ended.update({plan.number: 1 for plan in plans})
            return
        fence = self._device.fence()
        for plan in plans:
            save = _Save(plan, fence)
            with self._lock:
                self._saving.setdefault(plan.request_id, []).append(save)
            self._saves.submit(self._save, save)

    def leave(self, requests: set[str]) -> None:
        """These requests have finished; their pages are kept until `take` names them sent."""
        with self._lock:
            self._leaving |= requests

    def cancel(self, requests: set[str]) -> None:
        """On return no page of these requests is read any more."""
        with self._lock:
            saves = [save for name in requests for save in self._saving.get(name, ())]
        for save in saves:
            with save.lock:
                save.is_cancelled = True

    def take(self, wait_seconds: float = 0.0) -> Ended:
        """What ended since the last call; `wait_seconds` bounds a wait for the first of it."""
        with self._lock:
            if wait_seconds and (self._leaving or self._loading):
                self._has_ended.wait_for(self._has_news, wait_seconds)
            gone = self._gone()
            self._leaving -= gone
            ended, self._ended = self._ended, Ended()
            ended.sent = gone
            return ended

    def _gone(self) -> set[str]:
        return {name for name in self._leaving if name not in self._saving}

    def _has_news(self) -> bool:
        return bool(self._ended.received or self._gone())

    def take_stats(self) -> EmberStats:
        with self._lock:
            stats, self._stats = self._stats, EmberStats()
            return stats

    def close(self) -> None:
        """End what runs, forget what waits. On return no page is read for a save any more."""
        for thread in (self._loads, self._saves):
            thread.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            unsaved = set(self._saving)
        self.cancel(unsaved)
        for link in self._links:
            link.loader.close()
            link.saver.close()
        self._pinning.close()
        if self._prefault is not None:
            self._prefault.close()

    def check_integrity(self) -> None:
        with self._lock:
            assert all(self._saving.values()), "a request is kept for no save"
            assert self._loading >= 0
        self._pinning.check_integrity()

    # ---- our threads ----

    def _layer_events(self, plan: LoadPlan) -> dict[str, threading.Event]:
        return {
            name: threading.Event()
            for part in plan.groups
            for name in self._links[part.group].pages.group.layer_names
        }

    def _begin(self, plan: LoadPlan, layers_done: dict[str, threading.Event]) -> _Load:
        load = _Load(plan, self._device.fence(), layers_done)
        with self._lock:
            self._loading += 1
        self._loads.submit(self._load, load)
        return load

    def _attach(self) -> None:
        """Have the pool pinned or mapped from the start; with the daemon away, saves see to it."""
        client = self._links[0].saver
        try:
            client.connect()
            self._ready(client.pool)
            with self._pinning.use(client.pool):
                pass
        except EmberError as error:
            log.info("the pool is attached later: %s", error)

    def _ready(self, pool: AttachedPool) -> None:
        if self._prefault is not None:
            self._prefault.begin(pool)

    def _count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._stats.count(name, by)

    def _load(self, load: _Load) -> None:
        plan = load.plan
        deadline = time.monotonic() + self._load_seconds
        missing: set[int] = set()
        loaded = failed = 0
        for part in plan.groups:
            # Without one group's pages those of the others are of no use.
            filled = 0 if missing else self._filled(part, load, deadline)
            missing.update(part.pages[filled:])
            size = self._links[part.group].pages.group.pages_per_block
            blocks = -(-(len(part.pages) - filled) // size)
            loaded += len(part.hashes) - part.skip_pages // size - blocks
            failed += blocks
        load.missing_pages = missing
        with self._lock:
            self._ended.failed_pages |= missing
            self._ended.received.add(plan.request_id)
            if missing:
                self._ended.report.failed_loads.add(plan.request_id)
                self._stats.count("failed_blocks", failed)
            self._stats.count("loaded_blocks", loaded)
            self._loading -= 1
            self._has_ended.notify_all()
        for done in load.layers_done.values():
            done.set()

    def _filled(self, part: GroupLoad, load: _Load, deadline: float) -> int:
        """Fill a group's pages; return how many of the leading ones are filled for certain."""
        try:
            return self._fill(part, load, deadline)
        except EmberError as error:
            log.info("load of request %s: %s", load.plan.request_id, error)
        except Exception:
            log.exception("load of request %s failed in a way it should not", load.plan.request_id)
            self._count("errors")
        return 0

    def _fill(self, part: GroupLoad, load: _Load, deadline: float) -> int:
        """Copy what can be had; count pages as filled once the daemon vouches for them."""
        link = self._links[part.group]
        pages = link.pages
        with link.loader.acquire(
            part.hashes,
            policy=AcquirePolicy.TIMEOUT,
            deadline_seconds=max(deadline - time.monotonic(), 0.0),
        ) as lease:
            size = pages.group.pages_per_block
            first, skipped = divmod(part.skip_pages, size)
            blocks = range(first, self._readable(lease, first, deadline))
            wanted = part.pages[: max(blocks.stop * size - part.skip_pages, 0)]
            with self._pinning.use(lease.pool), self._load_queue.open():
                parts = list(self._parts_to_load(lease, blocks, skipped, size))
                load.fence.wait()
                for layer, name in enumerate(pages.group.layer_names if load.layers_done else ()):
                    for one in parts:
                        pages.load_layer(
                            self._load_queue, layer, wanted[one.pages], one.skipped, one.piece.slots
                        )
                    if name != pages.group.layer_names[-1]:
                        self._load_queue.finish()
                        load.layers_done[name].set()
                if not load.layers_done:
                    for one in parts:
                        pages.load(
                            self._load_queue, wanted[one.pages], one.skipped, one.piece.slots
                        )
            # A daemon that died meanwhile may have come back and given the slots to others.
            link.loader.heartbeat()
            lease.require_valid()
        return len(wanted)

    def _parts_to_load(
        self, lease: Lease, blocks: range, skipped: int, size: int
    ) -> Iterator[_PartToLoad]:
        """Leased blocks of `size` pages, of the first of which some are skipped."""
        offsets = [lease.offset(block) for block in blocks]
        for piece in self._pieces(lease.pool, blocks, offsets, len(blocks)):
            piece.fetch(lease.pool)
            begin = (piece.blocks[0] - blocks.start) * size - skipped
            end = (piece.blocks[-1] + 1 - blocks.start) * size - skipped
            yield _PartToLoad(piece, max(-begin, 0), slice(max(begin, 0), end))

    def _pieces(
        self, pool: AttachedPool, blocks: Sequence[int], offsets: Sequence[int], most_blocks: int
    ) -> Iterator[Piece]:
        return pieces(
            pool, blocks, offsets, lambda offset: self._pinning.is_split(pool, offset), most_blocks
        )

    def _readable(self, lease: Lease, first: int, deadline: float) -> int:
        """Where the blocks from `first` on end that came by the deadline and are what was saved."""
        block = first
        while block < lease.usable_blocks:
            if block >= lease.ready_blocks:
                seconds = deadline - time.monotonic()
                if seconds <= 0 or lease.wait(block + 1, timeout_seconds=seconds) <= block:
                    break
            if not lease.needs(block):
                break  # the hit has become a shorter one, which is another
            if self._verifies:
                try:
                    lease.verify(block)
                except (CorruptionError, ChecksumUnknownError) as error:
                    log.warning("%s", error)
                    break
            block += 1
        return block

    def _save(self, save: _Save) -> None:
        plan = save.plan
        try:
            self._keep(save)
        except EmberError as error:
            self._count("lost_saves")
            log.info("save of request %s: %s", plan.request_id, error)
        except Exception:
            self._count("errors")
            log.exception("save of request %s failed in a way it should not", plan.request_id)
        finally:
            with self._lock:
                self._ended.report.saves_ended[plan.number] = 1
                saves = self._saving[plan.request_id]
                saves.remove(save)
                if not saves:
                    del self._saving[plan.request_id]
                    self._has_ended.notify_all()

    def _keep(self, save: _Save) -> None:
        plan = save.plan
        link = self._links[plan.group]
        with link.saver.stage(plan.hashes, parent=plan.parent, salt_id=plan.salt_id) as staged:
            granted = staged.granted
            save.fence.wait()
            if granted and not self._copy_out(save, link, staged, granted):
                return
            states = staged.states
        with self._lock:
            for name, count in (
                ("saved_blocks", len(granted)),
                ("present_blocks", states.count(StageState.PRESENT)),
                ("skipped_blocks", states.count(StageState.NO_SPACE)),
            ):
                if count:
                    self._stats.count(name, count)

    def _copy_out(
        self, save: _Save, link: GroupLink, staged: StagedWrite, granted: Sequence[int]
    ) -> bool:
        """Save and publish granted blocks; False: the save was cancelled, nothing is published."""
        size, pool, sums = link.pages.group.pages_per_block, staged.pool, []
        self._ready(pool)
        offsets = [staged.offset(block) for block in granted]
        most_blocks = max(PIECE_BYTES // pool.part_bytes, 1)
        with self._pinning.use(pool):
            for piece in self._pieces(pool, granted, offsets, most_blocks):
                pages = [
                    page
                    for block in piece.blocks
                    for page in save.plan.pages[block * size : (block + 1) * size]
                ]
                with save.lock:
                    if save.is_cancelled:
                        return False
                    staged.require_valid()  # too late, the slots may be others' by now
                    with self._save_queue.open():
                        link.pages.save(self._save_queue, pages, piece.slots)
                    piece.store(pool)
                sums += [checksum(staged.view(block)) for block in piece.blocks]
        staged.commit(granted, sums)
        return True
