"""Pages of SGLang's host pool into a small daemon and back, and what goes wrong on the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from client_sdk import SyncClient
from client_sdk.engine.sglang_backend.lanes import HostPages
from client_sdk.engine.sglang_backend.settings import BackendSettings
from client_sdk.engine.sglang_backend.stats import BackendStats
from client_sdk.engine.sglang_backend.transfer import PageTransfer
from client_sdk.engine.weights import UnsupportedEngineError
from emberkv_proto.layout import Group, GroupKind, Namespace
from emberkv_proto.types import BlockHash, Source
from emberkv_proto.wire import Method
from tests.helpers.fake_daemon import FakeDaemon, Fault
from tests.helpers.sglang_pools import MHATokenToKVPoolHost

PAGES = 6
HASHES = [BlockHash(bytes([i]) * 32) for i in range(1, PAGES + 1)]
SETTINGS = BackendSettings(load_seconds=30.0, timeout_seconds=2.0)


class Rig:
    """A pool of eight pages and a transfer to a daemon of so many slots."""

    def __init__(
        self,
        daemon: FakeDaemon,
        layout: str = "page_first",
        settings: BackendSettings = SETTINGS,
    ) -> None:
        self.daemon = daemon
        self.pool = MHATokenToKVPoolHost(layout=layout)
        self.pool.fill(1)
        self.pages = HostPages(self.pool, is_mla=False)
        namespace = Namespace(
            model="m",
            weights_id="w",
            kv_dtype="bfloat16",
            layout_fingerprint=layout,
            block_tokens=self.pool.page_size,
            groups=(Group(GroupKind.FULL, 2, self.pages.page_bytes),),
        )
        self.stats = BackendStats(exports=False)
        clients = [
            SyncClient(daemon.socket_path, namespace, timeout_seconds=settings.timeout_seconds)
            for _ in range(3)
        ]
        self.transfer = PageTransfer(*clients, settings, self.stats)

    def indices(self, first: int, pages: int = PAGES) -> torch.Tensor:
        size = self.pool.page_size
        return torch.arange(first * size, (first + pages) * size)

    def save(self, hashes: list[BlockHash] = HASHES, first: int = 0) -> list[bool]:
        pages = self.pages.lanes(self.indices(first, len(hashes)), len(hashes))
        return self.transfer.save(hashes, None, pages)

    def load(self, hashes: list[BlockHash] = HASHES, first: int = 0) -> int:
        pages = self.pages.lanes(self.indices(first, len(hashes)), len(hashes))
        return self.transfer.load(hashes, pages)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path / "d.sock") as daemon:
        yield daemon


@pytest.fixture
def rig(daemon: FakeDaemon) -> Iterator[Rig]:
    rig = Rig(daemon)
    yield rig
    rig.transfer.check_integrity()
    rig.transfer.close()


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_pages_come_back_to_other_places_as_sglang_flattens_them(
    daemon: FakeDaemon, layout: str
) -> None:
    rig = Rig(daemon, layout)
    right = [rig.pool.page(number) for number in range(PAGES)]
    assert rig.save() == [True] * PAGES
    flat = [bytearray(rig.pages.page_bytes) for _ in range(PAGES)]
    lanes = [[torch.frombuffer(page, dtype=torch.uint8).numpy()] for page in flat]
    assert rig.transfer.load(HASHES, lanes) == PAGES
    assert [bytes(page) for page in flat] == right
    rig.pool.fill(2)
    assert rig.load(first=2) == PAGES
    assert [rig.pool.page(2 + number) for number in range(PAGES)] == right
    rig.transfer.close()


def test_a_batch_is_a_stage_and_a_commit_or_one_lease(rig: Rig) -> None:
    rig.save()
    rig.transfer.found(HASHES)
    rig.load()
    beside = (Method.HELLO, Method.HEARTBEAT, Method.RELEASE)
    calls = [method for method in rig.daemon.seen if method not in beside]
    assert calls == [Method.STAGE, Method.COMMIT, Method.ACQUIRE, Method.ACQUIRE]


def test_pages_that_are_there_are_kept_without_a_copy(rig: Rig) -> None:
    assert rig.save() == rig.save() == [True] * PAGES
    counts = rig.stats.counts
    assert (counts["saved_pages"], counts["present_pages"]) == (PAGES, PAGES)


def test_a_hole_ends_the_hit(rig: Rig) -> None:
    rig.save(HASHES[:3])
    rig.save(HASHES[4:], first=4)
    assert rig.transfer.found(HASHES) == rig.load() == 3
    assert rig.stats.counts["failed_pages"] == PAGES - 3
    assert rig.transfer.found([]) == 0


def test_a_page_of_other_bytes_ends_the_load(rig: Rig) -> None:
    rig.save()
    rig.daemon.flip_byte(HASHES[2])
    assert rig.transfer.found(HASHES) == PAGES
    assert rig.load() == 2
    assert rig.stats.counts["corrupt_pages"] == 1


def test_pages_that_come_late_are_waited_for(rig: Rig) -> None:
    rig.save()
    rig.daemon.ready_at_once = 1
    assert rig.transfer.found(HASHES) == PAGES
    rig.pool.fill(2)
    assert rig.load() == PAGES


@pytest.mark.parametrize(("peer_seconds", "found"), [(10.0, PAGES), (0.0, 2)])
def test_what_peers_may_have_counts_once_it_has_come(
    daemon: FakeDaemon, peer_seconds: float, found: int
) -> None:
    rig = Rig(daemon, settings=replace(SETTINGS, peer_seconds=peer_seconds))
    rig.save()
    daemon.ready_at_once, daemon.late_source = 2, Source.PEER
    assert rig.transfer.found(HASHES) == found
    daemon.late_source = Source.SSD
    assert rig.transfer.found(HASHES) == PAGES, "this node has them, and need not say more"
    rig.transfer.close()


def test_a_lookup_does_not_wait_for_a_load_that_waits_for_blocks(daemon: FakeDaemon) -> None:
    rig = Rig(daemon, settings=BackendSettings(load_seconds=60.0, timeout_seconds=30.0))
    assert rig.save() == [True] * PAGES
    daemon.ready_at_once = 0
    is_waiting, may_come = threading.Event(), threading.Event()
    answered: list[bool] = []

    def hold_back(frame: bytes) -> bytes:
        is_waiting.set()
        answered.append(may_come.wait(60))
        return frame

    daemon.faults[Method.WAIT] = hold_back
    loaded: list[int] = []
    loading = threading.Thread(target=lambda: loaded.append(rig.load()))
    loading.start()
    try:
        assert is_waiting.wait(60)
        found = rig.transfer.found(HASHES)
        assert not answered, "it waited until the load had its blocks"
        assert found == PAGES
    finally:
        may_come.set()
        loading.join(30)
    assert loaded == [PAGES]
    rig.transfer.check_integrity()
    rig.transfer.close()


def test_a_full_store_keeps_the_head_and_says_so(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path / "full.sock", slots=4) as daemon:
        rig = Rig(daemon)
        assert rig.save() == [True] * 4 + [False] * 2
        counts = rig.stats.counts
        assert (counts["saved_pages"], counts["skipped_pages"]) == (4, 2)
        assert counts["present_pages"] == 0
        assert rig.load() == 4
        rig.transfer.close()


@pytest.mark.parametrize("fault", [lambda frame: None, lambda frame: b"x" * len(frame)])
@pytest.mark.parametrize("method", [Method.ACQUIRE, Method.STAGE, Method.COMMIT])
def test_a_daemon_that_falls_silent_or_talks_nonsense_is_a_miss(
    rig: Rig, method: Method, fault: Fault
) -> None:
    rig.save(HASHES[:2])
    rig.daemon.faults[method] = fault
    if method is Method.ACQUIRE:
        assert (rig.transfer.found(HASHES), rig.load()) == (0, 0)
        assert rig.stats.counts["failed_lookups"] == 1
    else:
        assert not any(rig.save()), "whether the daemon has them is not known"
        assert rig.stats.counts["lost_saves"] == 1
    assert rig.stats.counts["errors"] == 0
    rig.daemon.faults.clear()
    deadline = time.monotonic() + 30
    while rig.save() != [True] * PAGES:
        assert time.monotonic() < deadline, "a daemon that is back stays unused"
        time.sleep(0.05)
    while rig.load() != PAGES:
        assert time.monotonic() < deadline, "a daemon that is back stays unused"
        time.sleep(0.05)


def test_a_daemon_that_is_away_is_a_miss(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path / "d.sock") as daemon:
        rig = Rig(daemon)
        rig.save()
    assert (rig.transfer.found(HASHES), rig.load(), rig.save()) == (0, 0, [False] * PAGES)
    assert rig.stats.counts["lost_saves"] == rig.stats.counts["failed_lookups"] == 1
    rig.transfer.close()


def test_indices_that_are_not_of_the_pool_are_refused_before_a_byte_moves(rig: Rig) -> None:
    for indices, pages in ((rig.indices(6, 4), 4), (rig.indices(0, 2), 3)):
        with pytest.raises(UnsupportedEngineError):
            list(rig.pages.lanes(indices, pages))


def test_what_was_moved_is_told_once(rig: Rig) -> None:
    rig.save()
    rig.load()
    batches = rig.stats.take_batches()
    assert [batch.pages for batch in (*batches.saved, *batches.loaded)] == [PAGES, PAGES]
    assert all(b.gigabytes_per_second > 0 for b in (*batches.saved, *batches.loaded))
    assert rig.stats.take_batches().saved == []
