from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from emberkv_proto.errors import AccessDeniedError, PreflightError
from emberkv_proto.shm_layout import STATE_OFFSET, SlotState, pack_state
from emberkv_proto.types import Incarnation
from store_daemon.block import Block, StoredNamespace
from store_daemon.config import DramSection
from store_daemon.tiers.pool import Pool, lock_holder
from store_daemon.tiers.slots import SizeClass
from tests.helpers.server_process import ROOT
from tests.helpers.store import chain, small_namespace

NAMESPACE = StoredNamespace.of(small_namespace())
SIZE = NAMESPACE.size_classes[0]
HASHES = chain(NAMESPACE.namespace, 3)
BOOT = bytes(range(16))


def open_pool(
    directory: Path,
    *,
    extents: int = 3,
    node_id: str = "node-1",
    boot: bytes = BOOT,
    accepts: Callable[[SizeClass], bool] = lambda size: True,
) -> Pool:
    config = DramSection(
        path=directory / "pool", capacity_bytes=extents * 65536, extent_bytes=65536
    )
    return Pool.open(config, node_id, Incarnation(1), accepts, boot)


def fill(pool: Pool) -> None:
    """Two committed blocks and one staged."""
    for number, block_hash in enumerate(HASHES[:2]):
        slot = pool.take(SIZE)
        assert slot is not None
        with pool.payload(slot) as payload:
            payload[:] = bytes([number + 1]) * SIZE.payload_bytes
        pool.commit(slot, block_hash, HASHES[0] if number else None, 40 + number)
    assert pool.take(SIZE) is not None


def test_committed_slots_survive_and_staged_ones_do_not(tmp_path: Path) -> None:
    pool = open_pool(tmp_path)
    fill(pool)
    pool.close()
    again = open_pool(tmp_path)
    assert again.is_recovered
    assert [f.block_hash for f in again.found] == HASHES[:2]
    assert [f.parent for f in again.found] == [None, HASHES[0]]
    assert [f.slot.checksum for f in again.found] == [40, 41]
    assert bytes(again.payload(again.found[1].slot)) == bytes([2]) * SIZE.payload_bytes
    assert len(again.found_staged) == 1
    again.check_integrity()
    again.close()


@pytest.mark.parametrize(
    "change",
    [{"boot": bytes(16)}, {"node_id": "node-2"}, {"extents": 4}],
    ids=["reboot", "another node", "another size"],
)
def test_a_pool_that_is_not_ours_is_replaced_and_old_mappings_stay_whole(
    tmp_path: Path, change: dict[str, object]
) -> None:
    pool = open_pool(tmp_path)
    fill(pool)
    client_fd = pool.open_for_client()
    pool.close()
    before = os.pread(client_fd, 3 * 65536, 0)
    cold = open_pool(tmp_path, **change)  # type: ignore[arg-type]
    assert not cold.is_recovered
    assert cold.found == []
    assert os.pread(client_fd, 3 * 65536, 0) == before
    os.close(client_fd)
    cold.close()


def test_a_broken_pool_header_starts_cold(tmp_path: Path) -> None:
    pool = open_pool(tmp_path)
    fill(pool)
    pool.close()
    with (tmp_path / "pool").open("r+b") as file:
        file.seek(20)
        file.write(b"nonsense")
    cold = open_pool(tmp_path)
    assert not cold.is_recovered
    cold.close()


@pytest.mark.parametrize("at", [0, 16, 48, 96], ids=["magic", "checksum", "hash", "parent"])
def test_a_broken_slot_header_loses_that_slot_only(tmp_path: Path, at: int) -> None:
    pool = open_pool(tmp_path)
    fill(pool)
    offset = next(pool.slots.extents()).base + 4096
    pool.close()
    with (tmp_path / "pool").open("r+b") as file:
        file.seek(offset + at)
        byte = file.read(1)
        file.seek(offset + at)
        file.write(bytes([byte[0] ^ 0x40]))
    again = open_pool(tmp_path)
    assert [f.block_hash for f in again.found] == [HASHES[1]]
    again.check_integrity()
    again.close()


def test_a_state_word_that_was_never_reached_drops_the_slot(tmp_path: Path) -> None:
    """Killed after the header and before the state word."""
    pool = open_pool(tmp_path)
    fill(pool)
    base = next(pool.slots.extents()).base + 4096
    pool.close()
    with (tmp_path / "pool").open("r+b") as file:
        file.seek(base + STATE_OFFSET)
        file.write(pack_state(SlotState.STAGED))
    again = open_pool(tmp_path)
    assert [f.block_hash for f in again.found] == [HASHES[1]]
    again.close()


def test_blocks_of_an_unknown_namespace_are_not_taken_over(tmp_path: Path) -> None:
    pool = open_pool(tmp_path)
    fill(pool)
    pool.close()
    again = open_pool(tmp_path, accepts=lambda size: False)
    assert again.is_recovered
    assert again.found == []
    assert list(again.slots.extents()) == []
    again.close()


def test_a_freed_slot_is_not_recovered(tmp_path: Path) -> None:
    pool = open_pool(tmp_path)
    fill(pool)
    slot = pool.take(SIZE)
    assert slot is not None
    pool.commit(slot, HASHES[2], None, 1)
    pool.give_back(slot)
    pool.close()
    again = open_pool(tmp_path)
    assert [f.block_hash for f in again.found] == HASHES[:2]
    again.close()


def test_an_extent_carved_anew_shows_nothing_of_its_earlier_blocks(tmp_path: Path) -> None:
    other = StoredNamespace.of(small_namespace(9000, model="other")).size_classes[0]
    pool = open_pool(tmp_path, extents=1)
    slots = [pool.take(SIZE) for _ in range(7)]
    for number, slot in enumerate(slots):
        assert slot is not None
        pool.commit(slot, chain(NAMESPACE.namespace, 7)[number], None, 1)
    for slot in slots:
        assert slot is not None
        slot.extent.occupants.clear()
        pool.slots.give_back(slot)  # the headers still say COMMITTED
    assert pool.take(other) is not None
    pool.close()
    again = open_pool(tmp_path, extents=1)
    assert again.found == []
    again.close()


def test_a_second_daemon_is_refused_by_pid(tmp_path: Path) -> None:
    pool = open_pool(tmp_path)
    with pytest.raises(AccessDeniedError, match=f"pid {os.getpid()}.*dram.path"):
        open_pool(tmp_path)
    pool.close()


def test_a_client_that_outlives_the_daemon_does_not_hold_the_lock(tmp_path: Path) -> None:
    pool = open_pool(tmp_path)
    client_fd = pool.open_for_client()
    pool.close()
    open_pool(tmp_path).close()
    os.close(client_fd)


def test_a_pool_path_that_cannot_be_opened_is_told(tmp_path: Path) -> None:
    (tmp_path / "pool").mkdir()
    with pytest.raises(PreflightError, match="cannot be opened"):
        open_pool(tmp_path)


def test_the_next_life_waits_for_processes_that_still_write(tmp_path: Path) -> None:
    """As when a daemon is killed, and its agents end a moment later."""
    holder = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.pool_holder", str(tmp_path / "pool"), "1.0"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held by a child\n"
        holder.wait(60)  # as by kill -9; its child has the lock now
        begun = time.monotonic()
        pool = open_pool(tmp_path)
        assert time.monotonic() - begun > 0.3
        pool.close()


def test_a_lock_given_back_while_its_holder_is_looked_up_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = open_pool(tmp_path)

    def look_up(fd: int) -> int | None:
        held.close()
        return lock_holder(fd)

    monkeypatch.setattr("store_daemon.tiers.pool.lock_holder", look_up)
    pool = open_pool(tmp_path)
    assert pool.found == []
    pool.close()


def test_slots_published_together_survive_as_those_published_one_by_one(tmp_path: Path) -> None:
    hashes = chain(NAMESPACE.namespace, 18)
    parents = [None, *hashes[:-1]]
    pool = open_pool(tmp_path, extents=4)
    slots = pool.take_run(SIZE, 20)
    for hole in (slots.pop(3), slots.pop(12)):
        pool.give_back(hole)
    pool.commit_run(slots, hashes, parents, range(50, 68))
    pool.give_back_run(slots[1:3] + slots[16:])
    for slot, found in ((slots[3], hashes[3]), (slots[15], hashes[15])):
        slot.extent.occupants[slot.number] = Block(found, NAMESPACE, None, [slot], [None])
    pool.check_integrity()
    pool.close()
    again = open_pool(tmp_path, extents=4)
    kept = [0, *range(3, 16)]
    assert {f.block_hash: f.parent for f in again.found} == {hashes[n]: parents[n] for n in kept}
    assert {f.block_hash: f.slot.checksum for f in again.found} == {hashes[n]: 50 + n for n in kept}
    assert {f.slot.offset for f in again.found} == {slots[n].offset for n in kept}
    assert not again.found_staged
    again.close()
