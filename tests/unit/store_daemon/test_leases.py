from __future__ import annotations

import pytest

from emberkv_proto.errors import LeaseExpiredError, UnknownLeaseError
from store_daemon.block import Block, StoredNamespace
from store_daemon.leases import Lease, LeaseTable, SessionId
from tests.helpers.store import chain, small_namespace

NAMESPACE = StoredNamespace.of(small_namespace())
HASHES = chain(NAMESPACE.namespace, 4)
ME, OTHER = SessionId(1), SessionId(2)


def blocks() -> list[Block | None]:
    return [Block(h, NAMESPACE, None, [object()], [None]) for h in HASHES]  # type: ignore[list-item]


def grant(table: LeaseTable, session: SessionId = ME, expires_at: float = 10.0) -> Lease:
    return table.grant(session, NAMESPACE, HASHES, blocks(), bytearray(4), expires_at)


def test_a_lease_is_released_once() -> None:
    table = LeaseTable()
    lease = grant(table)
    assert table.end(ME, lease.id) is lease
    with pytest.raises(UnknownLeaseError):
        table.end(ME, lease.id)
    table.check_integrity()


def test_another_session_can_neither_use_nor_end_a_lease() -> None:
    table = LeaseTable()
    lease = grant(table)
    for call in (lambda: table.check(OTHER, lease.id, 0.0), lambda: table.end(OTHER, lease.id)):
        with pytest.raises(UnknownLeaseError):
            call()
    assert table.check(ME, lease.id, 0.0) is lease


def test_a_late_lease_is_told_from_an_unknown_one() -> None:
    table = LeaseTable()
    lease = grant(table)
    with pytest.raises(LeaseExpiredError):
        table.check(ME, lease.id, 10.0)
    assert table.expire(9.9) == []
    assert table.expire(10.0) == [lease]
    with pytest.raises(LeaseExpiredError):
        table.check(ME, lease.id, 10.0)
    with pytest.raises(UnknownLeaseError):
        table.check(OTHER, lease.id, 10.0)
    table.check_integrity()


def test_a_heartbeat_renews_what_is_alive_but_revives_nothing() -> None:
    table = LeaseTable()
    alive, late = grant(table, expires_at=10.0), grant(table, expires_at=5.0)
    table.renew(ME, 6.0, 16.0)
    assert alive.expires_at == 16.0
    assert late.expires_at == 5.0


def test_a_session_takes_all_its_leases_with_it() -> None:
    table = LeaseTable()
    mine, other = [grant(table), grant(table)], grant(table, OTHER)
    assert table.end_session(ME) == mine
    assert list(table) == [other]
    assert table.end_session(ME) == []
    table.check_integrity()


def test_ready_grows_over_a_gap_only_when_it_closes() -> None:
    lease = grant(LeaseTable())
    held = [block for block in lease.blocks if block is not None]
    held[0].in_dram = held[2].in_dram = True
    assert lease.advance()
    assert lease.ready == 1
    assert not lease.advance()
    held[1].in_dram = True
    lease.advance()
    assert lease.ready == 3


def test_an_unverified_block_is_not_ready() -> None:
    lease = grant(LeaseTable())
    block = lease.blocks[0]
    assert block is not None
    block.in_dram, block.is_verified = True, False
    assert not lease.advance()


def test_shrinking_never_takes_what_is_ready() -> None:
    lease = grant(LeaseTable())
    first = lease.blocks[0]
    assert first is not None
    first.in_dram = True
    lease.advance()
    gone = lease.blocks[1:]
    assert lease.shrink(0) == gone
    assert lease.usable == lease.ready == 1
    assert lease.is_complete
