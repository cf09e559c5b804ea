"""A client of an LMCache server: `python -m benchmarks._peer_lmcache PORT`.

The client is that of LMCache's own `lmcache bench server --mode cpu --transfer-mode
lmcache_driven`: the server copies between its cache and the client's paged tensors, which lie in
POSIX shared memory. There is no other way in, so blocks of every size are pages: 16 tokens over as
many layers of 64 KiB as they need. Pages lie in a row, which only helps LMCache.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from benchmarks._workers import serve

BATCH = 32
LAYER_BYTES = 64 * 1024
PAGE_TOKENS, PAGES, HEADS, DIM = 16, 96, 8, 128
HIT_SECONDS = 10.0


class LmcachePeer:
    """One request of 32 chunks is a batch."""

    def __init__(self, port: str) -> None:
        self._url = f"tcp://127.0.0.1:{port}"
        self._client: Any = None
        self._numbers = itertools.count(os.getpid() * 1000)
        self._kept: list[Any] = []

    def prepare(self, block_bytes: int, kept_chains: int, region_bytes: int) -> None:
        del region_bytes  # the store's own client measures plain copies
        self.close()
        helpers, client, config = (
            import_module(f"lmcache.cli.commands.bench.server_bench.{name}")
            for name in ("helpers", "client", "config")
        )
        layers = block_bytes // LAYER_BYTES
        # Two clients, or one with other layers, must not be taken for the same engine.
        names: Any = helpers
        names._INSTANCE_ID_BASE = os.getpid()
        names._MODEL_NAME = f"bench-{layers}"
        self._client = client.ServerBenchClient(
            config.BenchConfig(
                rpc_url=self._url,
                http_url="",
                mode="cpu",
                transfer_mode="lmcache_driven",
                tp_size=1,
                use_mla=False,
                num_tokens=BATCH * PAGE_TOKENS,
                kvcache_shape_spec=f"(2,{PAGES},{PAGE_TOKENS},{HEADS},{DIM}):float16:{layers}",
                num_blocks=PAGES,
                block_size=PAGE_TOKENS,
            ),
            lambda text: None,
        )
        self._client.start()
        self._batch_bytes = BATCH * block_bytes
        self._kept = [self._request() for _ in range(kept_chains)]
        self._next_kept = itertools.cycle(self._kept)

    def put(self, batches: int) -> dict[str, Any]:
        requests = [self._request() for _ in range(batches)]
        taken = self._timed(self._store, requests)
        for request in requests:
            self._client.end_session(request)
        return taken

    def keep(self) -> None:
        for request in self._kept:
            self._store(request)

    def get(self, batches: int) -> dict[str, Any]:
        """A lookup and a retrieve each, as an engine must."""
        return self._timed(self._load, [next(self._next_kept) for _ in range(batches)])

    def check(self) -> None:
        """Compare a page that is overwritten and then got again."""
        request = self._kept[0]
        pages = slice(request.block_offset, request.block_offset + request.num_blocks)
        tensors = list(self._client._workers[0].kv_caches.values())
        before = [tensor[:, pages].clone() for tensor in tensors]
        for tensor in tensors:
            tensor[:, pages] = 0
        self._load(request)
        if not all(
            bool((tensor[:, pages] == wanted).all())
            for tensor, wanted in zip(tensors, before, strict=True)
        ):
            raise AssertionError("the peer gave other bytes than it was given")

    def close(self) -> None:
        if self._client is not None:
            for request in self._kept:
                self._client.end_session(request)
            self._kept = []
            self._client.close()
            self._client = None

    def paged_prepare(self, layers: int) -> None:
        self.prepare(layers * LAYER_BYTES, 0, 0)

    def paged_store(self) -> dict[str, Any]:
        self._kept = [self._request()]
        return self._timed(self._store, self._kept)

    def paged_load(self) -> dict[str, Any]:
        taken = self._timed(self._load, self._kept)
        self.check()
        self._client.end_session(self._kept[0])
        return taken

    def paged_close(self) -> None:
        self._kept = []
        self.close()

    def _request(self) -> Any:
        number = next(self._numbers)
        request = self._client.create_request(number, f"bench-{number}", "bench")
        if request is None or request.total_chunks != BATCH:
            raise RuntimeError(f"a request is not a batch: {request}")
        return request

    def _store(self, request: Any) -> None:
        if not self._client.store(request, 0, request.num_full_tokens).succeeded:
            raise RuntimeError("LMCache did not store a batch")

    def _load(self, request: Any) -> None:
        # A lookup right after an acknowledged store may still miss.
        until = time.monotonic() + HIT_SECONDS
        while not (found := self._client.lookup(request)).is_full_hit:
            if time.monotonic() > until:
                raise RuntimeError(f"LMCache found {found}")
        if not self._client.retrieve(request, 0, request.num_full_tokens).succeeded:
            raise RuntimeError("LMCache did not give a batch back")

    def _timed(self, step: Callable[[Any], None], requests: Sequence[Any]) -> dict[str, Any]:
        begun = time.monotonic()
        for request in requests:
            step(request)
        ended = time.monotonic()
        return {"byte_count": len(requests) * self._batch_bytes, "begun": begun, "ended": ended}


if __name__ == "__main__":
    peer = LmcachePeer(sys.argv[1])
    names = [name for name in vars(LmcachePeer) if not name.startswith("_")]
    try:
        serve({name: getattr(peer, name) for name in names})
    finally:
        peer.close()  # or its shared memory stays
