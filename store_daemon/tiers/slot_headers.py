"""The slot headers of one extent, read in one go at recovery. Pure."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from emberkv_proto.shm_layout import (
    SLOT_HEADER_BYTES,
    SLOT_MAGIC,
    STATE_OFFSET,
    SlotState,
    salt_crc,
)
from emberkv_proto.types import BLOCK_HASH_BYTES, BlockHash, SaltId

_CRC_OFFSET = 104
SLOT_DTYPE = np.dtype(
    {
        "names": [
            "magic",
            "state",
            "length",
            "checksum",
            "generation",
            "salt_crc",
            "block_hash",
            "parent",
            "crc",
            "salt_id",
        ],
        "formats": ["<u4", "<u4", "<u8", "<u8", "<u8", "<u4", "V32", "V32", "<u4", "V16"],
        "offsets": [0, STATE_OFFSET, 8, 16, 24, 32, 40, 72, _CRC_OFFSET, _CRC_OFFSET + 4],
        "itemsize": SLOT_HEADER_BYTES,
    }
)
"""A header as `SlotHeader` packs it."""
_NO_PARENT = bytes(BLOCK_HASH_BYTES)


@dataclass(frozen=True, slots=True)
class FoundHeaders:
    """Numbers of the slots in each state, and of the committed ones what their headers say."""

    staged: list[int]
    committed: list[int]
    hashes: list[BlockHash]
    parents: list[BlockHash | None]
    checksums: list[int]
    salt_ids: list[SaltId | None]
    damaged: int
    """Slots that say they are committed and whose header is not whole."""


def scan_headers(raw: memoryview, payload_bytes: int, generation: int) -> FoundHeaders:
    """Read an extent's headers. A committed slot counts if its header is whole, and of this size
    and carving."""
    copied = np.frombuffer(raw, np.uint8).copy()
    headers = copied.view(SLOT_DTYPE)
    states = headers["state"].copy()
    committed = states == SlotState.COMMITTED
    headers["state"] = 0  # as the crc takes it
    content = copied.data
    whole = np.zeros(len(headers), np.bool_)
    # A loop, but of little else than C: a header at a time is what zlib can do.
    crc32, crcs = zlib.crc32, headers["crc"].tolist()
    numbers = np.flatnonzero(committed).tolist()
    whole[
        [
            n
            for n in numbers
            if crc32(content[n * SLOT_HEADER_BYTES : n * SLOT_HEADER_BYTES + _CRC_OFFSET])
            == crcs[n]
        ]
    ] = True
    whole &= headers["magic"] == SLOT_MAGIC
    salted = headers["salt_crc"]
    for n in np.flatnonzero(whole & (salted != 0)).tolist():
        whole[n] = salt_crc(headers["salt_id"][n].tobytes()) == salted[n]
    good = np.flatnonzero(
        whole & (headers["length"] == payload_bytes) & (headers["generation"] == generation)
    )
    return FoundHeaders(
        np.flatnonzero(states == SlotState.STAGED).tolist(),
        good.tolist(),
        headers["block_hash"][good].tolist(),
        [None if h == _NO_PARENT else h for h in headers["parent"][good].tolist()],
        headers["checksum"][good].tolist(),
        [
            salt_id if crc else None
            for salt_id, crc in zip(
                headers["salt_id"][good].tolist(), salted[good].tolist(), strict=True
            )
        ],
        int(np.count_nonzero(committed & ~whole)),
    )
