"""Runs in vLLM's environment: the connector's path for GPUs, with all but the GPU.

`python -m tests.helpers.vllm_gpu_path MODEL SOCKET` asks vLLM's own resolver for cache layouts as
on a GPU, has vLLM's own allocator make such caches in the host's memory, and sends their blocks
through a worker's half whose torch.cuda is a recording one, to a real daemon and back. Prints what
it saw as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.flex_attention import FlexAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.utils import (
    get_supported_kv_cache_layouts,
    resolve_kv_cache_layout,
)
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from client_sdk import SyncClient, pinning
from client_sdk.engine.vllm_connector import EmberConnector
from client_sdk.engine.vllm_connector.device import CudaDevice
from client_sdk.engine.vllm_connector.identity import page_shape
from client_sdk.engine.vllm_connector.pages import EnginePages
from client_sdk.engine.vllm_connector.plan import GroupLoad, LoadPlan, SavePlan
from client_sdk.engine.vllm_connector.transfer import Ended, GroupLink, WorkerHalf
from emberkv_proto.hashing import block_hashes
from tests.helpers.recorded_cuda import RecordedCuda

LAYERS, PAGE_TOKENS, PAGES, BLOCKS = 3, 16, 24, 8
SECONDS = 60.0
HANG_SECONDS = 300.0
"""What a wait that nobody ends takes."""
SPEC = FullAttentionSpec(block_size=PAGE_TOKENS, num_kv_heads=2, head_size=50, dtype=torch.bfloat16)
"""Of an odd size, so that some slots lie across the chunks that are pinned."""
BLACKWELL_FLASHINFER = [KVCacheLayout.LBHNC.name, KVCacheLayout.BLHNC.name]
"""What vLLM's FlashInfer backend says there; its module needs FlashInfer itself."""
OTHERS = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"


def config_of(model: str) -> VllmConfig:
    transfer = KVTransferConfig(
        kv_connector="EmberConnector",
        kv_connector_module_path="client_sdk.engine.vllm_connector",
        kv_role="kv_both",
    )
    config = EngineArgs(
        model=model, enforce_eager=True, kv_transfer_config=transfer
    ).create_engine_config()
    config.cache_config.block_size = PAGE_TOKENS
    return config


@contextmanager
def gpu(major: int) -> Iterator[None]:
    kind = type(current_platform)
    with (
        mock.patch.object(kind, "is_cuda", return_value=True),
        mock.patch.object(
            kind, "get_device_capability", return_value=SimpleNamespace(major=major, minor=0)
        ),
    ):
        yield


def resolved(config: VllmConfig, supported: list[str]) -> str:
    """By vLLM itself, as its engine core does."""
    config.cache_config.kv_cache_layout = None
    return str(resolve_kv_cache_layout(config, [supported], [SPEC]).name)


def resolutions(config: VllmConfig) -> dict[str, str]:
    def of(backend: type[Any]) -> list[str]:
        return [layout.name for layout in get_supported_kv_cache_layouts((backend,))]

    seen = {"cpu": resolved(config, of(CPUAttentionBackend))}
    with gpu(9):
        seen["flash attention"] = resolved(config, of(FlashAttentionBackend))
        seen["flex attention"] = resolved(config, of(FlexAttentionBackend))
    with gpu(10):
        seen["flash attention on Blackwell"] = resolved(config, of(FlashAttentionBackend))
        seen["FlashInfer on Blackwell"] = resolved(config, BLACKWELL_FLASHINFER)
    return seen


def wishes(config: VllmConfig) -> dict[str, str | None]:
    ask = EmberConnector.get_required_kvcache_layout
    seen = {"cpu": ask(config)}
    cache, attention = config.cache_config, config.attention_config
    with gpu(9):
        seen["gpu"] = ask(config)
        changes: list[tuple[str, Any, str, Any]] = [
            ("large pages", cache, "block_size", 128),
            ("quantised", cache, "cache_dtype", "fp8"),
            ("another backend", attention, "backend", AttentionBackendEnum.FLEX_ATTENTION),
            ("flash attention", attention, "backend", AttentionBackendEnum.FLASH_ATTN),
            ("a backend for each kind", attention, "backend_per_kind", {"x": None}),
            ("nonsense", config, "model_config", object()),
            ("no model", config, "model_config", None),
        ]
        for name, owner, field, value in changes:
            before = getattr(owner, field)
            object.__setattr__(owner, field, value)
            seen[name] = ask(config)
            object.__setattr__(owner, field, before)
        kind = type(config.model_config)
        for name, field, value in (
            ("latent attention", "use_mla", True),
            ("states", "is_hybrid", True),
        ):
            with mock.patch.object(kind, field, value):
                seen[name] = ask(config)
        with mock.patch.object(kind, "get_sliding_window", return_value=80):
            seen["windows"] = ask(config)
        with mock.patch.dict(sys.modules, {OTHERS: sys}):
            seen["beside others"] = ask(config)
        seen["gpu again"] = ask(config)
    return seen


def cache_config_of(config: VllmConfig, layout: str) -> KVCacheConfig:
    """What vLLM makes of its memory in this layout."""
    config.cache_config.kv_cache_layout = layout
    specs = {f"model.layers.{n}.self_attn.attn": SPEC for n in range(LAYERS)}
    groups = get_kv_cache_groups(config, dict(specs))
    memory = SPEC.page_size_bytes * LAYERS * PAGES
    cache = get_kv_cache_config_from_groups(config, groups, memory)
    cache.kv_cache_layout = layout
    assert cache.num_blocks == PAGES
    return cache


class Worker:
    """A worker's half on a recorded device, its caches as vLLM makes them."""

    def __init__(self, config: VllmConfig, layout: str, socket_path: Path) -> None:
        cache = cache_config_of(config, layout)
        self.caches = allocate_kv_cache(cache, torch.device("cpu"), KVCacheLayout[layout])
        shape = page_shape(config, cache, {"weights_id": "of the test"})
        self.namespace = shape.namespace
        pages = EnginePages(self.caches, shape.groups[0], shape.num_pages)
        self.are_whole_blocks = pages.are_whole_blocks
        self.part_bytes = self.namespace.part_bytes(0)
        clients = (SyncClient(socket_path, shape.namespace, timeout_seconds=20.0) for _ in range(2))
        self.cuda = RecordedCuda()
        links = [GroupLink(pages, *clients)]
        self.half = WorkerHalf(links, CudaDevice(0, self.cuda), 20.0, True)

    def fill(self, seed: int) -> None:
        made = torch.Generator().manual_seed(seed)
        for cache in self.caches.values():
            cache.copy_(torch.randn(cache.shape, generator=made))

    def copies(self) -> list[torch.Tensor]:
        return [cache.clone() for cache in self.caches.values()]

    def wipe(self) -> None:
        for cache in self.caches.values():
            cache.zero_()

    def await_end(self, is_over: Callable[[Ended], bool]) -> Ended:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            ended = self.half.take()
            if is_over(ended):
                return ended
            time.sleep(0.01)
        raise AssertionError("no end of it")


def round_trip(config: VllmConfig, layout: str, socket_path: Path) -> dict[str, Any]:
    worker = Worker(config, layout, socket_path)
    try:
        return _round_trip(worker)
    finally:
        worker.half.close()


def _round_trip(worker: Worker) -> dict[str, Any]:
    cuda, half = worker.cuda, worker.half
    tokens = range(BLOCKS * PAGE_TOKENS)
    hashes = tuple(block_hashes(worker.namespace.id, list(tokens), PAGE_TOKENS))
    worker.fill(1)
    before = worker.copies()
    sources = tuple(range(1, BLOCKS + 1))
    half.save([SavePlan(1, "request", 0, hashes, None, sources, None)])
    half.leave({"request"})
    begun = time.monotonic()
    ended = half.take(HANG_SECONDS)
    waits = [ended.sent == {"request"} and 1 in ended.report.saves_ended]
    stats = dict(half.take_stats().data)

    def came(targets: tuple[int, ...]) -> bool:
        return all(
            torch.equal(cache[list(targets)], old[list(sources)])
            for cache, old in zip(worker.caches.values(), before, strict=True)
        )

    worker.wipe()
    targets = tuple(range(PAGES - BLOCKS, PAGES))
    plan = LoadPlan("request", (GroupLoad(0, hashes, 0, targets),))
    half.load([plan])
    ended = half.take(HANG_SECONDS)
    waits.append(ended.received == {"request"})
    half.take(HANG_SECONDS)  # of nothing: there is nothing to wait for
    waits.append(time.monotonic() < begun + HANG_SECONDS)
    loaded = came(targets) and not ended.failed_pages
    worker.wipe()
    half.load_for_this_step([plan])
    for name in worker.caches:
        half.wait_for_layer(name)
    by_layer = came(targets)
    half.wait_for_step()
    ended = worker.await_end(lambda ended: bool(ended.received))
    by_layer = by_layer and not ended.failed_pages
    half.check_integrity()
    pool_bytes = half._links[0].saver.pool.pool_bytes
    end = time.monotonic() + SECONDS
    while half._pinning.pinned_bytes < pool_bytes and time.monotonic() < end:
        time.sleep(0.01)
    pinned, chunks = half._pinning.pinned_bytes, list(cuda.asked)
    half.close()
    return {
        "whole": worker.are_whole_blocks,
        "stats": stats,
        "waits": waits,
        "loaded": loaded,
        "by layer": by_layer,
        "pool": pool_bytes,
        "pinned": pinned,
        "chunk sizes": sorted({length for _, length in chunks}, reverse=True),
        "chunks": sum(length for _, length in chunks),
        "left": len(cuda.registered),
        "streams": cuda.streams,
        "engine waits": [what for what, about in cuda.calls if about is None].count("wait"),
        "copy waits": sum(what == "wait" and about is not None for what, about in cuda.calls),
        "part": worker.part_bytes,
        "namespace": worker.namespace.id.hex(),
    }


def main() -> None:
    model, socket_path = sys.argv[1], Path(sys.argv[2])
    pinning.PIN_CHUNK_BYTES = 1 << 16
    config = config_of(model)
    seen = {
        "resolved": resolutions(config),
        "wishes": wishes(config),
        "piecewise": [
            EmberConnector.requires_piecewise_for_cudagraph(extra)
            for extra in ({}, {"load_async": True}, {"load_async": False})
        ],
        "trips": {
            layout: round_trip(config, layout, socket_path)
            for layout in ("LBNHC", "LBHNC", "BLNHC", "BLHNC")
        },
    }
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main()
