"""Runs in SGLang's environment: its own controller saves, forgets and prefetches pages.

`python in_sglang_controller.py SOCKET WANTED...`: for each WANTED (`mha:page_first`, or
`mha:layer_first:flat` for the calls without pointers) 300 pages go through the store. Prints one
JSON line for each; a controller that does not answer ends it with queue.Empty.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel

PAGE_TOKENS = 16
PAGES = 300
TOKENS = PAGES * PAGE_TOKENS
LAYERS = 4
WAIT_SECONDS = 60.0
SINGLE_RANK = {
    "tp_rank": 0,
    "tp_size": 1,
    "pp_rank": 0,
    "pp_size": 1,
    "attn_dcp_rank": 0,
    "attn_dcp_size": 1,
}


class Allocator:
    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def get_kvcache(self) -> Any:
        return self._pool


def pools(kind: str, layout: str) -> tuple[Any, Any]:
    """SGLang's device pool, and the host pool beside it."""
    common = {
        "size": TOKENS,
        "page_size": PAGE_TOKENS,
        "dtype": torch.bfloat16,
        "layer_num": LAYERS,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    placed = {
        "host_to_device_ratio": 2.0,
        "host_size": 0,
        "page_size": PAGE_TOKENS,
        "layout": layout,
        "pin_memory": False,
        "device_capacity_tokens": TOKENS,
        "start_layer": 0,
        "end_layer": LAYERS,
    }
    if kind == "mha":
        device: Any = MHATokenToKVPool(**common, head_num=2, head_dim=32)
        info = device.get_device_pool_infos()[0].buffer_info
        return device, get_mha_host_pool_cls(info)(info, **placed)
    device = MLATokenToKVPool(**common, kv_lora_rank=64, qk_rope_head_dim=32)
    info = device.get_device_pool_infos()[0].buffer_info
    return device, MLATokenToKVPoolHost(
        info, **placed, target_layer_num=LAYERS, override_kv_cache_dim=device.kv_cache_dim
    )


def controller(
    socket_path: str, kind: str, layout: str, io: str, tp_group: Any = None
) -> HiCacheController:
    device, host = pools(kind, layout)
    extra = {
        "backend_name": "emberkv",
        "module_path": "client_sdk.engine.sglang_backend",
        "class_name": "EmberHiCache",
        "interface_v1": int(io == "pointers"),
        "socket_path": socket_path,
        "weights_id": "seeded",
        "timeout_seconds": 60.0,
        "load_seconds": 60.0,
    }
    return HiCacheController(
        Allocator(device),
        host,
        PAGE_TOKENS,
        tp_group,
        threading.Event(),
        storage_backend="dynamic",
        prefetch_threshold=PAGE_TOKENS,
        model_name="tiny",
        storage_backend_extra_config=extra,
    )


def save(owner: HiCacheController, indices: torch.Tensor, hashes: list[str]) -> int:
    owner.write_storage(indices, list(range(TOKENS)), hash_value=hashes)
    done = owner.ack_backup_queue.get(timeout=WAIT_SECONDS)
    return int(done.completed_tokens)


def prefetch(owner: HiCacheController, tokens: list[int]) -> tuple[int, int, torch.Tensor]:
    """Tokens that were found, that came, and where they are."""
    owner.prefetch("request", tokens)
    found = owner.prefetch_hit_queue.get(timeout=WAIT_SECONDS)
    if not found.storage_hit_count:
        return 0, 0, torch.empty(0)
    found.host_indices = owner.mem_pool_host.alloc(found.storage_hit_count)
    owner.prefetch_buffer.put(found)
    came = 0
    while True:
        ack = owner.ack_prefetch_queue.get(timeout=WAIT_SECONDS)
        if ack.completed_req:
            return int(found.storage_hit_count), came, found.host_indices
        came = int(ack.completed_tokens)


def flat(owner: HiCacheController, indices: torch.Tensor) -> torch.Tensor:
    """All pages as SGLang itself reads them."""
    pool = owner.mem_pool_host
    return torch.stack(
        [pool.get_data_page(int(indices[n])) for n in range(0, len(indices), PAGE_TOKENS)]
    ).view(torch.int16)


def round_trip(socket_path: str, wanted: str) -> dict[str, Any]:
    kind, layout, *more = wanted.split(":")
    io = more[0] if more else "pointers"
    # Each has tokens of its own: in one namespace or not, nothing can be there already.
    first = 1 + 7 * sum(wanted.encode())
    tokens = list(range(first, first + TOKENS))
    hashes = get_storage_hash_str(tokens, None, page_size=PAGE_TOKENS)
    owner = controller(socket_path, kind, layout, io)
    before, _, _ = prefetch(owner, tokens)
    indices = owner.mem_pool_host.alloc(TOKENS)
    generator = torch.Generator().manual_seed(first)
    buffer = owner.mem_pool_host.kv_buffer
    noise = torch.randint(-32768, 32767, buffer.shape, generator=generator, dtype=torch.int16)
    buffer.view(torch.int16).copy_(noise)
    right = flat(owner, indices).clone()
    saved, again = (save(owner, indices, hashes) for _ in range(2))
    buffer.zero_()
    owner.mem_pool_host.free(indices)
    taken = owner.mem_pool_host.alloc(PAGE_TOKENS)  # so that pages come to other places
    found, came, where = prefetch(owner, tokens)
    equal = bool(torch.equal(flat(owner, where), right)) if found else False
    # What one kind of call has saved the other one reads.
    backend = owner.storage_backend
    page = owner.mem_pool_host.get_dummy_flat_data_page()
    got = backend.get(hashes[7], page)
    crossed = got is not None and bool(torch.equal(got.view(torch.int16), right[7]))
    moved = backend.get_stats()
    backend.check_integrity()
    result = {
        "wanted": wanted,
        "before": before,
        "saved": saved,
        "again": again,
        "found": found,
        "came": came,
        "equal": equal,
        "crossed": crossed,
        "moved_somewhere": bool((where[: len(taken)] != indices[: len(taken)]).any()),
        "pages_in_stats": [sum(moved.prefetch_pgs), sum(moved.backup_pgs)],
        "counts": backend.stats.counts,
    }
    owner.detach_storage_backend()
    return result


def main() -> None:
    socket_path, *wanted = sys.argv[1:]
    with get_parallel().override(**SINGLE_RANK):
        for one in wanted:
            print(json.dumps(round_trip(socket_path, one)), flush=True)


if __name__ == "__main__":
    main()
