"""The DRAM tier: one mapped file of extents and slots, which outlives the daemon's process.

Layout and its crash rules are `emberkv_proto.shm_layout`'s. Only the daemon writes headers.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import blake3
import numpy as np

from emberkv_proto import __version__
from emberkv_proto.errors import AccessDeniedError, CorruptionError, PreflightError
from emberkv_proto.shm_layout import (
    EXTENT_HEADER_BYTES,
    LAYOUT_VERSION,
    POOL_HEADER_BYTES,
    POOL_WRITER_OFFSET,
    SLOT_HEADER_BYTES,
    STATE_OFFSET,
    ExtentHeader,
    PoolHeader,
    SlotHeader,
    SlotState,
    align_up,
    pack_pool_writer,
    pack_slot,
    pack_slots,
    pack_state,
    pool_layout,
    pool_writer,
    slots_per_extent,
)
from emberkv_proto.types import BlockHash, Incarnation, SaltId
from store_daemon.config import DramSection
from store_daemon.marker import UNKNOWN_WRITER, format_refusal
from store_daemon.tiers.pool_mapping import map_pool, prepare
from store_daemon.tiers.pool_pages import file_bytes, file_system_of
from store_daemon.tiers.populate import UNWATCHED, Watch
from store_daemon.tiers.slot_headers import scan_headers
from store_daemon.tiers.slots import Extent, SizeClass, Slot, SlotAllocator

log = logging.getLogger(__name__)
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_FREE = pack_state(SlotState.FREE)
_STAGED = pack_state(SlotState.STAGED)
_COMMITTED = pack_state(SlotState.COMMITTED)
_WORDS = np.dtype("<u4")
FEW_SLOTS = 6
"""Fewer headers than these are written one by one."""


class FoundSlot(NamedTuple):
    """A slot that an earlier daemon left behind. A tuple, for there may be very many."""

    slot: Slot
    block_hash: BlockHash
    parent: BlockHash | None
    salt_id: SaltId | None


class Pool:
    """The mapped pool. Not thread-safe, but views of distinct slots may be used in any thread."""

    def __init__(self, path: Path, lock_fd: int, mapping: mmap.mmap, slots: SlotAllocator) -> None:
        self.path = path
        self.slots = slots
        self._lock_fd = lock_fd
        self._mapping = mapping
        self._view = memoryview(mapping)
        self.found: list[FoundSlot] = []
        """What recovery found COMMITTED; the store takes each over or frees it."""
        self.found_staged: list[Slot] = []
        """What recovery found STAGED: nobody's blocks, though a stale writer may still write."""
        self.is_recovered = False
        self.huge_bytes: int | None = None
        """In huge pages when it was made; None for one that was taken over."""

    @classmethod
    def open(
        cls,
        config: DramSection,
        node_id: str,
        incarnation: Incarnation,
        accepts: Callable[[SizeClass], bool],
        boot_id: bytes | None = None,
        watch: Watch = UNWATCHED,
    ) -> Pool:
        """Take over the pool file of an earlier life, or make a new one.

        `accepts` says whether a size class found in the file is still known. A file of another
        boot, node or geometry is replaced by a new one, never resized: engines may still map it.

        Raises:
            AccessDeniedError: another daemon uses the file.
            PreflightError: the file system has no room for it or refuses it, or the file is no
                pool, or one of another version's layout.
            PopulateStoppedError: the watch said so.
        """
        count = config.capacity_bytes // config.extent_bytes
        boot = read_boot_id() if boot_id is None else boot_id
        node = blake3.blake3(node_id.encode()).digest()[:16]
        try:
            file_system = file_system_of(config.path.parent)
            fd = _open_locked(config.path)
        except OSError as error:
            raise PreflightError(
                f"pool file {config.path} cannot be opened: {error.strerror}"
            ) from None
        size = file_bytes(file_system, config.extent_bytes, count)
        try:
            _refuse_foreign(fd, config.path)
            is_ours = _is_ours(fd, size, config.extent_bytes, count, boot, node)
            if not is_ours:
                fd = _replace(config.path, fd)
                os.ftruncate(fd, size)
            mapping = map_pool(fd, size, config.path)
            try:
                huge = prepare(fd, mapping, config, file_system, is_ours, watch)
            except BaseException:
                mapping.close()
                raise
        except BaseException:
            os.close(fd)
            raise
        pool = cls(config.path, fd, mapping, SlotAllocator(config.extent_bytes, count))
        if is_ours:
            pool._scan(accepts)
            pool.is_recovered = True
        header = PoolHeader(config.extent_bytes, count, incarnation, boot, node).pack()
        pool._view[: len(header)] = header
        writer = pack_pool_writer(__version__)
        pool._view[POOL_WRITER_OFFSET : POOL_WRITER_OFFSET + len(writer)] = writer
        pool.huge_bytes = huge
        return pool

    @property
    def size_bytes(self) -> int:
        return len(self._mapping)

    def open_for_client(self) -> int:
        """A new descriptor of the file to pass on. It must not be the locked one: a client that
        outlives the daemon would hold the lock. The caller closes it."""
        return os.open(f"/proc/self/fd/{self._lock_fd}", os.O_RDWR | os.O_CLOEXEC)

    def open_for_agents(self) -> int:
        """The locked descriptor once more, for processes of ours that write: the next life waits
        until the last of them has ended. The caller closes it."""
        return os.dup(self._lock_fd)

    def view(self) -> memoryview:
        """The whole file. Release it before `close`."""
        return self._view[:]

    def payload(self, slot: Slot) -> memoryview:
        return self._view[slot.offset : slot.offset + slot.payload_bytes]

    def slot_view(self, slot: Slot) -> memoryview:
        """The payload and its padding up to the slot's end."""
        return self._view[slot.offset : slot.offset + align_up(slot.payload_bytes)]

    def take(self, size_class: SizeClass) -> Slot | None:
        """A slot marked STAGED, from a carved extent or a fresh one; None when there is none."""
        slot = self.slots.take(size_class)
        if slot is None:
            extent = self.slots.carve(size_class)
            if extent is None:
                return None
            self._write_extent(extent)
            slot = self.slots.take(size_class)
            assert slot is not None
        self._set_state(slot, _STAGED)
        return slot

    def take_run(self, size_class: SizeClass, count: int) -> list[Slot]:
        """As `take`, up to `count` slots at once: neighbours in the file as far as there are."""
        taken = self.slots.take_run(size_class, count)
        while len(taken) < count and (extent := self.slots.carve(size_class)) is not None:
            self._write_extent(extent)
            taken += self.slots.take_run(size_class, count - len(taken))
        for run in neighbours(taken):
            self._set_states(run, SlotState.STAGED)
        return taken

    def commit(
        self,
        slot: Slot,
        block_hash: BlockHash,
        parent: BlockHash | None,
        checksum: int,
        salt_id: SaltId | None = None,
    ) -> None:
        """Publish the slot: header first, the state word last."""
        slot.checksum = checksum
        extent = slot.extent
        header = pack_slot(
            SlotState.STAGED,
            block_hash,
            parent,
            extent.size_class.payload_bytes,
            checksum,
            extent.generation,
            salt_id,
        )
        at = extent.headers_offset + slot.number * SLOT_HEADER_BYTES
        view = self._view
        view[at : at + len(header)] = header
        view[at + STATE_OFFSET : at + STATE_OFFSET + 4] = _COMMITTED

    def commit_run(
        self,
        slots: Sequence[Slot],
        hashes: Sequence[BlockHash],
        parents: Sequence[BlockHash | None],
        checksums: Sequence[int],
    ) -> None:
        """`commit` for each slot; of blocks that are no tenant's."""
        start = 0
        for run in neighbours(slots):
            stop = start + len(run)
            if len(run) < FEW_SLOTS:
                for number in range(start, stop):
                    self.commit(slots[number], hashes[number], parents[number], checksums[number])
            else:
                self._write_run(run, hashes[start:stop], parents[start:stop], checksums[start:stop])
            start = stop

    def unlink(self, slot: Slot) -> None:
        """Mark the slot FREE in the file; the bytes stay untouched until it is given back."""
        extent = slot.extent
        extent.occupants.pop(slot.number, None)
        at = extent.headers_offset + slot.number * SLOT_HEADER_BYTES + STATE_OFFSET
        self._view[at : at + 4] = _FREE

    def give_back(self, slot: Slot) -> None:
        """Free the slot for the next taker. Nobody may read or write its bytes any more."""
        self.unlink(slot)
        self.slots.give_back(slot)

    def give_back_run(self, slots: Sequence[Slot]) -> None:
        """`give_back` for each of many slots, which are cheap as far as they are neighbours."""
        for run in neighbours(slots):
            self._set_states(run, SlotState.FREE)
            self.slots.give_back_run(run)

    def close(self) -> None:
        """Unmap and unlock. The file stays: it is what the next daemon recovers from."""
        if self._lock_fd < 0:
            return
        self._view.release()
        self._mapping.close()
        os.close(self._lock_fd)
        self._lock_fd = -1

    def check_integrity(self) -> None:
        """Assert the allocator's books, and that each occupied slot's header says COMMITTED."""
        self.slots.check_integrity()
        for extent in self.slots.extents():
            for number, block in extent.occupants.items():
                at = extent.base + EXTENT_HEADER_BYTES + number * SLOT_HEADER_BYTES
                header = SlotHeader.unpack(self._view[at : at + SLOT_HEADER_BYTES])
                assert header.state is SlotState.COMMITTED
                assert header.block_hash == block.hash
                assert header.generation == extent.generation

    def _set_state(self, slot: Slot, word: bytes) -> None:
        at = slot.header_offset + STATE_OFFSET
        self._view[at : at + 4] = word

    def _write_run(
        self,
        run: Sequence[Slot],
        hashes: Sequence[BlockHash],
        parents: Sequence[BlockHash | None],
        checksums: Sequence[int],
    ) -> None:
        """Publish neighbours: all headers first, the state words last."""
        for slot, checksum in zip(run, checksums, strict=True):
            slot.checksum = checksum
        extent = run[0].extent
        headers = pack_slots(
            SlotState.STAGED,
            hashes,
            parents,
            extent.size_class.payload_bytes,
            checksums,
            extent.generation,
        )
        at = run[0].header_offset
        self._view[at : at + len(headers)] = headers
        self._set_states(run, SlotState.COMMITTED)

    def _set_states(self, run: Sequence[Slot], state: SlotState) -> None:
        """Of neighbours."""
        at = run[0].header_offset
        if len(run) == 1:
            self._view[at + STATE_OFFSET : at + STATE_OFFSET + 4] = pack_state(state)
            return
        headers = np.frombuffer(self._view[at : at + len(run) * SLOT_HEADER_BYTES], _WORDS)
        headers[STATE_OFFSET // 4 :: SLOT_HEADER_BYTES // 4] = state

    def _write_extent(self, extent: Extent) -> None:
        # Void the old header, then the old slot headers, then write the new one: a crash in
        # between leaves a free extent.
        base, end = extent.base, EXTENT_HEADER_BYTES + extent.slot_count * SLOT_HEADER_BYTES
        self._view[base : base + 128] = bytes(128)
        self._view[base + EXTENT_HEADER_BYTES : base + end] = bytes(end - EXTENT_HEADER_BYTES)
        size = extent.size_class
        header = ExtentHeader(
            size.namespace_id,
            size.part,
            size.payload_bytes,
            size.slot_bytes,
            extent.slot_count,
            extent.generation,
        ).pack()
        self._view[base : base + len(header)] = header

    def _scan(self, accepts: Callable[[SizeClass], bool]) -> None:
        """Find every COMMITTED slot by its headers. O(slots)."""
        for number in range(self.slots.extent_count):
            base = POOL_HEADER_BYTES + number * self.slots.extent_bytes
            try:
                header = ExtentHeader.unpack(bytes(self._view[base : base + 128]))
            except CorruptionError:
                continue
            size = SizeClass(header.namespace_id, header.part, header.payload_bytes)
            fits = slots_per_extent(self.slots.extent_bytes, max(size.payload_bytes, 1))
            if fits == 0 or header.slot_count != fits or not accepts(size):
                continue
            extent = self.slots.adopt(number, size, header.generation)
            self._scan_slots(extent)
            if extent.used_slots == 0:
                self.slots.retire(extent)

    def _scan_slots(self, extent: Extent) -> None:
        start = extent.headers_offset
        found = scan_headers(
            self._view[start : start + extent.slot_count * SLOT_HEADER_BYTES],
            extent.size_class.payload_bytes,
            extent.generation,
        )
        if found.damaged:
            log.warning("%d slots of extent %d dropped: crc", found.damaged, extent.number)
        self.found_staged += self.slots.take_numbers(extent, found.staged)
        slots = self.slots.take_numbers(extent, found.committed)
        for slot, checksum in zip(slots, found.checksums, strict=True):
            slot.checksum = checksum
        self.found += map(FoundSlot, slots, found.hashes, found.parents, found.salt_ids)


def neighbours(slots: Sequence[Slot]) -> Iterator[Sequence[Slot]]:
    """The slots, in their order, cut into runs whose headers are next to each other."""
    start = 0
    while start < len(slots):
        first = slots[start]
        extent, stop = first.extent, start + 1
        next_number = first.number + 1
        while stop < len(slots):
            slot = slots[stop]
            if slot.extent is not extent or slot.number != next_number:
                break
            stop += 1
            next_number += 1
        yield slots[start:stop]
        start = stop


def read_boot_id() -> bytes:
    return bytes.fromhex(BOOT_ID.read_text().strip().replace("-", ""))


AGENTS_END_SECONDS = 10.0
"""How long a new life waits for processes of the last one, which the kernel kills with it."""


def lock_holder(fd: int) -> int | None:
    """The pid that took the flock on a file (0: in another namespace); None: it is not seen."""
    status = os.fstat(fd)
    wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        fields = line.split()
        if "FLOCK" in fields and wanted in fields:
            return int(fields[fields.index(wanted) - 1])
    return None


def _open_locked(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    deadline = time.monotonic() + AGENTS_END_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = lock_holder(fd)
            if _may_be_ending(holder) and time.monotonic() < deadline:
                time.sleep(0.02)  # its agents are being killed; until then they may write
                continue
            os.close(fd)
            who = f"pid {holder}" if holder is not None else "an unknown pid"
            raise AccessDeniedError(
                f"another daemon ({who}) uses the pool {path}; stop it or set another dram.path"
            ) from None
        return fd


def _may_be_ending(holder: int | None) -> bool:
    """Whether the process that took the lock is gone, as far as can be seen from here.

    A lock of nobody's was given back while we looked.
    """
    return holder is None or (holder > 0 and not Path("/proc", str(holder)).exists())


def _refuse_foreign(fd: int, path: Path) -> None:
    """Raises PreflightError when the file is no pool, or one that another version must read."""
    raw = os.pread(fd, POOL_HEADER_BYTES, 0)
    if not any(raw[:8]):
        return  # new, or a daemon ended before it wrote the header
    layout = pool_layout(raw)
    if layout is None:
        raise PreflightError(
            f"{path} is not a pool file, and is left as it is; move it away or set dram.path to"
            " another file"
        )
    if layout != LAYOUT_VERSION:
        writer = pool_writer(raw) or UNKNOWN_WRITER
        raise PreflightError(format_refusal(str(path), writer, layout, LAYOUT_VERSION, "dram.path"))


def _is_ours(fd: int, size: int, extent_bytes: int, count: int, boot: bytes, node: bytes) -> bool:
    if os.fstat(fd).st_size == 0:
        return False
    try:
        header = PoolHeader.unpack(os.pread(fd, 128, 0))
    except CorruptionError as error:
        log.warning("pool starts cold: %s", error)
        return False
    reasons = {
        "the machine rebooted": header.boot_id != boot,
        "it is another node's": header.node_digest != node,
        "its size changed": (header.extent_bytes, header.extent_count) != (extent_bytes, count)
        or os.fstat(fd).st_size != size,
    }
    for reason, holds in reasons.items():
        if holds:
            log.info("pool starts cold: %s", reason)
            return False
    return True


def _replace(path: Path, old_fd: int) -> int:
    """Swap the file for an empty one, holding the old one's lock until the new one is locked."""
    if os.fstat(old_fd).st_size == 0:
        return old_fd
    path.unlink()
    new_fd = _open_locked(path)
    os.close(old_fd)
    return new_fd
