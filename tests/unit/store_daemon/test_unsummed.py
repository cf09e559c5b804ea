"""Blocks committed without checksums: usable at once, vouched for by nobody until summed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from emberkv_proto.convert import u64s_from_wire
from emberkv_proto.errors import InvalidRequestError
from emberkv_proto.hashing import UNKNOWN_CHECKSUM, checksum
from emberkv_proto.types import AcquirePolicy, BlockHash, Incarnation, NodeId
from emberkv_proto.v1 import store_pb2
from emberkv_proto.wire import Method
from store_daemon import promotion
from store_daemon.servicer import NodeIdentity, Servicer
from store_daemon.sessions import Session
from tests.helpers.store import SmallStore, chain, payload, small_namespace

NAMESPACE = small_namespace()
HASHES = chain(NAMESPACE, 6)
Make = Callable[..., SmallStore]


@pytest_asyncio.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[SmallStore] = []

    def build(**options: object) -> SmallStore:
        made.append(SmallStore(tmp_path, **options))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for small in made:
        if not small.is_closed:
            small.check_integrity()
            await small.close()


@pytest.fixture
def too_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has time to compute checksums for their own sake."""
    monkeypatch.setattr(promotion, "MOST_LEARNING", 0)


def put_unsummed(small: SmallStore, session: Session, hashes: Sequence[BlockHash]) -> None:
    staged = small.store.stage(session, hashes, None)
    small.write(session, hashes, staged)
    assert small.store.commit(session, staged.stage_id, hashes, []) == len(hashes)


def sums_held(small: SmallStore, hashes: Sequence[BlockHash]) -> list[int]:
    slots = [small.store.holdings.catalog.blocks[h].slots[0] for h in hashes]
    return [slot.checksum for slot in slots if slot is not None]


def true_sums(hashes: Sequence[BlockHash]) -> list[int]:
    return [checksum(payload(h, 0, NAMESPACE.part_bytes(0))) for h in hashes]


async def test_they_are_lent_at_once_and_summed_in_a_thread(make: Make) -> None:
    small = make()
    session = small.open(NAMESPACE)
    put_unsummed(small, session, HASHES)
    lease = small.store.acquire(session, HASHES, AcquirePolicy.BEST_EFFORT, 0.0)
    assert lease is not None
    assert lease.ready == len(HASHES)
    await small.store.lender.promoter.settle()
    assert sums_held(small, HASHES) == true_sums(HASHES)
    small.assert_readable(lease)
    small.store.release(session, [lease.id])


@pytest.mark.usefixtures("too_busy")
async def test_what_nobody_had_time_for_is_counted_and_stays_unknown(make: Make) -> None:
    small = make()
    put_unsummed(small, small.open(NAMESPACE), HASHES)
    assert sums_held(small, HASHES) == [UNKNOWN_CHECKSUM] * len(HASHES)
    assert small.store.holdings.counters["unsummed_blocks_put_off"] == len(HASHES)


@pytest.mark.usefixtures("too_busy")
async def test_ssd_records_have_their_checksum_all_the_same(make: Make) -> None:
    small = make()
    put_unsummed(small, small.open(NAMESPACE), HASHES)
    await small.flush()
    rows = [small.store.holdings.catalog.blocks[h].rows[0] for h in HASHES]
    assert [row.checksum for row in rows if row is not None] == true_sums(HASHES)
    assert sums_held(small, HASHES) == true_sums(HASHES)


async def test_a_peer_gets_only_what_is_summed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    small = make(ssd_segments=0)
    session = small.open(NAMESPACE)
    small.put(session, HASHES[:2])
    monkeypatch.setattr(promotion, "MOST_LEARNING", 0)
    put_unsummed(small, session, HASHES[2:])
    own = small.store.holdings.catalog.blocks[HASHES[0]].namespace
    grant = await small.store.lender.peer_acquire(own, HASHES, 5.0)
    assert list(grant.checksums) == true_sums(HASHES[:2])
    small.store.peer_release(grant.lease_id)
    monkeypatch.setattr(promotion, "MOST_LEARNING", 64)
    refused = await small.store.lender.peer_acquire(own, HASHES[2:], 5.0)
    assert refused.usable_blocks == 0
    await small.store.lender.promoter.settle()
    grant = await small.store.lender.peer_acquire(own, HASHES, 5.0)
    assert list(grant.checksums) == true_sums(HASHES)
    small.store.peer_release(grant.lease_id)


@pytest.mark.usefixtures("too_busy")
async def test_a_crash_loses_none_of_them(make: Make) -> None:
    small = make(ssd_segments=0)
    put_unsummed(small, small.open(NAMESPACE), HASHES)
    await small.close()
    again = make(ssd_segments=0)
    assert again.store.holdings.counters["recovered_unsummed_parts"] == len(HASHES)
    session = again.open(NAMESPACE)
    lease = again.store.acquire(session, HASHES, AcquirePolicy.WAIT_COMPLETE, 5.0)
    assert lease is not None
    await again.store.wait(session, lease.id, len(HASHES) - 1, 5.0)
    assert lease.ready == len(HASHES)
    again.assert_readable(lease)
    again.store.release(session, [lease.id])


async def test_a_wrong_number_of_checksums_is_still_refused(make: Make) -> None:
    small = make()
    session = small.open(NAMESPACE)
    staged = small.store.stage(session, HASHES, None)
    with pytest.raises(InvalidRequestError, match="wanted one for each"):
        small.store.commit(session, staged.stage_id, HASHES, [1])


async def test_who_reads_them_has_them_summed_for_the_next(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = make(ssd_segments=0)
    session = small.open(NAMESPACE)
    monkeypatch.setattr(promotion, "MOST_LEARNING", 0)
    put_unsummed(small, session, HASHES)
    monkeypatch.setattr(promotion, "MOST_LEARNING", 64)
    servicer = Servicer(
        small.store,
        NodeIdentity(NodeId("node-1"), Incarnation(1)),
        small.settings.daemon,
        lambda: 0,
        lambda: None,
        lambda: None,
    )
    request = store_pb2.AcquireRequest(hashes=b"".join(HASHES)).SerializeToString()
    for wanted in ([UNKNOWN_CHECKSUM] * len(HASHES), true_sums(HASHES)):
        answer = store_pb2.AcquireResponse.FromString(
            servicer.call(session, Method.ACQUIRE, request)
        )
        assert u64s_from_wire(answer.checksums) == wanted
        small.store.release(session, [answer.lease_id])
        await small.store.lender.promoter.settle()
