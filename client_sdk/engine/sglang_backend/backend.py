"""The HiCache storage that SGLang loads: its calls, turned into batches of our blocks.

SGLang ends a server or a request on what a backend raises, so nothing of the store gets out of a
call: a miss is a miss. What the operator has to mend (settings, an engine whose pages we cannot
keep) is raised while the backend is attached.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig

from client_sdk.engine.sglang_backend.announcement import engine_info
from client_sdk.engine.sglang_backend.identity import (
    PageShape,
    page_shape,
    refuse_pools,
    refuse_split,
)
from client_sdk.engine.sglang_backend.lanes import HostPages, bytes_of
from client_sdk.engine.sglang_backend.settings import BackendSettings
from client_sdk.engine.sglang_backend.stats import BackendStats
from client_sdk.engine.sglang_backend.transfer import PageTransfer
from client_sdk.engine.weights import UnsupportedEngineError
from client_sdk.sync_client import SyncClient
from emberkv_proto.errors import InvalidRequestError, UnavailableError
from emberkv_proto.page_hashes import rooted
from emberkv_proto.types import BlockHash, EngineInfo

log = logging.getLogger("sglang.emberkv")
F = TypeVar("F", bound=Callable[..., Any])


def _guarded(missed: Callable[[Sequence[Any]], Any]) -> Callable[[F], F]:
    """What fails in a way it should not is logged, counted, and a miss; `missed` makes it."""

    def wrap(call: F) -> F:
        @functools.wraps(call)
        def guarded(self: EmberHiCache, keys: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            try:
                return call(self, keys, *args, **kwargs)
            except Exception:
                self.stats.count("errors")
                log.exception("%s failed; SGLang goes on without it", call.__name__)
                return missed(keys)

        return guarded  # type: ignore[return-value]

    return wrap


def _none_each(keys: Sequence[Any]) -> list[Any]:
    return [None] * len(keys)


def _false_each(keys: Sequence[Any]) -> list[bool]:
    return [False] * len(keys)


class EmberHiCache(HiCacheStorage):  # type: ignore[misc]
    """Keeps the engine's KV pages in the node's store daemon, and finds them there again.

    One instance in each rank. Set `interface_v1` to 1, so that pages are copied straight between
    the host pool and the store.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any]) -> None:
        """Raises ConfigError: wrong settings. UnsupportedEngineError: ranks we cannot keep."""
        self._config = storage_config
        self._settings = BackendSettings.of(storage_config.extra_config or {})
        refuse_split(storage_config)
        self.stats = BackendStats(exports=bool(storage_config.enable_storage_metrics))
        self._pools: set[str] = set()
        self._pages: HostPages | None = None
        self._shape: PageShape | None = None
        self._transfer: PageTransfer | None = None

    # ---- attach and detach ----

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the host pool, and connect. A daemon that is away is a warning.

        Raises:
            UnsupportedEngineError: pages that we cannot keep.
            AccessDeniedError, LayoutMismatchError, InvalidRequestError: the daemon will not have
                us; no retry would mend it.
        """
        super().register_mem_pool_host(mem_pool_host)
        pages = HostPages(mem_pool_host, is_mla=self._config.is_mla_model)
        shape = page_shape(
            self._config,
            mem_pool_host,
            self._settings.weights_id,
            _server_args(),
            pages.page_bytes,
        )
        self.close()
        seeker = self._client(shape, "look up", None)
        loader = self._client(shape, "load", self._engine_info(shape))
        saver = self._client(shape, "save", None)
        transfer = PageTransfer(seeker, loader, saver, self._settings, self.stats)
        try:
            transfer.connect()
        except UnavailableError as error:
            log.warning("EmberKV: SGLang starts without its store: %s", error)
        except BaseException:
            transfer.close()
            raise
        self._pages, self._shape, self._transfer = pages, shape, transfer
        log.info(
            "EmberKV: namespace %s, pages of %d tokens and %d bytes, part %d",
            shape.namespace.id.hex(),
            shape.page_tokens,
            shape.page_bytes,
            shape.part,
        )

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Raises UnsupportedEngineError for a pool that comes after the attach, unless of KV."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._pools.add(str(host_pool_name))

    def on_host_pools_registered(self) -> None:
        """Raises UnsupportedEngineError for engines with more pools than that of their KV."""
        try:
            refuse_pools(sorted(self._pools))
        except UnsupportedEngineError:
            self.close()  # SGLang does not, once the pools are told
            raise

    def close(self) -> None:
        """Hang up. What is in the store stays there. Idempotent."""
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.close()

    def clear(self) -> None:
        """Not done from here: the store is shared by engines."""
        namespace = self._shape.namespace.id.hex() if self._shape is not None else "ID"
        log.warning(
            "the store is shared; clear what is this engine's with: emberkv clear --namespace %s",
            namespace,
        )

    def get_stats(self) -> Any:
        """SGLang's StorageMetrics of the batches since the last call."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        batches = self.stats.take_batches()
        return StorageMetrics(
            prefetch_pgs=[batch.pages for batch in batches.loaded],
            backup_pgs=[batch.pages for batch in batches.saved],
            prefetch_bandwidth=[batch.gigabytes_per_second for batch in batches.loaded],
            backup_bandwidth=[batch.gigabytes_per_second for batch in batches.saved],
        )

    # ---- lookups ----

    @_guarded(lambda keys: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many leading pages can be had."""
        return self._need_transfer().found(self._hashes(keys))

    def exists(self, key: str) -> bool:
        return bool(self.batch_exists([key]))

    # ---- pages of the host pool (interface v1) ----

    @_guarded(_false_each)
    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Fill pages of the host pool; True for those that hold what their keys stand for."""
        pages = self._need_pages().lanes(host_indices, len(keys))
        filled = self._need_transfer().load(self._hashes(keys), pages)
        return [number < filled for number in range(len(keys))]

    @_guarded(_false_each)
    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Save pages of the host pool; True for those that the store has now."""
        if self._need_shape().is_writer is False:
            return [True] * len(keys)  # another rank holds the same bytes and writes them
        pages = self._need_pages().lanes(host_indices, len(keys))
        return self._need_transfer().save(self._hashes(keys), self._parent(extra_info), pages)

    # ---- pages of the caller's ----

    @_guarded(_none_each)
    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        """Fill flat pages; None from the first one on that could not be had."""
        targets = list(target_locations or ())
        if len(targets) != len(keys):
            raise InvalidRequestError(f"{len(targets)} places for {len(keys)} pages")
        pages = [[self._flat(target)] for target in targets]
        filled = self._need_transfer().load(self._hashes(keys), pages)
        return [target if number < filled else None for number, target in enumerate(targets)]

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], [target_location])[0]

    @_guarded(lambda keys: False)
    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Save flat pages; whether the store has all of them now."""
        if self._need_shape().is_writer is False:
            return True
        kept = [value.contiguous() for value in values or ()]  # as long as their bytes are read
        if len(kept) != len(keys):
            raise InvalidRequestError(f"{len(kept)} pages for {len(keys)} keys")
        pages = [[self._flat(value)] for value in kept]
        return all(self._need_transfer().save(self._hashes(keys), None, pages))

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return bool(self.batch_set([key], [value]))

    # ---- other pools (interface v2) ----

    def batch_exists_v2(self, keys: Any, pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """Raises UnsupportedEngineError: only KV pages are kept."""
        raise _no_other_pools()

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> Any:
        """Raises UnsupportedEngineError: only KV pages are kept."""
        raise _no_other_pools()

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> Any:
        """Raises UnsupportedEngineError: only KV pages are kept."""
        raise _no_other_pools()

    def check_integrity(self) -> None:
        self.stats.check_integrity()
        if self._transfer is not None:
            self._transfer.check_integrity()
            assert self._pages is not None, "connected without a host pool"

    # ---- inside ----

    def _engine_info(self, shape: PageShape) -> EngineInfo | None:
        url = self._settings.engine_url
        if not url:
            return None
        return engine_info(shape, self._config, _server_args(), url, _dp_rank())

    def _client(self, shape: PageShape, job: str, engine: EngineInfo | None) -> SyncClient:
        return SyncClient(
            self._settings.socket_path,
            shape.namespace,
            part=shape.part,
            engine=engine,
            client_name=f"sglang {job} pid {os.getpid()}",
            timeout_seconds=self._settings.timeout_seconds,
        )

    def _hashes(self, keys: Sequence[str]) -> list[BlockHash]:
        """Raises InvalidRequestError unless each is a SHA-256 in hex."""
        try:
            pages = [bytes.fromhex(key) for key in keys]
        except ValueError:
            raise InvalidRequestError(f"a key is no page hash: {keys[:1]}...") from None
        return rooted(self._need_shape().namespace.id, pages)

    def _parent(self, extra_info: Any) -> BlockHash | None:
        """The block before a batch; SGLang tells when hicache_storage_pass_prefix_keys is set."""
        prefix = getattr(extra_info, "prefix_keys", None)
        return self._hashes(prefix[-1:])[0] if prefix else None

    def _flat(self, tensor: Any) -> Any:
        found = bytes_of(tensor)
        if len(found) != self._need_shape().page_bytes:
            raise InvalidRequestError(
                f"{len(found)} bytes, a page has {self._need_shape().page_bytes}"
            )
        return found

    def _need_shape(self) -> PageShape:
        if self._shape is None:
            raise InvalidRequestError("the host pool was not registered")
        return self._shape

    def _need_pages(self) -> HostPages:
        self._need_shape()
        assert self._pages is not None
        return self._pages

    def _need_transfer(self) -> PageTransfer:
        self._need_shape()
        if self._transfer is None:
            raise UnavailableError("the backend is closed")
        return self._transfer


def _no_other_pools() -> UnsupportedEngineError:
    return UnsupportedEngineError(
        "EmberKV keeps KV pages only: engines with other pools (hybrid and draft models) must be"
        " started without --hicache-storage-backend"
    )


def _server_args() -> Any:
    """SGLang's settings; None outside a server."""
    from sglang.srt.runtime_context import get_server_args

    try:
        return get_server_args()
    except ValueError:  # not published
        return None


def _dp_rank() -> int:
    """By which SGLang counts its replicas' publishers."""
    from sglang.srt.disaggregation.kv_events import select_kv_publisher_dp_rank
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return int(
        select_kv_publisher_dp_rank(parallel.attn_dp_size, parallel.attn_dp_rank, parallel.dp_rank)
    )
