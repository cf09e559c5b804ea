"""Runs in SGLang's environment: its radix tree over our store, by its own fixtures and assertions.

`python in_sglang_tree.py SOCKET` is a unittest program. The fixtures name SGLang's file backend;
where they do, ours is put in its place, and a directory of theirs becomes weights of that name.
"""

from __future__ import annotations

import json
import sys
import unittest
from array import array
from typing import Any
from unittest import mock

import torch
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.test.kits.unified_radix_cache import fixtures, mixins
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture, match_prefix
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures
from sglang.test.test_utils import CustomTestCase

SOCKET = ""
MARKER = 9


class Tree(UnifiedRadixCacheStorageFixtures, CustomTestCase):
    cfg = CacheConfig(page_size=16, components=(ComponentType.FULL,))

    def _init_hicache(self, cache: Any, **settings: Any) -> None:
        weights = settings.get("storage_dir")
        make = mixins.ServerArgs

        def with_our_backend(**arguments: Any) -> Any:
            if arguments.get("hicache_storage_backend") == "file":
                given = json.loads(arguments["hicache_storage_backend_extra_config"] or "{}")
                ours = {
                    "backend_name": "emberkv",
                    "module_path": "client_sdk.engine.sglang_backend",
                    "class_name": "EmberHiCache",
                    "interface_v1": 1,
                    "socket_path": SOCKET,
                    "weights_id": str(weights),
                    "timeout_seconds": 60.0,
                    "load_seconds": 60.0,
                }
                arguments["hicache_storage_backend"] = "dynamic"
                arguments["hicache_storage_backend_extra_config"] = json.dumps({**given, **ours})
            return make(**arguments)

        with mock.patch.object(mixins, "ServerArgs", with_our_backend):
            super()._init_hicache(cache, **settings)
        backend = cache.cache_controller.storage_backend
        if backend is not None:
            assert type(backend).__name__ == "EmberHiCache", backend
            self.addCleanup(backend.close)
            self.addCleanup(self._has_no_errors, backend)

    def _has_no_errors(self, backend: Any) -> None:
        backend.check_integrity()
        assert backend.stats.counts["errors"] == 0

    def _load_back(self, tree: Any, sequence: list[int]) -> tuple[int, Any, Any]:
        """How many tokens of a prefetched sequence come, and their keys and values."""
        cache, allocator, requests = tree
        self._load_back_through_admission(cache, requests, sequence)
        self._finish_pending_loads(cache)
        found = match_prefix(cache, sequence)
        keys, values = self._snapshot_full_kv(
            allocator, cache.path_device_indices(found.last_device_node)
        )
        return int(found.device_prefix_len), keys, values

    def test_a_cold_tree_gets_all_pages_bit_by_bit(self) -> None:
        place, sequence = self._make_storage_dir(), self._make_seq(1, 8)
        right_keys, right_values = self._l3_produce(place, sequence, marker=MARKER)
        tree = self._l3_consumer(place)
        self._consume_prefetch(tree[0], sequence, CacheRequestHandle("cold", 0))
        tokens, keys, values = self._load_back(tree, sequence)
        assert tokens == len(sequence)
        assert torch.equal(keys, right_keys)
        assert torch.equal(values, right_values)

    def test_under_each_prefetch_policy_what_comes_is_what_was_saved(self) -> None:
        place, sequence = self._make_storage_dir(), self._make_seq(1, 8)
        right_keys, right_values = self._l3_produce(place, sequence, marker=MARKER)
        for policy in ("best_effort", "timeout", "wait_complete"):
            tree = build_fixture(self.cfg)
            self._init_hicache(
                tree[0],
                storage_backend="file",
                storage_dir=place,
                prefetch_threshold=1,
                prefetch_policy=policy,
            )
            self._consume_prefetch(tree[0], sequence, CacheRequestHandle(policy, 0))
            if match_prefix(tree[0], sequence).host_hit_length:
                tokens, keys, values = self._load_back(tree, sequence)
                assert torch.equal(keys, right_keys[:tokens])
                assert torch.equal(values, right_values[:tokens])
            else:
                tokens = 0  # the request did not wait
            # A request that waits has everything, one that does not has whole pages.
            assert tokens == len(sequence) if policy == "wait_complete" else tokens % 16 == 0

    def test_other_weights_find_nothing(self) -> None:
        place, sequence = self._make_storage_dir(), self._make_seq(1, 8)
        self._l3_produce(place, sequence, marker=MARKER)
        cache, _, _ = self._l3_consumer(self._make_storage_dir())
        hashes = self._hashes(sequence)
        assert cache.cache_controller.storage_backend.batch_exists(hashes) == 0

    def test_a_page_that_is_not_there_trims_the_hit(self) -> None:
        place, sequence, lost = self._make_storage_dir(), self._make_seq(1, 8), 5
        size = self.cfg.page_size
        from client_sdk.engine.sglang_backend import EmberHiCache

        save = EmberHiCache.batch_set_v1

        def save_all_but_one(backend: Any, keys: Any, indices: Any, info: Any = None) -> list[bool]:
            for part in (slice(0, lost), slice(lost + 1, None)):
                tokens = indices.view(-1, size)[part].reshape(-1)
                assert all(save(backend, keys[part], tokens, info))
            return [True] * len(keys)

        with mock.patch.object(EmberHiCache, "batch_set_v1", save_all_but_one):
            right_keys, _ = self._l3_produce(place, sequence, marker=MARKER)
        tree = self._l3_consumer(place)
        self._consume_prefetch(tree[0], sequence, CacheRequestHandle("trimmed", 0))
        tokens, keys, _ = self._load_back(tree, sequence)
        assert tokens == lost * size
        assert torch.equal(keys, right_keys[: lost * size])

    def test_a_page_with_other_bytes_than_were_saved_trims_the_hit(self) -> None:
        place, sequence, bad = self._make_storage_dir(), self._make_seq(1, 8), 3
        right_keys, _ = self._l3_produce(place, sequence, marker=MARKER)
        tree = self._l3_consumer(place)
        backend = tree[0].cache_controller.storage_backend
        self._spoil(backend, self._hashes(sequence), bad)
        self._consume_prefetch(tree[0], sequence, CacheRequestHandle("spoilt", 0))
        tokens, keys, _ = self._load_back(tree, sequence)
        assert tokens == bad * self.cfg.page_size
        assert torch.equal(keys, right_keys[: bad * self.cfg.page_size])
        assert backend.stats.counts["corrupt_pages"] == 1

    def test_the_head_of_a_staged_prefetch_that_a_sibling_brought_is_trimmed(self) -> None:
        place = self._make_storage_dir()
        self._assert_sibling_head_is_trimmed(place, self._make_seq(1, 4), window_sized=False)

    def test_a_host_pool_that_only_stages_gets_all_pages(self) -> None:
        place, sequence = self._make_storage_dir(), self._make_seq(1, 8)
        _, (right_keys, right_values) = self._produce_buffer_l3(place, sequence, marker=MARKER)
        cache, allocator, _ = self._build_buffer_hicache_fixture(place)
        request = CacheRequestHandle("staged", 0)
        root = cache.root_node_handle()
        cache.prefetch_from_storage(request, root, array("q", sequence), None, None)
        self._run_prefetch_to_completion(cache, request)
        found = match_prefix(cache, sequence)
        keys, values = self._snapshot_full_kv(
            allocator, cache.path_device_indices(found.last_device_node)
        )
        assert found.device_prefix_len == len(sequence)
        assert torch.equal(keys, right_keys)
        assert torch.equal(values, right_values)

    def test_pools_beside_that_of_kv_are_refused(self) -> None:
        cache, _, _ = self._l3_consumer(self._make_storage_dir())
        backend = cache.cache_controller.storage_backend
        backend.register_mem_host_pool_v2(cache.cache_controller.mem_pool_host, PoolName.MAMBA)
        with self.assertRaisesRegex(Exception, "mamba.*hybrid models"):  # noqa: PT027
            backend.on_host_pools_registered()
        for call in (
            lambda: backend.batch_exists_v2([], []),
            lambda: backend.batch_get_v2([]),
            lambda: backend.batch_set_v2([]),
        ):
            with self.assertRaisesRegex(Exception, "KV pages only"):  # noqa: PT027
                call()

    def test_a_salt_and_an_extra_key_are_in_what_a_page_is_known_by(self) -> None:
        place, sequence = self._make_storage_dir(), self._make_seq(1, 4)
        self._produce_buffer_l3(place, sequence, marker=MARKER, cache_salt="tenant-a")
        cache, _, _ = self._build_buffer_hicache_fixture(place)
        backend = cache.cache_controller.storage_backend
        for found, salt, extra in ((4, "tenant-a", None), (0, "tenant-b", None), (0, None, None)):
            hashes = self._hashes(sequence, salt, extra)
            assert backend.batch_exists(hashes) == found, (salt, extra)
        assert backend.batch_exists(self._hashes(sequence, None, "tenant-a")) == 0

    def _hashes(
        self, sequence: list[int], salt: str | None = None, extra: str | None = None
    ) -> list[str]:
        from sglang.srt.mem_cache.radix_cache import RadixKey
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        key = RadixKey(array("q", sequence), extra_key=extra, cache_salt=salt)
        return list(get_storage_hash_str(key, None, page_size=self.cfg.page_size))

    def _spoil(self, backend: Any, hashes: list[str], number: int) -> None:
        """Change one byte of a block in the daemon's pool, behind its back."""
        with backend._transfer._saver.acquire(backend._hashes(hashes)) as lease:
            pool = lease._session.pool
            slot = pool.writable(lease._offsets[number])
            slot[100] ^= 0xFF


if __name__ == "__main__":
    SOCKET = sys.argv.pop(1)
    fixtures.get_device = lambda: "cpu"
    unittest.main(verbosity=2)
