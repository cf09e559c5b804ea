"""Runs in SGLang's environment: the controller of one of two tensor-parallel ranks.

`python in_sglang_ranks.py RANK MEETING SOCKET WANTED...`: the two meet at the file MEETING and
agree over gloo, as those of a server do. For each WANTED (`mha:page_first`) rank 0 saves its pages,
both look, rank 1 saves its own, and both have theirs back. Prints one JSON line for each WANTED.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from in_sglang_controller import (
    PAGE_TOKENS,
    SINGLE_RANK,
    TOKENS,
    controller,
    flat,
    prefetch,
    save,
)
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel

RANKS = 2
MEET_SECONDS = 300


def one_rank(rank: int, place: str, socket_path: str, wanted: list[str]) -> None:
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{place}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=MEET_SECONDS),
    )
    with get_parallel().override(**{**SINGLE_RANK, "tp_rank": rank, "tp_size": RANKS}):
        for one in wanted:
            print(json.dumps(round_trip(rank, socket_path, one)), flush=True)
    torch.distributed.destroy_process_group()


def round_trip(rank: int, socket_path: str, wanted: str) -> dict[str, Any]:
    kind, layout = wanted.split(":")
    first = 1 + 7 * sum(wanted.encode())
    tokens = list(range(first, first + TOKENS))
    hashes = get_storage_hash_str(tokens, None, page_size=PAGE_TOKENS)
    owner = controller(socket_path, kind, layout, "pointers", torch.distributed.group.WORLD)
    host = owner.mem_pool_host
    indices = host.alloc(TOKENS)
    # Ranks of MLA hold the same bytes, others their own heads.
    generator = torch.Generator().manual_seed(first + (rank if kind == "mha" else 0))
    noise = torch.randint(
        -32768, 32767, host.kv_buffer.shape, generator=generator, dtype=torch.int16
    )
    host.kv_buffer.view(torch.int16).copy_(noise)
    right = flat(owner, indices).clone()
    saved = 0
    for writer in range(RANKS):
        if rank == writer:
            saved = save(owner, indices, hashes)
        torch.distributed.barrier()
        if writer == 0:
            between, _, where = prefetch(owner, tokens)
            if between:
                host.free(where)
            torch.distributed.barrier()
    host.kv_buffer.zero_()
    host.free(indices)
    host.alloc(PAGE_TOKENS)  # so that pages come to other places
    found, came, where = prefetch(owner, tokens)
    equal = bool(torch.equal(flat(owner, where), right)) if found else False
    owner.storage_backend.check_integrity()
    result = {
        "rank": rank,
        "wanted": wanted,
        "found_between": between,
        "saved": saved,
        "found": found,
        "came": came,
        "equal": equal,
        "counts": owner.storage_backend.stats.counts,
    }
    torch.distributed.barrier()
    owner.detach_storage_backend()
    return result


if __name__ == "__main__":
    one_rank(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
