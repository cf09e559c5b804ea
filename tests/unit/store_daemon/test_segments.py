"""The segment format: what is packed is unpacked, and nothing else is."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkv_proto.errors import CorruptionError
from emberkv_proto.types import BlockHash, NamespaceId, SaltId
from store_daemon.tiers import segments
from store_daemon.tiers.row_table import RowTable
from store_daemon.tiers.segments import FORMAT_VERSION, PAGE_BYTES, ROW_BYTES, SsdRow

U64 = st.integers(0, 2**64 - 1)
ROWS = st.builds(
    SsdRow,
    namespace_id=st.binary(min_size=16, max_size=16).map(NamespaceId),
    block_hash=st.binary(min_size=32, max_size=32).map(BlockHash),
    part=st.integers(0, 2**32 - 1),
    parent=st.none() | st.binary(min_size=32, max_size=32).filter(any).map(BlockHash),
    segment=U64,
    offset=st.integers(1, 2**40).map(lambda page: page * PAGE_BYTES),
    length=st.integers(1, 2**40),
    checksum=U64,
    salt_id=st.none() | st.binary(min_size=16, max_size=16).filter(any).map(SaltId),
)


def row(offset: int = PAGE_BYTES, length: int = 5000, segment: int = 7) -> SsdRow:
    return SsdRow(NamespaceId(b"n" * 16), BlockHash(b"h" * 32), 1, None, segment, offset, length, 9)


@given(ROWS)
def test_row_and_record_header_survive_packing(row: SsdRow) -> None:
    assert SsdRow.unpack(row.pack()) == row
    header = segments.pack_record_header(row)
    assert len(header) == segments.RECORD_HEADER_BYTES <= PAGE_BYTES
    page = header.ljust(PAGE_BYTES, b"\0")
    assert segments.unpack_record_header(page, row.segment, row.offset) == row


@given(st.data())
def test_any_changed_byte_of_a_header_is_noticed(data: st.DataObject) -> None:
    page = bytearray(segments.pack_record_header(row()))
    at = data.draw(st.integers(0, len(page) - 1))
    page[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptionError):
        segments.unpack_record_header(page, 7, PAGE_BYTES)


@given(st.binary(max_size=400))
def test_random_bytes_are_never_a_header(raw: bytes) -> None:
    for check in (
        lambda: segments.unpack_record_header(raw, 7, PAGE_BYTES),
        lambda: segments.check_segment_header(raw, 7),
        lambda: segments.unpack_trailer(raw, 7, 1 << 20),
    ):
        with pytest.raises(CorruptionError):
            check()


def test_record_header_does_not_pass_at_another_place() -> None:
    page = segments.pack_record_header(row())
    for segment, offset in ((8, PAGE_BYTES), (7, 2 * PAGE_BYTES)):
        with pytest.raises(CorruptionError, match="stands in segment"):
            segments.unpack_record_header(page, segment, offset)


def test_segment_header_names_its_segment() -> None:
    segments.check_segment_header(segments.pack_segment_header(7), 7)
    with pytest.raises(CorruptionError, match="segment 8"):
        segments.check_segment_header(segments.pack_segment_header(7), 8)


@pytest.mark.parametrize(
    "changes", [{"length": 0}, {"offset": 0}, {"offset": PAGE_BYTES + 1}, {"offset": 8}]
)
def test_row_that_cannot_be_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(CorruptionError):
        SsdRow.unpack(row()._replace(**changes).pack())


def footer_file(rows: list[SsdRow]) -> tuple[bytes, int]:
    """A footer, and the length of the file that ends in it."""
    footer = segments.pack_footer(7, rows)
    return footer, max((row.end for row in rows), default=PAGE_BYTES) + len(footer)


def with_crc(body: bytes) -> bytes:
    return body + struct.pack("<I", zlib.crc32(body))


@pytest.mark.parametrize("version", [0, 1, FORMAT_VERSION + 1])
def test_headers_and_footers_of_another_format_are_not_ours(version: int) -> None:
    """The checksums in their rows would condemn every good byte."""
    one = row(offset=PAGE_BYTES)
    record = struct.pack("<8sII", b"EMBRRECD", version, PAGE_BYTES) + one.pack()
    with pytest.raises(CorruptionError, match=f"version {version} is not ours"):
        segments.unpack_record_header(with_crc(record).ljust(PAGE_BYTES), 7, one.offset)
    trailer = struct.pack("<8sIIQQI", b"EMBRTRLR", version, ROW_BYTES, 7, 1, zlib.crc32(one.pack()))
    with pytest.raises(CorruptionError, match=f"version {version}"):
        segments.unpack_trailer(with_crc(trailer), 7, one.end + 2 * PAGE_BYTES)


@pytest.mark.parametrize("count", [0, 1, 35, 36, 200])
def test_footer_survives_packing(count: int) -> None:
    rows = [row(offset=PAGE_BYTES * (1 + 3 * number)) for number in range(count)]
    footer, file_bytes = footer_file(rows)
    assert len(footer) == segments.footer_bytes(count)
    trailer = segments.unpack_trailer(footer[-PAGE_BYTES:], 7, file_bytes)
    table = footer[: trailer.table_bytes]
    assert list(RowTable(segments.footer_table(table, trailer, 7, file_bytes))) == rows


def test_footer_with_a_changed_byte_or_a_row_out_of_bounds_is_refused() -> None:
    footer, file_bytes = footer_file([row(), row(offset=4 * PAGE_BYTES)])
    trailer = segments.unpack_trailer(footer[-PAGE_BYTES:], 7, file_bytes)
    damaged = bytearray(footer)
    damaged[ROW_BYTES + 3] ^= 1
    with pytest.raises(CorruptionError, match="crc"):
        segments.footer_table(damaged, trailer, 7, file_bytes)
    with pytest.raises(CorruptionError, match="outside"):
        segments.footer_table(footer, trailer, 7, file_bytes - PAGE_BYTES)


def test_trailer_with_more_rows_than_the_file_holds_is_refused() -> None:
    rows = [row(offset=PAGE_BYTES * (1 + 3 * number)) for number in range(200)]
    footer, _ = footer_file(rows)
    with pytest.raises(CorruptionError, match="do not fit"):
        segments.unpack_trailer(footer[-PAGE_BYTES:], 7, 2 * PAGE_BYTES)


def test_names_of_segments_are_read_back_and_others_are_not() -> None:
    for number in (0, 1, 0xABC, 2**64 - 1):
        assert segments.segment_number(segments.segment_name(number)) == number
    for name in (
        "lock",
        "seg-1.ember",
        "seg-000000000000000G.ember",
        "seg-0000000000000001.ember.x",
    ):
        assert segments.segment_number(name) is None


def test_largest_payload_fills_a_segment_exactly() -> None:
    largest = segments.largest_payload(64 * 1024)
    assert PAGE_BYTES + segments.record_bytes(largest) + segments.footer_bytes(1) == 64 * 1024
