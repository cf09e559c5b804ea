"""`EmberConnector`: what vLLM loads. Guards each of the engine's calls and passes it on."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from client_sdk.engine.vllm_connector.device import device_of
from client_sdk.engine.vllm_connector.identity import PageShape, page_shape
from client_sdk.engine.vllm_connector.kv_events import event_endpoints
from client_sdk.engine.vllm_connector.layout import wanted_layout
from client_sdk.engine.vllm_connector.pages import EnginePages, LayerCache
from client_sdk.engine.vllm_connector.plan import StepPlan, StepReport
from client_sdk.engine.vllm_connector.scheduling import SchedulerHalf
from client_sdk.engine.vllm_connector.settings import ConnectorSettings
from client_sdk.engine.vllm_connector.stats import EmberPromMetrics, EmberStats
from client_sdk.engine.vllm_connector.transfer import Ended, GroupLink, WorkerHalf
from client_sdk.sync_client import SyncClient
from emberkv_proto.errors import EmberError
from emberkv_proto.types import EngineInfo, Source

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger("vllm.emberkv")
IDLE_SECONDS = 0.005
"""How long a step without tokens may wait for a load or save to end, and a request that comes then
for its first step."""
R = TypeVar("R")


def _guarded(missed: Callable[[], R]) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """An exception would end the engine: count it, log it, and answer as for a miss."""

    def wrap(call: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(call)
        def guarded(self: EmberConnector, *args: Any, **kwargs: Any) -> R:
            try:
                return call(self, *args, **kwargs)
            except Exception:
                self._failed(call.__name__)
                return missed()

        return guarded

    return wrap


def _no_tokens() -> tuple[int | None, bool]:
    return 0, False


def _nothing_kept() -> tuple[bool, dict[str, Any] | None]:
    return False, None


class EmberConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Keeps the engine's KV blocks in the node's store daemon, and finds them there again.

    One instance in the engine core (scheduler) and one in each worker. An engine that the store
    cannot serve, or whose daemon is away, computes everything itself.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Raises ConfigError for a wrong `kv_connector_extra_config`: the operator's to fix."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra = dict(self._kv_transfer_config.kv_connector_extra_config or {})
        self._settings = ConnectorSettings.of(extra)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._clients: list[SyncClient] = []
        self._stats = EmberStats()
        self._ended = Ended()
        self._shape: PageShape | None = None
        try:
            stage = 0 if role is KVConnectorRole.SCHEDULER else _pipeline_stage()
            self._shape = page_shape(vllm_config, kv_cache_config, extra, stage)
        except EmberError as error:
            log.error("EmberKV is off for this engine: %s", error)
            return
        if self._shape.loads_between_steps and not self._settings.load_async:
            log.warning("EmberKV: load_async is true for hybrid models and for pipelines")
            self._settings = replace(self._settings, load_async=True)
        if role is KVConnectorRole.SCHEDULER:
            ranks = self._shape.namespace.shards
            client = self._client(
                self._shape,
                0,
                "scheduler",
                self._settings.timeout_seconds,
                self._engine_info(self._shape),
            )
            self._scheduler = SchedulerHalf(client, self._shape, ranks, self._settings, self._stats)
            try:
                client.connect()  # announces the engine; heartbeats keep trying
            except EmberError as error:
                log.warning("EmberKV: the engine starts without its store: %s", error)

    # ---- what vLLM asks of the class, before there is an engine ----

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        try:
            return wanted_layout(vllm_config)
        except Exception:  # a wish is not worth an engine
            log.exception("EmberKV: vLLM's own cache layout is taken")
            return None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether layers wait for their loads, which a graph of the whole step would leave out."""
        return not extra_config.get("load_async", True)

    # ---- scheduler ----

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        if self._scheduler is not None:
            self._scheduler.holds.bind(gpu_block_pool)

    def has_pending_block_frees(self) -> bool:
        """Whether waiting for saves frees pages, so that no request need be preempted."""
        return self._scheduler is not None and not self._scheduler.holds.is_empty

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a block that was not saved is computed again."""
        return False

    @_guarded(lambda: None)
    def on_new_request(self, request: Request) -> None:
        if self._scheduler is None:
            self._stats.count("uncacheable_requests")
        else:
            self._scheduler.enqueued(request)

    @_guarded(_no_tokens)
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        tokens = self._scheduler.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens) and self._settings.load_async

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        # Not guarded: to lose this plan would be to leave pages unfilled that the engine trusts.
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[Any, int]:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        if self._scheduler is None or not num_external_tokens:
            return {}
        names = {
            Source.DRAM: CacheHitSource.HOST,
            Source.SSD: CacheHitSource.DISK,
            Source.PEER: CacheHitSource.P2P,
        }
        found = self._scheduler.tokens_by_source(request, num_external_tokens)
        return {names[source]: tokens for source, tokens in found.items()}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        # Not guarded, for the same reason.
        if self._scheduler is None:
            return StepPlan()
        return self._scheduler.step(scheduler_output)

    @_guarded(lambda: None)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._scheduler is None:
            return
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, StepReport):
            self._scheduler.reported(report)
        self._scheduler.loaded(connector_output.finished_recving or ())
        self._scheduler.left(connector_output.finished_sending or ())

    @_guarded(_nothing_kept)
    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is None:
            return False, None
        told = self._scheduler.handed_over(request)
        return self._scheduler.finished(request), told

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`: saves name the pages of all groups themselves."""
        return self.request_finished(request, block_ids[0] if block_ids else [])

    def take_events(self) -> Iterable[KVCacheEvent]:
        """None: the store daemon itself publishes what it holds."""
        return ()

    def reset_cache(self) -> bool:
        """Not done from here: the store is shared by engines. `emberkv clear` does it."""
        log.warning("the store is shared; clear it with: emberkv clear")
        return False

    # ---- worker ----

    def register_kv_caches(self, kv_caches: dict[str, LayerCache]) -> None:
        if self._shape is None:
            return
        shape, settings = self._shape, self._settings
        try:
            pages = [EnginePages(kv_caches, group, shape.num_pages) for group in shape.groups]
            device = device_of(pages[0].sample)
        except EmberError as error:
            # The scheduler's half looks blocks up all the same; each load then fails and is
            # computed again. Better slow than wrong.
            log.error("EmberKV cannot use this engine's cache: %s", error)
            return
        rank = _pipeline_stage() * (shape.namespace.shards // shape.stages)
        rank += _tensor_parallel_rank()
        # Their threads may wait, unlike the scheduler: as long as a load may take.
        links = [
            GroupLink(
                group,
                *(
                    self._client(
                        shape,
                        number * shape.namespace.shards + rank,
                        job,
                        settings.load_seconds,
                    )
                    for job in ("load", "save")
                ),
            )
            for number, group in enumerate(pages)
        ]
        self._worker = WorkerHalf(links, device, settings.load_seconds, settings.verify)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        # Not guarded: were it to fail, pages could be saved that others write.
        if self._worker is not None and isinstance(kv_connector_metadata, StepPlan):
            self._worker.cancel(kv_connector_metadata.preempted)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        plan = self._plan()
        if self._worker is None:
            # Nothing will fill these pages: say so, or the engine takes them for filled.
            for load in plan.loads:
                self._ended.failed_pages.update(page for part in load.groups for page in part.pages)
                self._ended.received.add(load.request_id)
                self._ended.report.failed_loads.add(load.request_id)
        elif self._settings.load_async:
            self._worker.load(plan.loads)
        else:
            self._worker.load_for_this_step(plan.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._worker is not None:
            self._worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: whole blocks are saved after the step, when all layers are final."""

    def wait_for_save(self) -> None:
        plan = self._plan()
        if self._worker is None:
            self._ended.report.saves_ended.update({save.number: 1 for save in plan.saves})
            return
        self._worker.wait_for_step()
        self._worker.save(plan.saves)
        self._worker.leave(plan.finished)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        ended = self._ended
        if self._worker is not None:
            # An engine without work asks hundreds of times a second, and takes the cores for it
            # from what it asks for.
            ended = self._ended = self._worker.take(0.0 if self._plan().computes else IDLE_SECONDS)
        else:
            ended.sent = set(self._plan().finished)
        received = ended.received if self._settings.load_async else set()
        return ended.sent or None, received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """As `get_finished`, and the requests whose load failed."""
        results = super().get_transfer_results(finished_req_ids)
        if self._shape is not None and self._shape.is_hybrid:
            results.failed_recving = set(self._ended.report.failed_loads)
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._ended.failed_pages = self._ended.failed_pages, set()
        self._ended.received = set()
        # Of several groups vLLM takes no pages, and where windows have moved on, the pages before
        # a failed one are not there: such a request begins anew, see `get_transfer_results`.
        return set() if self._shape is not None and self._shape.is_hybrid else failed

    def build_connector_worker_meta(self) -> StepReport | None:
        report, self._ended.report = self._ended.report, StepReport()
        return None if report.is_empty else report

    @_guarded(lambda: None)
    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        for client in self._clients:
            client.close()

    # ---- both ----

    def get_kv_connector_stats(self) -> EmberStats | None:
        stats = self._worker.take_stats() if self._worker is not None else EmberStats()
        own, self._stats.data = EmberStats(data=self._stats.data), {}
        stats.aggregate(own)
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> EmberStats:
        return EmberStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, config: Any, types: Any, labels: list[str], per_engine: dict[int, list[object]]
    ) -> EmberPromMetrics:
        return EmberPromMetrics(config, types, labels, per_engine)

    def _plan(self) -> StepPlan:
        plan = self._connector_metadata
        return plan if isinstance(plan, StepPlan) else StepPlan()

    def _failed(self, call: str) -> None:
        self._stats.count("errors")
        log.exception("EmberKV: %s failed; the engine goes on without it", call)

    def _client(
        self,
        shape: PageShape,
        part: int,
        job: str,
        seconds: float,
        engine: EngineInfo | None = None,
    ) -> SyncClient:
        """A session whose calls cost at most `seconds` each."""
        client = SyncClient(
            self._settings.socket_path,
            shape.namespace,
            part=part,
            engine=engine,
            client_name=f"vllm {job} pid {os.getpid()}",
            timeout_seconds=seconds,
        )
        self._clients.append(client)
        return client

    def _engine_info(self, shape: PageShape) -> EngineInfo | None:
        """How routers find this engine; None unless its own address is configured."""
        if not self._settings.engine_url:
            return None
        model, parallel = self._vllm_config.model_config, self._vllm_config.parallel_config
        # Of engines without experts each rank is told that it is the only one; the index stays.
        rank = int(getattr(parallel, "data_parallel_index", parallel.data_parallel_rank))
        endpoints = event_endpoints(
            getattr(self._vllm_config, "kv_events_config", None), self._settings.engine_url, rank
        )
        return EngineInfo(
            engine_id=str(self._kv_transfer_config.engine_id),
            url=self._settings.engine_url,
            model=str(model.served_model_name or model.model),
            namespace_id=shape.namespace.id,
            block_tokens=shape.block_tokens,
            role=self._settings.role,
            dp_rank=rank,
            events_endpoint=endpoints.events,
            replay_endpoint=endpoints.replay,
            engine_block_tokens=shape.told_group.page_tokens,
        )


def _pipeline_stage() -> int:
    from vllm.distributed.parallel_state import get_pp_group

    return int(get_pp_group().rank_in_group)


def _tensor_parallel_rank() -> int:
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())
