"""SGLang's page hashes: as SGLang 0.5.23 computed them, and as block hashes of a namespace."""

from __future__ import annotations

import struct

import pytest

from emberkv_proto.errors import InvalidRequestError
from emberkv_proto.hashing import index_key
from emberkv_proto.page_hashes import first_in_events, page_hashes, rooted, unrooted
from emberkv_proto.types import NamespaceId

TOKENS = [(7 * i * i + 3 * i) % 50000 for i in range(3 * 16 + 5)]
FIRST = NamespaceId(bytes(range(16)))
SECOND = NamespaceId(bytes(range(1, 17)))
# get_storage_hash_str of SGLang 0.5.23; the last hash it gives for these tokens, of the partial
# page, is left out.
PLAIN = [
    "b14a3acb2a2bcbefd960f62f52b9f68fd572f6bc6a56993fb42a9d3d0cd65817",
    "c3901bfc37d1d239d7cee337ddff7ef9cf538d149c35bc891cbfe1c05bfab2c7",
    "5f8c62486c1e3a028b831cc25befa0df2a027661338032a88ac1873a38c577d4",
]
SALTED = {
    "tenant-a": "59e2ad01332db94a36eca362de0457ed832317abedac0056ad6712ecde78cad2",
    "mandant-ä": "2235d3b6522dbd20d0c328b0d8aa30ffe64c341a00d6bc137480754bfe2ccf23",
}
EVENT = -5671656136459432977
"""The hash of the first page in SGLang's events."""
SALTED_EVENTS = {
    "tenant-a": (-5926284194137671183, -2659154426958819421),
    "mandant-ä": (-3424820297484212995, -5602797176740124464),
}
"""The same in both of its formats, made by SGLang 0.5.23."""
KEYED_EVENTS = {
    "": -3280536623130653507,
    "tenant-a": -4467966003800440203,
    "mandant-ä": -1104695898965931342,
}
"""Of requests with the extra key "x", in the format "dynamo"."""


def test_hashes_are_those_of_sglang() -> None:
    assert [page.hex() for page in page_hashes(TOKENS, 16)] == PLAIN
    for salt, third in SALTED.items():
        assert page_hashes(TOKENS, 16, salt=salt.encode())[2].hex() == third


def test_a_chain_goes_on_from_its_parent() -> None:
    first = page_hashes(TOKENS[:16], 16, salt=b"tenant-a")
    rest = page_hashes(TOKENS[16:], 16, parent=first[-1])
    assert first + rest == page_hashes(TOKENS, 16, salt=b"tenant-a")


def test_what_is_no_full_page_has_no_hash() -> None:
    assert page_hashes(TOKENS[:15], 16) == page_hashes([], 16) == []
    with pytest.raises(InvalidRequestError, match="page_tokens"):
        page_hashes(TOKENS, 0)
    with pytest.raises(InvalidRequestError, match="token ids"):
        page_hashes([1 << 32], 1)


def test_a_page_has_another_block_hash_in_each_namespace_and_leads_back() -> None:
    pages = page_hashes(TOKENS, 16)
    blocks, others = rooted(FIRST, pages), rooted(SECOND, pages)
    assert not {*blocks, *others, *pages} & {*blocks} & {*others}
    assert len({*blocks, *others, *pages}) == 9
    assert [unrooted(FIRST, block) for block in blocks] == pages
    assert rooted(FIRST, []) == []
    with pytest.raises(InvalidRequestError, match="32 bytes"):
        rooted(FIRST, [b"short"])


def test_the_hash_in_an_event_is_the_begin_of_the_page_hash() -> None:
    first = page_hashes(TOKENS, 16)[0]
    assert struct.unpack(">q", first[:8]) == (EVENT,)
    mask = int.from_bytes(rooted(FIRST, [bytes(32)])[0][:8], "little")
    assert index_key(rooted(FIRST, [first])[0]) == int.from_bytes(first[:8], "little") ^ mask


def test_events_call_a_first_page_by_what_is_made_of_its_tokens_and_salt() -> None:
    first = TOKENS[:16]
    assert first_in_events(first) == {EVENT % (1 << 64)}
    for salt, numbers in SALTED_EVENTS.items():
        assert first_in_events(first, salt.encode()) == {n % (1 << 64) for n in numbers}
    for salt, number in KEYED_EVENTS.items():
        assert number % (1 << 64) not in first_in_events(first, salt.encode())
