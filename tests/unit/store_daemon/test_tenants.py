from __future__ import annotations

import pytest

from emberkv_proto.convert import salt_id_from_wire, salt_ids_from_wire, salt_ids_to_wire
from emberkv_proto.errors import InvalidRequestError
from emberkv_proto.hashing import salt_id
from emberkv_proto.types import SaltId
from store_daemon.block import Block, StoredNamespace
from store_daemon.tenants import IDLE_TENANTS, Quota, TenantBook, Victims, quota_of
from tests.helpers.store import chain, small_namespace

PLAIN = StoredNamespace.of(small_namespace())
ANN, BEN = SaltId(b"a" * 16), SaltId(b"b" * 16)


def block(number: int, access: int, depth: int = 0) -> Block:
    made = Block(chain(small_namespace(), number + 1)[number], PLAIN, None, [None], [None])
    made.access, made.depth = access, depth
    return made


def test_a_salt_id_is_16_bytes_of_blake3_and_no_salt_is_nobody() -> None:
    assert salt_id(b"tenant-7") == bytes.fromhex("c3f469a7b18340fa9abd1ec1fc8e697e")
    assert salt_id(b"") is None
    assert salt_id_from_wire(b"") is None
    assert salt_id_from_wire(ANN) == ANN
    with pytest.raises(InvalidRequestError, match="salt_id has 15 bytes"):
        salt_id_from_wire(b"a" * 15)
    with pytest.raises(InvalidRequestError, match="stands for nobody"):
        salt_id_from_wire(bytes(16))


def test_salt_ids_of_a_peers_blocks_survive_the_wire_and_nobodys_cost_nothing() -> None:
    for salt_ids in ((), (ANN,), (None, ANN, None, BEN)):
        assert salt_ids_from_wire(salt_ids_to_wire(salt_ids), len(salt_ids)) == salt_ids
    assert salt_ids_to_wire((None,) * 1000) == b""
    with pytest.raises(InvalidRequestError, match="32 bytes for 3 blocks"):
        salt_ids_from_wire(ANN + BEN, 3)


def test_a_tenant_over_its_quota_is_known_until_it_is_below_it_again() -> None:
    book = TenantBook(Quota(dram_bytes=100))
    ann, ben = book.of(ANN), book.of(BEN)
    assert ann is not None
    assert ben is not None
    assert book.of(None) is None
    assert book.of(ANN) is ann
    ann.charge_dram(100)
    ben.charge_dram(101)
    assert list(book.over_quota()) == [ben]
    assert (ann.exceeds_dram(0), ann.exceeds_dram(1), ann.exceeds_ssd(10**12)) == (
        False,
        True,
        False,
    )
    ben.charge_dram(-1)
    assert list(book.over_quota()) == []


def test_a_quota_set_live_counts_at_once_and_beats_the_default() -> None:
    book = TenantBook(Quota(dram_bytes=1000))
    ann = book.of(ANN)
    assert ann is not None
    ann.charge_dram(500)
    book.set_quota(ANN, quota_of(400, 0))
    assert list(book.over_quota()) == [ann]
    book.set_default(Quota(dram_bytes=10_000))
    assert ann.quota == Quota(400, None)
    book.set_quota(ANN, quota_of(0, 0))
    assert list(book.over_quota()) == []
    assert [u.quota for u in book.usage()] == [Quota(None, None)]


def test_a_new_default_reaches_those_without_a_quota_of_their_own() -> None:
    book = TenantBook(quotas={ANN: Quota(dram_bytes=50)})
    ann, ben = book.of(ANN), book.of(BEN)
    assert ann is not None
    assert ben is not None
    ben.charge_dram(60)
    book.set_default(Quota(dram_bytes=59))
    assert list(book.over_quota()) == [ben]
    assert ann.quota == Quota(dram_bytes=50)


def test_only_idle_tenants_are_forgotten() -> None:
    book = TenantBook(quotas={ANN: Quota(dram_bytes=50)})
    ben = book.of(BEN)
    assert ben is not None
    ben.ssd_bytes = 1
    for number in range(3 * IDLE_TENANTS):
        book.of(SaltId(number.to_bytes(16, "big")))
    assert len(book) <= 2 * IDLE_TENANTS + 2
    assert book.of(BEN) is ben
    assert [u.quota for u in book.usage() if u.salt_id == ANN] == [Quota(dram_bytes=50)]


def test_victims_come_least_recently_used_first_and_deeper_ones_before() -> None:
    victims = Victims(lambda block: False)
    old, parent, child, held = block(0, 1), block(1, 5, 1), block(2, 5, 2), block(3, 0)
    for each in (parent, held, child, old):
        victims.offer(each)
    passed: list[Block] = []
    order = []
    gone = {id(held)}
    while (victim := victims.next(lambda b: id(b) not in gone, passed.append)) is not None:
        order.append(victim)
        gone.add(id(victim))
    assert order == [old, child, parent]
    assert passed == [held, old, child, parent]


def test_a_victim_that_was_used_since_goes_back_to_where_it_belongs() -> None:
    victims = Victims(lambda block: False)
    first, second = block(0, 1), block(1, 2)
    victims.offer(first)
    victims.offer(second)
    first.access = 3
    assert victims.next(lambda block: True, pytest.fail) is second
    second.access = 4
    assert victims.next(lambda block: True, pytest.fail) is first


def test_entries_that_count_no_more_are_dropped_in_time() -> None:
    victims = Victims(lambda block: block is blocks[1])
    blocks = [block(0, 1), block(1, 2)]
    for _ in range(1000):
        for each in blocks:
            victims.offer(each)
    assert len(victims) <= 2 * 64 + 64
    assert victims.next(lambda block: True, pytest.fail) is blocks[0]
