"""A pool's page faults are taken in the background, of one pool at a time."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from client_sdk import page_entries, prefaulting
from client_sdk.attached_pool import AttachedPool
from client_sdk.page_entries import enter_beside
from client_sdk.prefaulting import PoolPrefault
from tests.helpers.anonymous_pool import AnonymousPool
from tests.helpers.cluster import wait_until

PAGE = 4096
SIZE = 64 * PAGE
SECONDS = 30.0


def populated_pool(size: int = SIZE) -> AttachedPool:
    with AnonymousPool(size) as memory:
        os.posix_fallocate(memory.descriptor, 0, size)
        return AttachedPool(memory.descriptor, size, PAGE)


def mapped_bytes(pool: AttachedPool) -> int:
    """Of the pool, what has entries in the page tables of this process."""
    first = pool.mapping.address // PAGE
    with Path("/proc/self/pagemap").open("rb") as pages:
        pages.seek(8 * first)
        entries = pages.read(8 * (pool.pool_bytes // PAGE))
    return PAGE * sum(entries[at + 7] >> 7 for at in range(0, len(entries), 8))


def prefault_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "emberkv-prefault"]


def test_a_pool_is_mapped_whole_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, begun = populated_pool(), []

    def noted(address: int, *rest: Any) -> None:
        begun.append(address)
        enter_beside(address, *rest)

    monkeypatch.setattr(prefaulting, "enter_beside", noted)
    assert mapped_bytes(pool) == 0
    mapping = PoolPrefault()
    mapping.begin(pool)
    mapping.begin(pool)
    wait_until(lambda: mapped_bytes(pool) == SIZE, "the pool is not mapped")
    mapping.begin(pool)
    mapping.close()
    assert begun == [pool.mapping.address]
    assert not prefault_threads()


def test_a_pool_that_its_daemon_has_not_populated_is_left_alone() -> None:
    with AnonymousPool(SIZE) as memory:
        pool = AttachedPool(memory.descriptor, SIZE, PAGE)
        mapping = PoolPrefault()
        mapping.begin(pool)
        assert not prefault_threads()
        mapping.close()
        assert os.fstat(memory.descriptor).st_blocks == 0


def test_another_pool_ends_the_one_before_and_the_end_ends_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, ended = [], []
    is_open = threading.Event()

    def endless(address: int, extents: object, is_over: threading.Event) -> None:
        begun.append(address)
        is_open.set()
        is_over.wait()
        ended.append(address)

    monkeypatch.setattr(prefaulting, "enter_beside", endless)
    pools = [populated_pool() for _ in range(3)]
    first, second, _ = (pool.mapping.address for pool in pools)
    mapping = PoolPrefault()
    mapping.begin(pools[0])
    assert is_open.wait(SECONDS)
    mapping.begin(pools[1])
    assert ended == [first]
    wait_until(lambda: begun == [first, second], "the second pool is not begun")
    mapping.close()
    assert ended == [first, second]
    mapping.begin(pools[2])
    assert begun == [first, second]
    assert not prefault_threads()


def test_a_pool_that_was_mapped_is_let_go_with_its_last_user() -> None:
    pool = populated_pool()
    mapping = PoolPrefault()
    mapping.begin(pool)
    wait_until(lambda: not prefault_threads(), "the pool is not mapped")
    gone = weakref.ref(pool.mapping)
    del pool
    gc.collect()
    assert gone() is None
    mapping.close()


def test_mapping_a_pool_ends_and_lets_it_go_when_nobody_else_holds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered = []
    begun, go_on = threading.Event(), threading.Event()

    def enter(address: int, length: int) -> bool:
        entered.append(address)
        begun.set()
        return go_on.wait(SECONDS)

    monkeypatch.setattr(page_entries, "STEP_BYTES", PAGE)
    monkeypatch.setattr(page_entries, "enter_pages", enter)
    pool = populated_pool()
    gone = weakref.ref(pool.mapping)
    mapping = PoolPrefault()
    mapping.begin(pool)
    assert begun.wait(SECONDS)
    del pool
    gc.collect()
    assert gone() is not None, "unmapped while its pages are entered"
    go_on.set()
    wait_until(lambda: not prefault_threads(), "a pool of nobody is mapped on")
    assert gone() is None
    assert len(entered) == 1
    mapping.close()
