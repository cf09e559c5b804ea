"""Format of the SSD tier's segment files. Pure: packs and unpacks, no I/O.

[ segment header, 4 KiB ][ record ][ record ] ... [ footer table, padded ][ trailer, 4 KiB ]
record = [ record header, 4 KiB ][ payload, padded to 4 KiB ]

While a segment is open the rest of the file is zeros. Sealing writes the footer behind the last
record and cuts the file there, so the trailer is always the last page; a sealed file is immutable.
A record header names its own segment and offset: bytes that were written to, copied to, or left
over at another place do not pass for a record. All numbers are little endian; every header ends in
a crc32 over the bytes before it.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from emberkv_proto.errors import CorruptionError
from emberkv_proto.shm_layout import ALIGNMENT, align_up
from emberkv_proto.types import SALT_ID_BYTES, BlockHash, NamespaceId, SaltId

FORMAT_VERSION = 2
"""2: rows have a salt id, checksums are XXH3-64."""
PAGE_BYTES = ALIGNMENT

_SEGMENT_MAGIC = b"EMBRSEGM"
_RECORD_MAGIC = b"EMBRRECD"
_TRAILER_MAGIC = b"EMBRTRLR"
_SEGMENT = struct.Struct("<8sIIQ")
_RECORD_PREFIX = struct.Struct("<8sII")
_ROW = struct.Struct("<16s32sI32sQQQQ16s")
_TRAILER = struct.Struct("<8sIIQQI")
_CRC = struct.Struct("<I")
_NAME = re.compile(r"seg-([0-9a-f]{16})\.ember")
_NO_PARENT = bytes(32)
_NO_SALT = bytes(SALT_ID_BYTES)

ROW_BYTES = _ROW.size
ROW_DTYPE = np.dtype(
    [
        ("namespace_id", "V16"),
        ("block_hash", "V32"),
        ("part", "<u4"),
        ("parent", "V32"),
        ("segment", "<u8"),
        ("offset", "<u8"),
        ("length", "<u8"),
        ("checksum", "<u8"),
        ("salt_id", "V16"),
    ]
)
"""A packed row, field by field as `_ROW` has them, for tables of many."""
assert ROW_DTYPE.itemsize == ROW_BYTES


@dataclass(frozen=True, slots=True)
class RowKey:
    """One part of one block, wherever it is."""

    namespace_id: NamespaceId
    block_hash: BlockHash
    part: int


class SsdRow(NamedTuple):
    """Where a part of a block is on the SSD. `offset` is that of the record's header page.

    A tuple, for there may be very many.
    """

    namespace_id: NamespaceId
    block_hash: BlockHash
    part: int
    parent: BlockHash | None
    segment: int
    offset: int
    length: int
    """Payload bytes, without padding."""
    checksum: int
    salt_id: SaltId | None = None
    """Whose quota it counts against."""

    @property
    def key(self) -> RowKey:
        return RowKey(self.namespace_id, self.block_hash, self.part)

    @property
    def end(self) -> int:
        """Offset of the byte after the record."""
        return self.offset + record_bytes(self.length)

    def pack(self) -> bytes:
        """ROW_BYTES bytes: the value in the local index, and the entry of a footer."""
        return _ROW.pack(
            self.namespace_id,
            self.block_hash,
            self.part,
            self.parent or _NO_PARENT,
            self.segment,
            self.offset,
            self.length,
            self.checksum,
            self.salt_id or _NO_SALT,
        )

    @staticmethod
    def unpack(raw: bytes | memoryview) -> SsdRow:
        """Raises CorruptionError if the size or a number cannot be a row's."""
        if len(raw) != ROW_BYTES:
            raise CorruptionError(f"row has {len(raw)} bytes instead of {ROW_BYTES}")
        namespace_id, block_hash, part, parent, segment, offset, length, checksum, salt_id = (
            _ROW.unpack(raw)
        )
        if length == 0 or offset < PAGE_BYTES or offset % PAGE_BYTES:
            raise CorruptionError(f"row with length {length} at offset {offset} is not ours")
        return SsdRow(
            NamespaceId(namespace_id),
            BlockHash(block_hash),
            part,
            None if parent == _NO_PARENT else BlockHash(parent),
            segment,
            offset,
            length,
            checksum,
            None if salt_id == _NO_SALT else SaltId(salt_id),
        )


def unpack_rows(raw: bytes) -> list[SsdRow]:
    """Rows that were checked before, `ROW_BYTES` each, one behind the other."""
    return [
        SsdRow(
            namespace_id,
            block_hash,
            part,
            None if parent == _NO_PARENT else parent,
            segment,
            offset,
            length,
            checksum,
            None if salt_id == _NO_SALT else salt_id,
        )
        for namespace_id, block_hash, part, parent, segment, offset, length, checksum, salt_id in (
            _ROW.iter_unpack(raw)
        )
    ]


def record_bytes(length: int) -> int:
    """Bytes that a record with a payload of `length` takes in its segment."""
    return PAGE_BYTES + align_up(length)


def record_sizes(lengths: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`record_bytes` of each."""
    page = np.uint64(PAGE_BYTES)
    within = page - np.uint64(1)
    return page + ((lengths + within) & ~within)  # to divide takes six times as long


def footer_bytes(rows: int) -> int:
    """Bytes of the footer table and the trailer for so many rows."""
    return align_up(rows * ROW_BYTES) + PAGE_BYTES


def largest_payload(segment_bytes: int) -> int:
    """The longest payload that an empty segment can take; 0 or less when none."""
    return segment_bytes - PAGE_BYTES - footer_bytes(1) - PAGE_BYTES


def segment_name(number: int) -> str:
    return f"seg-{number:016x}.ember"


def segment_number(name: str) -> int | None:
    """The number in a segment file's name; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1], 16) if match else None


def pack_segment_header(number: int) -> bytes:
    return _with_crc(_SEGMENT.pack(_SEGMENT_MAGIC, FORMAT_VERSION, PAGE_BYTES, number))


def segment_format(raw: bytes | memoryview) -> int | None:
    """The format version of a segment file by its first bytes; None: they are not a segment's.

    Of every format there will be: the file begins with the magic and the version.
    """
    magic, version = struct.unpack_from("<8sI", raw) if len(raw) >= 12 else (b"", 0)
    return int(version) if magic == _SEGMENT_MAGIC else None


def check_segment_header(raw: bytes | memoryview, number: int) -> None:
    """Raises CorruptionError unless `raw` begins with the header of segment `number`."""
    body = _checked(raw, _SEGMENT.size, "segment header")
    magic, version, page, found = _SEGMENT.unpack(body)
    if (magic, version, page, found) != (_SEGMENT_MAGIC, FORMAT_VERSION, PAGE_BYTES, number):
        raise CorruptionError(
            f"segment header: magic {magic!r} version {version} number {found}"
            f" is not that of segment {number}"
        )


def pack_record_header(row: SsdRow) -> bytes:
    prefix = _RECORD_PREFIX.pack(_RECORD_MAGIC, FORMAT_VERSION, PAGE_BYTES)
    return _with_crc(prefix + row.pack())


RECORD_HEADER_BYTES = _RECORD_PREFIX.size + ROW_BYTES + _CRC.size


def unpack_record_header(raw: bytes | memoryview, segment: int, offset: int) -> SsdRow:
    """The row of the record at `offset` of `segment`.

    Raises:
        CorruptionError: not a record header, damaged, or written for another place.
    """
    body = _checked(raw, _RECORD_PREFIX.size + ROW_BYTES, "record header")
    magic, version, page = _RECORD_PREFIX.unpack_from(body)
    if (magic, version, page) != (_RECORD_MAGIC, FORMAT_VERSION, PAGE_BYTES):
        raise CorruptionError(f"record header: magic {magic!r} version {version} is not ours")
    row = SsdRow.unpack(body[_RECORD_PREFIX.size :])
    if (row.segment, row.offset) != (segment, offset):
        raise CorruptionError(
            f"record header of segment {row.segment} offset {row.offset}"
            f" stands in segment {segment} at {offset}"
        )
    return row


def pack_footer(number: int, rows: Sequence[SsdRow]) -> bytes:
    """Footer table and trailer, whole pages, to be written at the end of the last record."""
    table = b"".join(row.pack() for row in rows)
    trailer = _with_crc(
        _TRAILER.pack(
            _TRAILER_MAGIC, FORMAT_VERSION, ROW_BYTES, number, len(rows), zlib.crc32(table)
        )
    )
    return table.ljust(align_up(len(table)), b"\0") + trailer.ljust(PAGE_BYTES, b"\0")


@dataclass(frozen=True, slots=True)
class Trailer:
    """The last page of a sealed segment: how many rows the footer table has, and their crc."""

    rows: int
    table_crc: int

    @property
    def table_bytes(self) -> int:
        """Length of the table with its padding; it ends where the trailer begins."""
        return align_up(self.rows * ROW_BYTES)


def unpack_trailer(raw: bytes | memoryview, number: int, file_bytes: int) -> Trailer:
    """Raises CorruptionError unless `raw` is a trailer of segment `number` that fits the file."""
    body = _checked(raw, _TRAILER.size, "trailer")
    magic, version, row_bytes, found, rows, crc = _TRAILER.unpack(body)
    if (magic, version, found, row_bytes) != (_TRAILER_MAGIC, FORMAT_VERSION, number, ROW_BYTES):
        raise CorruptionError(f"trailer: magic {magic!r} version {version} number {found}")
    trailer = Trailer(rows, crc)
    if PAGE_BYTES + trailer.table_bytes + PAGE_BYTES > file_bytes:
        raise CorruptionError(f"trailer: {rows} rows do not fit in a file of {file_bytes} bytes")
    return trailer


def footer_table(
    raw: bytes | memoryview, trailer: Trailer, number: int, file_bytes: int
) -> npt.NDArray[np.void]:
    """The rows of a sealed segment, by rising offset, as an array of ROW_DTYPE over `raw`.

    Raises:
        CorruptionError: crc differs, or a row lies outside the records, in another segment or over
            another row.
    """
    size = trailer.rows * ROW_BYTES
    table = np.frombuffer(raw, np.uint8, min(size, len(raw)))
    if len(table) != size or zlib.crc32(table.data) != trailer.table_crc:
        raise CorruptionError("footer table: crc does not match the trailer's")
    rows = table.view(ROW_DTYPE)
    records_end = file_bytes - PAGE_BYTES - trailer.table_bytes
    offsets, lengths = rows["offset"], rows["length"]
    if (
        (rows["segment"] != number).any()
        or (lengths == 0).any()
        or (lengths > records_end).any()
        or (offsets < PAGE_BYTES).any()
        or (offsets > records_end).any()
        or (offsets % PAGE_BYTES).any()
    ):
        raise CorruptionError(f"footer table: a row is outside of segment {number}")
    if (offsets[1:] < offsets[:-1]).any():
        rows = rows[np.argsort(offsets, kind="stable")]
        offsets, lengths = rows["offset"], rows["length"]
    ends = offsets + record_sizes(lengths)
    if (ends[-1:] > records_end).any():
        raise CorruptionError(f"footer table: a row is outside of segment {number}")
    if (ends[:-1] > offsets[1:]).any():
        raise CorruptionError(f"footer table: rows overlap each other in segment {number}")
    return rows


def _with_crc(body: bytes) -> bytes:
    return body + _CRC.pack(zlib.crc32(body))


def _checked(raw: bytes | memoryview, body_bytes: int, what: str) -> bytes:
    if len(raw) < body_bytes + _CRC.size:
        raise CorruptionError(f"{what}: {len(raw)} bytes are too few")
    body = bytes(raw[:body_bytes])
    if _CRC.unpack_from(raw, body_bytes)[0] != zlib.crc32(body):
        raise CorruptionError(f"{what}: crc does not match")
    return body
