"""Byte layout of the pool file: the part of the contract that is not a message.

[ pool header, 4 KiB ][ extent 0 ][ extent 1 ] ...
extent = [ extent header, 4 KiB ][ slot headers, padded to 4 KiB ][ slot 0 ][ slot 1 ] ...

An extent belongs to one size class (namespace, part) and describes itself, so a daemon that comes
back finds its blocks by reading headers alone. Slots are 4 KiB aligned. Engines map the file and
use only the offsets they are given; headers are the daemon's.

A slot header is written with state STAGED, then the payload, then the checksum, and last the state
word COMMITTED: a crash at any point leaves either a whole block or one that recovery drops.
Behind its crc stands the salt id of a tenant's block, with a crc of its own among the fields; that
is 0 in nobody's block.
All numbers are little endian. `crc` covers the bytes before it, the state word taken as zero.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from emberkv_proto.errors import CorruptionError
from emberkv_proto.types import SALT_ID_BYTES, BlockHash, NamespaceId, SaltId

ALIGNMENT = 4096
POOL_MAGIC = b"EMBRPOOL"
EXTENT_MAGIC = b"EMBREXTN"
SLOT_MAGIC = 0x544F4C53
LAYOUT_VERSION = 2
"""2: checksums are XXH3-64."""

POOL_HEADER_BYTES = 4096
EXTENT_HEADER_BYTES = 4096
SLOT_HEADER_BYTES = 128

POOL_WRITER_OFFSET = 128
POOL_WRITER_BYTES = 32
"""Where the version of the program stands that made the file: ASCII, filled with zeros."""

# Of every layout there will be: the file begins with the magic and the layout's version.
_POOL_PREFIX = struct.Struct("<8sI")
_POOL = struct.Struct("<8sIIQQQ16s16s")
_EXTENT = struct.Struct("<8sIIIIQQ16s")
_SLOT = struct.Struct("<IIQQQII32s32s")
_CRC = struct.Struct("<I")
_STATE = struct.Struct("<I")
STATE_OFFSET = 4
"""Where the state word stands in a slot header."""
_CRC_BEFORE_LENGTH = zlib.crc32(struct.pack("<II", SLOT_MAGIC, 0))
_NO_PARENT = bytes(32)
_SLOTS = np.dtype(
    {
        "names": ["magic", "state", "length", "checksum", "generation", "hash", "parent", "crc"],
        "formats": ["<u4", "<u4", "<u8", "<u8", "<u8", "S32", "S32", "<u4"],
        "offsets": [0, STATE_OFFSET, 8, 16, 24, 40, 72, _SLOT.size],
        "itemsize": SLOT_HEADER_BYTES,
    }
)
"""`_SLOT` and its crc, of a slot without a salt id."""


class SlotState(IntEnum):
    FREE = 0
    STAGED = 1
    COMMITTED = 2


@dataclass(frozen=True, slots=True)
class PoolHeader:
    extent_bytes: int
    extent_count: int
    incarnation: int
    boot_id: bytes
    """16 bytes; another value means a reboot came between, and DRAM content is not ours."""
    node_digest: bytes
    """First 16 bytes of BLAKE3 of the node id: a pool of another node is refused."""

    def pack(self) -> bytes:
        body = _POOL.pack(
            POOL_MAGIC,
            LAYOUT_VERSION,
            POOL_HEADER_BYTES,
            self.extent_bytes,
            self.extent_count,
            self.incarnation,
            self.boot_id,
            self.node_digest,
        )
        return body + _CRC.pack(zlib.crc32(body))

    @staticmethod
    def unpack(raw: bytes | memoryview) -> PoolHeader:
        """Raises CorruptionError unless magic, version and crc hold."""
        body = bytes(raw[: _POOL.size])
        _check_crc(body, raw, "pool header")
        magic, version, _, extent_bytes, count, incarnation, boot, node = _POOL.unpack(body)
        if magic != POOL_MAGIC or version != LAYOUT_VERSION:
            raise CorruptionError(f"pool header: magic {magic!r} version {version} is not ours")
        return PoolHeader(extent_bytes, count, incarnation, boot, node)


def pool_layout(raw: bytes | memoryview) -> int | None:
    """The layout version of a pool file by its first bytes; None: they are not a pool's."""
    if len(raw) < _POOL_PREFIX.size:
        return None
    magic, version = _POOL_PREFIX.unpack_from(raw)
    return int(version) if magic == POOL_MAGIC else None


def pack_pool_writer(version: str) -> bytes:
    """What stands at POOL_WRITER_OFFSET, behind the pool header."""
    return version.encode("ascii", "replace")[:POOL_WRITER_BYTES].ljust(POOL_WRITER_BYTES, b"\0")


def pool_writer(raw: bytes | memoryview) -> str:
    """The version that made a pool file, by its first page; empty when it does not say."""
    text = bytes(raw[POOL_WRITER_OFFSET : POOL_WRITER_OFFSET + POOL_WRITER_BYTES]).rstrip(b"\0")
    decoded = text.decode("ascii", "replace")
    return decoded if decoded.isprintable() else ""


@dataclass(frozen=True, slots=True)
class ExtentHeader:
    namespace_id: NamespaceId
    part: int
    payload_bytes: int
    slot_bytes: int
    slot_count: int
    generation: int
    """Grows each time the extent is carved anew."""

    def pack(self) -> bytes:
        body = _EXTENT.pack(
            EXTENT_MAGIC,
            LAYOUT_VERSION,
            self.part,
            self.slot_count,
            0,
            self.payload_bytes | (self.slot_bytes << 32),
            self.generation,
            self.namespace_id,
        )
        return body + _CRC.pack(zlib.crc32(body))

    @staticmethod
    def unpack(raw: bytes | memoryview) -> ExtentHeader:
        """Raises CorruptionError unless magic, version and crc hold (a free extent is zeros)."""
        body = bytes(raw[: _EXTENT.size])
        _check_crc(body, raw, "extent header")
        magic, version, part, count, _, sizes, generation, namespace = _EXTENT.unpack(body)
        if magic != EXTENT_MAGIC or version != LAYOUT_VERSION:
            raise CorruptionError(f"extent header: magic {magic!r} version {version} is not ours")
        return ExtentHeader(
            NamespaceId(namespace), part, sizes & 0xFFFFFFFF, sizes >> 32, count, generation
        )


@dataclass(frozen=True, slots=True)
class SlotHeader:
    state: SlotState
    block_hash: BlockHash
    parent: BlockHash | None
    """None for the first block of a chain (32 zero bytes in the file)."""
    length: int
    checksum: int
    generation: int
    """The extent's; a header of an earlier carving does not match."""
    salt_id: SaltId | None = None
    """Whose quota the block counts against."""

    def pack(self) -> bytes:
        return pack_slot(
            self.state,
            self.block_hash,
            self.parent,
            self.length,
            self.checksum,
            self.generation,
            self.salt_id,
        )

    @staticmethod
    def unpack(raw: bytes | memoryview) -> SlotHeader:
        """Raises CorruptionError unless magic, state and crc hold."""
        body = bytes(raw[: _SLOT.size])
        if len(raw) < _SLOT.size + _CRC.size:
            raise CorruptionError(f"slot header: only {len(raw)} bytes")
        state = _STATE.unpack_from(body, STATE_OFFSET)[0]
        _check_crc(body[:STATE_OFFSET] + bytes(4) + body[8:], raw, "slot header")
        magic, _, length, checksum, generation, salted, _, block_hash, parent = _SLOT.unpack(body)
        if magic != SLOT_MAGIC or state > SlotState.COMMITTED:
            raise CorruptionError(f"slot header: magic {magic:#x} state {state} is not ours")
        return SlotHeader(
            SlotState(state),
            BlockHash(block_hash),
            None if parent == bytes(32) else BlockHash(parent),
            length,
            checksum,
            generation,
            _salt_id(raw, salted) if salted else None,
        )


def pack_slot(
    state: SlotState,
    block_hash: BlockHash,
    parent: BlockHash | None,
    length: int,
    checksum: int,
    generation: int,
    salt_id: SaltId | None = None,
) -> bytes:
    """`SlotHeader(...).pack()`, without the object: a daemon writes one for each block."""
    body = _SLOT.pack(
        SLOT_MAGIC,
        state,
        length,
        checksum,
        generation,
        salt_crc(salt_id) if salt_id is not None else 0,
        0,
        block_hash,
        parent or _NO_PARENT,
    )
    crc = _CRC.pack(zlib.crc32(body[8:], _CRC_BEFORE_LENGTH))
    return body + crc if salt_id is None else body + crc + salt_id


def pack_slots(
    state: SlotState,
    hashes: Sequence[BlockHash],
    parents: Sequence[BlockHash | None],
    length: int,
    checksums: Sequence[int],
    generation: int,
) -> bytes:
    """`pack_slot` for neighbours without salt ids, each filled up to SLOT_HEADER_BYTES."""
    headers = np.zeros(len(hashes), _SLOTS)
    headers["magic"] = SLOT_MAGIC
    headers["state"] = state
    headers["length"] = length
    headers["checksum"] = checksums
    headers["generation"] = generation
    headers["hash"] = np.frombuffer(b"".join(hashes), "S32")
    headers["parent"] = np.frombuffer(b"".join([p or _NO_PARENT for p in parents]), "S32")
    packed = headers.view(np.uint8).data
    crc32, size = zlib.crc32, _SLOT.size
    headers["crc"] = [
        crc32(packed[at + 8 : at + size], _CRC_BEFORE_LENGTH)
        for at in range(0, len(packed), SLOT_HEADER_BYTES)
    ]
    return headers.tobytes()


def salt_crc(salt_id: bytes) -> int:
    """The crc of a salt id in a slot header. Never 0, which means that there is none."""
    return zlib.crc32(salt_id) or 1


def _salt_id(raw: bytes | memoryview, crc: int) -> SaltId:
    at = _SLOT.size + _CRC.size
    salt_id = bytes(raw[at : at + SALT_ID_BYTES])
    if len(salt_id) != SALT_ID_BYTES or salt_crc(salt_id) != crc:
        raise CorruptionError("slot header: crc of the salt id does not match")
    return SaltId(salt_id)


def pack_state(state: SlotState) -> bytes:
    return _STATE.pack(state)


def align_up(count: int, alignment: int = ALIGNMENT) -> int:
    return -(-count // alignment) * alignment


def slots_per_extent(extent_bytes: int, payload_bytes: int) -> int:
    """How many slots of a payload fit in an extent; 0 when not even one does."""
    slot = align_up(payload_bytes)
    count = (extent_bytes - EXTENT_HEADER_BYTES) // (slot + SLOT_HEADER_BYTES)
    while count > 0 and slots_offset(count) + count * slot > extent_bytes:
        count -= 1
    return max(count, 0)


def slots_offset(slot_count: int) -> int:
    """Where slot 0 begins within an extent."""
    return EXTENT_HEADER_BYTES + align_up(slot_count * SLOT_HEADER_BYTES)


def _check_crc(body: bytes, raw: bytes | memoryview, what: str) -> None:
    expected = _CRC.unpack_from(raw, len(body))[0] if len(raw) >= len(body) + 4 else None
    if expected != zlib.crc32(body):
        raise CorruptionError(f"{what}: crc does not match")
