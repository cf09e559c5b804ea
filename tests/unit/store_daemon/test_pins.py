from __future__ import annotations

import pytest

from emberkv_proto.types import BlockHash
from store_daemon.block import PINNED, Block, StoredNamespace
from store_daemon.pins import PinBook
from tests.helpers.store import chain, small_namespace

PLAIN = StoredNamespace.of(small_namespace(5000))
SLOT = 8192  # of 5,000 bytes
HASHES = chain(small_namespace(5000), 4)


@pytest.fixture
def blocks() -> dict[BlockHash, Block]:
    return {h: Block(h, PLAIN, None, [None], [None]) for h in HASHES}


def test_hard_pins_fit_under_the_limit_from_the_first_block_on(
    blocks: dict[BlockHash, Block],
) -> None:
    pins = PinBook(limit_bytes=2 * SLOT + 1)
    fitting = pins.that_fit(blocks.values())
    assert [block.hash for block in fitting] == HASHES[:2]
    pins.pin_hard(fitting)
    assert pins.hard_bytes == 2 * SLOT
    assert [pins.covers(h) for h in HASHES] == [True, True, False, False]
    assert [block.stays for block in blocks.values()] == [PINNED, PINNED, 0, 0]
    assert pins.that_fit(blocks.values()) == fitting  # what is pinned costs nothing again
    pins.check_integrity(blocks)


def test_a_soft_pin_ends_at_its_time_and_not_before(blocks: dict[BlockHash, Block]) -> None:
    pins = PinBook(0)
    first, second, *_ = blocks.values()
    pins.pin_soft([first], until=10.0)
    pins.pin_soft([second], until=20.0)
    assert pins.expire(9.9) == []
    assert pins.expire(10.0) == [first]
    assert (first.stays, second.stays) == (0, PINNED)
    pins.check_integrity(blocks)
    assert pins.expire(20.0) == [second]
    assert len(pins) == 0
    assert pins.hard_bytes == 0


def test_a_later_soft_pin_makes_it_longer_and_never_shorter(
    blocks: dict[BlockHash, Block],
) -> None:
    pins = PinBook(0)
    first = blocks[HASHES[0]]
    pins.pin_soft([first], until=20.0)
    pins.pin_soft([first], until=10.0)
    assert pins.expire(15.0) == []
    pins.check_integrity(blocks)
    assert pins.expire(20.0) == [first]


def test_a_hard_pin_replaces_a_soft_one_and_outlives_its_time(
    blocks: dict[BlockHash, Block],
) -> None:
    pins = PinBook(SLOT)
    first = blocks[HASHES[0]]
    pins.pin_soft([first], until=5.0)
    pins.pin_hard([first])
    pins.pin_soft([first], until=6.0)
    assert pins.expire(100.0) == []
    assert pins.is_hard(first)
    pins.check_integrity(blocks)


def test_unpin_says_what_had_a_pin_and_a_second_one_finds_none(
    blocks: dict[BlockHash, Block],
) -> None:
    pins = PinBook(2 * SLOT)
    first, second, third, _ = blocks.values()
    pins.pin_hard([first])
    pins.pin_soft([second], until=5.0)
    assert pins.unpin([first, second, third]) == [first, second]
    assert pins.unpin([first, second, third]) == []
    assert (pins.hard_bytes, len(pins)) == (0, 0)
    pins.check_integrity(blocks)


def test_a_pin_on_a_block_that_is_gone_does_not_pass_the_check(
    blocks: dict[BlockHash, Block],
) -> None:
    pins = PinBook(SLOT)
    pins.pin_hard([blocks[HASHES[0]]])
    del blocks[HASHES[0]]
    with pytest.raises(AssertionError, match="differ"):
        pins.check_integrity(blocks)
