"""The worker's half: moves blocks between the engine's pages and the store's slots.

Loads and saves have a thread and a session each, so neither holds up the other nor the engine. A
load that fails anywhere names every page it did not fill; a save that fails is a later miss.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from client_sdk.engine.vllm_connector.pages import EnginePages, Fence
from client_sdk.engine.vllm_connector.plan import LoadPlan, SavePlan, StepReport
from client_sdk.engine.vllm_connector.stats import EmberStats
from client_sdk.sync_borrowed import Lease
from client_sdk.sync_client import SyncClient
from emberkv_proto.errors import ChecksumUnknownError, CorruptionError, EmberError
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
    layers_done: list[threading.Event]
    filled_pages: int = 0


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
        load_seconds: how long a load may wait for blocks that are not in DRAM.
        verifies: compare what is loaded with its checksum.
    """

    def __init__(
        self,
        loader: SyncClient,
        saver: SyncClient,
        pages: EnginePages,
        layer_names: Sequence[str],
        pages_per_block: int,
        load_seconds: float,
        verifies: bool,
    ) -> None:
        self._loader, self._saver, self._pages = loader, saver, pages
        self._layer_numbers = {name: number for number, name in enumerate(layer_names)}
        self._pages_per_block = pages_per_block
        self._load_seconds = load_seconds
        self._verifies = verifies
        self._loads = ThreadPoolExecutor(1, "emberkv-load")
        self._saves = ThreadPoolExecutor(1, "emberkv-save")
        self._lock = threading.Lock()
        self._ended = Ended()
        self._stats = EmberStats()
        self._awaited: list[_Load] = []
        """Loads that this step's forward pass waits for, layer by layer."""
        self._doubted_steps = 0
        self._saving: dict[str, list[_Save]] = {}
        self._leaving: set[str] = set()
        """Finished requests whose pages are kept for us."""

    # ---- the engine's thread ----

    def load(self, plans: Sequence[LoadPlan]) -> None:
        """Begin loads; each is reported by `take` once it ended."""
        for plan in plans:
            self._begin(plan)

    def load_for_this_step(self, plans: Sequence[LoadPlan]) -> None:
        """Begin loads that `wait_for_layer` waits for."""
        self._awaited = [self._begin(plan) for plan in plans]

    def wait_for_layer(self, name: str) -> None:
        """Return once the layer is filled for this step, or is not going to be."""
        if self._awaited and name in self._layer_numbers:
            number = self._layer_numbers[name]
            for load in self._awaited:
                load.layers_done[number].wait()

    def wait_for_step(self) -> None:
        """Return once every load that this step waits for has ended."""
        self._doubted_steps = max(self._doubted_steps - 1, 0)
        for load in self._awaited:
            for done in load.layers_done:
                done.wait()
            if load.filled_pages < len(load.plan.pages):
                self._doubted_steps = DOUBTED_STEPS
        self._awaited = []

    def save(self, plans: Sequence[SavePlan]) -> None:
        """Begin saves of pages that the work queued so far makes final.

        They must stay until the report says that the save ended.
        """
        if self._doubted_steps:
            with self._lock:
                ended = self._ended.report.saves_ended
                for plan in plans:
                    ended[plan.request_id] = ended.get(plan.request_id, 0) + 1
            return
        fence = self._pages.fence()
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

    def take(self) -> Ended:
        """What ended since the last call."""
        with self._lock:
            gone = {name for name in self._leaving if name not in self._saving}
            self._leaving -= gone
            ended, self._ended = self._ended, Ended()
            ended.sent = gone
            return ended

    def take_stats(self) -> EmberStats:
        with self._lock:
            stats, self._stats = self._stats, EmberStats()
            return stats

    def close(self) -> None:
        """End what runs, forget what waits."""
        for thread in (self._loads, self._saves):
            thread.shutdown(wait=False, cancel_futures=True)
        self._loader.close()
        self._saver.close()

    def check_integrity(self) -> None:
        with self._lock:
            assert all(self._saving.values()), "a request is kept for no save"

    # ---- our threads ----

    def _begin(self, plan: LoadPlan) -> _Load:
        events = [threading.Event() for _ in range(self._pages.layers)]
        load = _Load(plan, self._pages.fence(), events)
        self._loads.submit(self._load, load)
        return load

    def _count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._stats.count(name, by)

    def _load(self, load: _Load) -> None:
        plan = load.plan
        try:
            self._fill(load)
        except EmberError as error:
            load.filled_pages = 0
            log.info("load of request %s: %s", plan.request_id, error)
        except Exception:
            load.filled_pages = 0
            log.exception("load of request %s failed in a way it should not", plan.request_id)
            self._count("errors")
        finally:
            missing = plan.pages[load.filled_pages :]
            with self._lock:
                self._ended.failed_pages.update(missing)
                self._ended.received.add(plan.request_id)
                blocks = -(-len(missing) // self._pages_per_block)
                if missing:
                    self._ended.report.failed_loads.add(plan.request_id)
                    self._stats.count("failed_blocks", blocks)
                self._stats.count("loaded_blocks", len(plan.hashes) - blocks)
            for done in load.layers_done:
                done.set()

    def _fill(self, load: _Load) -> None:
        """Copy what can be had; count pages as filled once the daemon vouches for them."""
        plan = load.plan
        deadline = time.monotonic() + self._load_seconds
        with self._loader.acquire(
            plan.hashes, policy=AcquirePolicy.TIMEOUT, deadline_seconds=self._load_seconds
        ) as lease:
            blocks = self._readable(lease, deadline)
            views = [lease.view(block) for block in range(blocks)]
            load.fence.wait()
            for layer, done in enumerate(load.layers_done):
                for block, view in enumerate(views):
                    first, pages = self._block_pages(plan, block)
                    self._pages.load(layer, view, first, pages)
                if layer + 1 < self._pages.layers:
                    self._pages.finish()
                    done.set()
            self._pages.finish()
            # A daemon that died meanwhile may have come back and given the slots to others.
            self._loader.heartbeat()
            lease.require_valid()
        load.filled_pages = sum(len(self._block_pages(plan, n)[1]) for n in range(blocks))

    def _readable(self, lease: Lease, deadline: float) -> int:
        """Leading blocks that came by the deadline and are what was saved."""
        block = 0
        while block < lease.usable_blocks:
            if block >= lease.ready_blocks:
                seconds = deadline - time.monotonic()
                if seconds <= 0 or lease.wait(block + 1, timeout_seconds=seconds) <= block:
                    break
            if self._verifies:
                try:
                    lease.verify(block)
                except (CorruptionError, ChecksumUnknownError) as error:
                    log.warning("%s", error)
                    break
            block += 1
        return block

    def _block_pages(self, plan: LoadPlan, block: int) -> tuple[int, Sequence[int]]:
        """Which pages of a block are wanted: the number of the first, and where they go."""
        begin = block * self._pages_per_block - plan.skip_pages
        first = max(begin, 0)
        return first - begin, plan.pages[first : begin + self._pages_per_block]

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
                ended = self._ended.report.saves_ended
                ended[plan.request_id] = ended.get(plan.request_id, 0) + 1
                saves = self._saving[plan.request_id]
                saves.remove(save)
                if not saves:
                    del self._saving[plan.request_id]

    def _keep(self, save: _Save) -> None:
        plan, size = save.plan, self._pages_per_block
        with self._saver.stage(plan.hashes, parent=plan.parent, salt_id=plan.salt_id) as staged:
            granted = staged.granted
            save.fence.wait()
            for block in granted:
                with save.lock:
                    if save.is_cancelled:
                        return
                    self._pages.save(
                        plan.pages[block * size : (block + 1) * size], staged.view(block)
                    )
                    self._pages.finish()
            if granted:
                staged.commit(granted)
            states = staged.states
        with self._lock:
            for name, count in (
                ("saved_blocks", len(granted)),
                ("present_blocks", states.count(StageState.PRESENT)),
                ("skipped_blocks", states.count(StageState.NO_SPACE)),
            ):
                if count:
                    self._stats.count(name, count)
