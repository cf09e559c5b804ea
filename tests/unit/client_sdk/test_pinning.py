"""Pools are registered with a GPU's driver beside the copies, chunk by chunk, and given back."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable

import pytest

from client_sdk import pinning
from client_sdk.attached_pool import AttachedPool
from client_sdk.engine.vllm_connector.device import CudaRegistry
from client_sdk.pinning import PoolPinning
from tests.helpers.anonymous_pool import AnonymousPool
from tests.helpers.cluster import wait_until
from tests.helpers.recorded_cuda import RecordedCuda

CHUNK = 1 << 16
SECONDS = 30.0


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "PIN_CHUNK_BYTES", CHUNK)


def fresh_pool(size: int, part_bytes: int = 4096) -> AttachedPool:
    with AnonymousPool(size) as memory:
        return AttachedPool(memory.descriptor, size, part_bytes)


def counting() -> tuple[list[None], Callable[[], None]]:
    failures: list[None] = []
    return failures, lambda: failures.append(None)


def begin(pinned: PoolPinning, pool: AttachedPool) -> None:
    with pinned.use(pool):
        pass


def test_a_pool_is_registered_in_chunks_from_its_begin_to_its_end_and_given_back() -> None:
    cuda, (failures, failed) = RecordedCuda(), counting()
    pool = fresh_pool(3 * CHUNK + 8192)
    pinned = PoolPinning(CudaRegistry(0, cuda), failed)
    begin(pinned, pool)
    wait_until(lambda: pinned.pinned_bytes == pool.pool_bytes, SECONDS)
    start = pool.mapping.address
    assert cuda.asked == [
        (start, CHUNK),
        (start + CHUNK, CHUNK),
        (start + 2 * CHUNK, CHUNK),
        (start + 3 * CHUNK, 8192),
    ]
    begin(pinned, pool)
    pinned.check_integrity()
    pinned.close()
    pinned.close()
    assert not cuda.registered
    assert len(cuda.asked) == 4
    assert not failures
    begin(pinned, pool)
    assert len(cuda.asked) == 4, "pinned after the close"
    pinned.check_integrity()


def test_copies_go_on_while_the_pool_is_being_registered() -> None:
    go_on = threading.Event()
    cuda = RecordedCuda(before_register=lambda number: _expect(go_on.wait(SECONDS)))
    pool = fresh_pool(2 * CHUNK)
    pinned = PoolPinning(CudaRegistry(0, cuda), lambda: None)
    with pinned.use(pool):
        pool.writable(0)[:3] = b"abc"
        assert pinned.pinned_bytes == 0
    go_on.set()
    wait_until(lambda: pinned.pinned_bytes == 2 * CHUNK, SECONDS)
    assert bytes(pool.readable(0)[:3]) == b"abc"
    pinned.close()
    assert not cuda.registered


def _expect(came: bool) -> None:
    assert came


def test_a_chunk_that_the_driver_refuses_is_told_once_and_what_was_taken_is_given_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cuda, (failures, failed) = RecordedCuda(refused={2, 3}), counting()
    pinned = PoolPinning(CudaRegistry(0, cuda), failed)
    pools = [fresh_pool(4 * CHUNK), fresh_pool(CHUNK)]
    with caplog.at_level(logging.WARNING, "emberkv.pinning"):
        begin(pinned, pools[0])
        wait_until(lambda: len(failures) == 1, SECONDS)
        assert pinned.pinned_bytes == 2 * CHUNK
        assert len(cuda.asked) == 3, "no chunk is tried after one that was refused"
        begin(pinned, pools[0])
        begin(pinned, pools[1])  # another daemon's, refused as well
        wait_until(lambda: len(failures) == 2, SECONDS)
    wait_until(lambda: not cuda.registered, SECONDS)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "ulimit -l" in caplog.text
    pinned.check_integrity()
    pinned.close()
    assert len(cuda.asked) == 4


def test_a_close_waits_for_the_chunk_under_way_and_begins_no_other() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hold(number: int) -> None:
        if number == 1:
            begun.set()
            assert go_on.wait(SECONDS)

    cuda, pool = RecordedCuda(before_register=hold), fresh_pool(3 * CHUNK)
    pinned = PoolPinning(CudaRegistry(0, cuda), lambda: None)
    begin(pinned, pool)
    assert begun.wait(SECONDS)
    closer = threading.Thread(target=pinned.close)
    closer.start()
    closer.join(0.2)
    assert closer.is_alive(), "closed while the driver registered a chunk"
    go_on.set()
    closer.join(SECONDS)
    assert not closer.is_alive()
    assert len(cuda.asked) == 2
    assert not cuda.registered


def test_a_close_waits_for_copies_and_gives_up_on_one_that_does_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, pool = RecordedCuda(), fresh_pool(CHUNK)
    pinned = PoolPinning(CudaRegistry(0, cuda), lambda: None)
    with pinned.use(pool):
        wait_until(lambda: pinned.pinned_bytes == CHUNK, SECONDS)
        closer = threading.Thread(target=pinned.close)
        closer.start()
        closer.join(0.2)
        assert closer.is_alive()
        assert cuda.registered, "unregistered under a copy"
    closer.join(SECONDS)
    assert not cuda.registered

    monkeypatch.setattr(pinning, "CLOSE_SECONDS", 0.1)
    stuck = PoolPinning(CudaRegistry(0, cuda), lambda: None)
    with stuck.use(pool):
        wait_until(lambda: stuck.pinned_bytes == CHUNK, SECONDS)
        stuck.close()
        assert cuda.registered, "a copy may still run on it"


def test_a_daemons_old_pool_is_given_back_when_its_last_copy_is_over() -> None:
    cuda = RecordedCuda()
    old, new = fresh_pool(2 * CHUNK), fresh_pool(3 * CHUNK)
    pinned = PoolPinning(CudaRegistry(0, cuda), lambda: None)
    with pinned.use(old):
        wait_until(lambda: pinned.pinned_bytes == 2 * CHUNK, SECONDS)
        begin(pinned, new)
        wait_until(lambda: pinned.pinned_bytes == 3 * CHUNK, SECONDS)
        assert old.mapping.address in cuda.registered
        with pinned.use(old):  # a lease of before; no reason to pin it again
            pinned.check_integrity()
    address = old.mapping.address
    wait_until(lambda: address not in cuda.registered, SECONDS)
    assert len(cuda.registered) == 3
    gone = weakref.ref(old.mapping)
    del old
    wait_until(lambda: (gc.collect(), gone() is None)[1], SECONDS)
    pinned.close()
    assert not cuda.registered


def test_a_pool_that_no_session_has_any_more_is_given_back_without_another() -> None:
    cuda = RecordedCuda()
    with AnonymousPool(2 * CHUNK) as memory:
        sessions = [AttachedPool(memory.descriptor, 2 * CHUNK, 4096) for _ in range(2)]
    gone = weakref.ref(sessions[0].mapping)
    pinned = PoolPinning(CudaRegistry(0, cuda), lambda: None)
    for pool in (*sessions, *sessions):
        begin(pinned, pool)
    del pool
    wait_until(lambda: pinned.pinned_bytes == 2 * CHUNK, SECONDS)
    sessions.pop()
    gc.collect()
    assert pinned.pinned_bytes == 2 * CHUNK, "given back under a session that lasts"
    sessions.clear()
    wait_until(lambda: (gc.collect(), gone() is None)[1], SECONDS)
    assert not cuda.registered
    pinned.check_integrity()
    pinned.close()


def test_of_a_pool_that_no_session_has_any_more_no_other_chunk_is_registered() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hold(number: int) -> None:
        begun.set()
        assert go_on.wait(SECONDS)

    cuda, pool = RecordedCuda(before_register=hold), fresh_pool(3 * CHUNK)
    gone = weakref.ref(pool.mapping)
    pinned = PoolPinning(CudaRegistry(0, cuda), lambda: None)
    begin(pinned, pool)
    assert begun.wait(SECONDS)
    del pool
    gc.collect()
    assert gone() is not None, "unmapped while the driver registers it"
    go_on.set()
    wait_until(lambda: (gc.collect(), gone() is None)[1], SECONDS)
    assert len(cuda.asked) == 1
    pinned.close()


def test_a_chunk_that_is_not_given_back_keeps_no_other_from_it() -> None:
    cuda, (failures, failed) = RecordedCuda(), counting()
    pool = fresh_pool(3 * CHUNK)
    pinned = PoolPinning(CudaRegistry(0, cuda), failed)
    begin(pinned, pool)
    wait_until(lambda: pinned.pinned_bytes == 3 * CHUNK, SECONDS)
    cuda.keeps = {pool.mapping.address + CHUNK}
    pinned.close()
    assert set(cuda.registered) == cuda.keeps
    assert len(failures) == 1


def test_sessions_with_one_daemon_share_what_is_mapped_and_registered() -> None:
    cuda = RecordedCuda()
    with AnonymousPool(2 * CHUNK) as memory:
        keys = AttachedPool(memory.descriptor, 2 * CHUNK, 4096)
        values = AttachedPool(memory.descriptor, 2 * CHUNK, 1000)
    assert keys.mapping is values.mapping
    assert keys.mapping is not fresh_pool(2 * CHUNK).mapping
    pinned = PoolPinning(CudaRegistry(0, cuda), lambda: None)
    begin(pinned, keys)
    begin(pinned, values)
    wait_until(lambda: pinned.pinned_bytes == 2 * CHUNK, SECONDS)
    assert len(cuda.asked) == 2
    pinned.close()
    assert not cuda.registered


def test_only_a_part_that_lies_in_two_chunks_is_split() -> None:
    pool = fresh_pool(3 * CHUNK, 8192)
    pinned = PoolPinning(CudaRegistry(0, RecordedCuda()), lambda: None)
    assert [pinned.is_split(pool, offset) for offset in (0, CHUNK - 8192, CHUNK - 4096, CHUNK)] == [
        False,
        False,
        True,
        False,
    ]
    assert not PoolPinning(None, lambda: None).is_split(pool, CHUNK - 4096)
    pinned.close()


def test_where_nothing_is_to_be_pinned_there_is_no_thread() -> None:
    before = threading.active_count()
    pinned = PoolPinning(None, lambda: None)
    begin(pinned, fresh_pool(CHUNK))
    assert threading.active_count() == before
    assert pinned.pinned_bytes == 0
    pinned.check_integrity()
    pinned.close()
