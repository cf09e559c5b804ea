"""Messages and value types: each way and back, and nothing broken gets through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkv_proto import convert
from emberkv_proto.buckets import BUCKETS, MOST_REPAIRED, bucket_numbers
from emberkv_proto.errors import InvalidRequestError
from emberkv_proto.events import (
    BlocksRemoved,
    BlocksStored,
    BucketRows,
    Event,
    EventBatch,
    SnapshotPage,
    TierCleared,
)
from emberkv_proto.types import (
    BlockHash,
    BucketChoice,
    BucketXors,
    ChainHits,
    EngineHit,
    EngineInfo,
    HashScheme,
    Incarnation,
    NamespaceId,
    NodeHit,
    NodeId,
    NodeReport,
    Seq,
    Tier,
    TierDigest,
)
from emberkv_proto.v1 import common_pb2, index_pb2
from emberkv_proto.wire import MAX_BLOCKS_PER_CALL

ENGINE = EngineInfo(
    "e1",
    "http://h:1",
    "m",
    NamespaceId(b"n" * 16),
    64,
    "prefill",
    2,
    "tcp://h:5557",
    "tcp://h:5558",
    16,
    HashScheme.SGLANG,
)
NODE_HIT = NodeHit(NodeId("a"), 9, 5, 4)
ENGINE_HIT = EngineHit("e1", 2, "http://h:1", NodeId("a"), 12, 3, 5, 4)
DIGEST = TierDigest(Tier.SSD, 3, 2**64 - 1, 100, 50)
REPORT = NodeReport(
    NodeId("a"), Incarnation(4), Seq(9), "serving", (DIGEST,), (ENGINE,), "h:7100", 1.5
)
KEYS = np.array([1, 2**64 - 1, 77], np.uint64)


@given(st.lists(st.binary(min_size=32, max_size=32).map(BlockHash), max_size=20, unique=True))
def test_hashes_come_back(hashes: list[BlockHash]) -> None:
    assert convert.hashes_from_wire(convert.hashes_to_wire(hashes)) == hashes


@pytest.mark.parametrize("length", [1, 31, 33, 32 * MAX_BLOCKS_PER_CALL + 32])
def test_hashes_of_a_broken_or_huge_length_are_refused(length: int) -> None:
    with pytest.raises(InvalidRequestError, match=str(length)):
        convert.hashes_from_wire(bytes(length))
    most = b"".join(number.to_bytes(32, "little") for number in range(MAX_BLOCKS_PER_CALL))
    assert len(convert.hashes_from_wire(most)) == MAX_BLOCKS_PER_CALL


def test_a_hash_twice_is_no_chain() -> None:
    with pytest.raises(InvalidRequestError, match="twice"):
        convert.hashes_from_wire(b"a" * 32 + b"b" * 32 + b"a" * 32)


def test_parent_is_absent_or_whole() -> None:
    assert convert.parent_from_wire(b"") is None
    assert convert.parent_from_wire(b"p" * 32) == b"p" * 32
    for length in (1, 31, 64):
        with pytest.raises(InvalidRequestError):
            convert.parent_from_wire(bytes(length))


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20))
def test_numbers_come_back(values: list[int]) -> None:
    packed = convert.u64s_to_wire(np.array(values, np.uint64))
    assert convert.u64s_from_wire(packed) == values
    assert packed == b"".join(value.to_bytes(8, "little") for value in values)
    with pytest.raises(InvalidRequestError):
        convert.u64s_from_wire(packed + b"x")


def test_keys_must_be_whole_and_not_the_reserved_one() -> None:
    assert convert.keys_from_wire(convert.u64s_to_wire(KEYS)).tolist() == KEYS.tolist()
    assert convert.keys_from_wire(b"").size == 0
    for packed in (b"x", bytes(8), convert.u64s_to_wire([5, 0])):
        with pytest.raises(InvalidRequestError):
            convert.keys_from_wire(packed)
    with pytest.raises(InvalidRequestError):
        convert.keys_from_wire(b"\1" * 8 * (convert.MAX_KEYS_PER_MESSAGE + 1))


@pytest.mark.parametrize("value", [0, 4, -1, 255])
def test_unknown_tier_is_refused(value: int) -> None:
    with pytest.raises(InvalidRequestError):
        convert.tier_from_wire(value)
    assert [convert.tier_from_wire(tier) for tier in (1, 2, 3)] == list(Tier)


@pytest.mark.parametrize("length", [0, 15, 17, 32])
def test_namespace_id_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(InvalidRequestError):
        convert.namespace_id_from_wire(bytes(length))


def test_engine_comes_back_and_an_empty_role_means_both() -> None:
    assert convert.engine_from_wire(convert.engine_to_wire(ENGINE)) == ENGINE
    bare = common_pb2.EngineInfo(namespace_id=b"n" * 16)
    assert convert.engine_from_wire(bare).role == "both"
    assert convert.engine_from_wire(bare).hash_scheme is HashScheme.EMBER
    newer = common_pb2.EngineInfo(namespace_id=b"n" * 16, hash_scheme="of another year")
    assert convert.engine_from_wire(newer).hash_scheme is HashScheme.UNKNOWN
    with pytest.raises(InvalidRequestError):
        convert.engine_from_wire(common_pb2.EngineInfo())


def _same(left: Event, right: Event) -> bool:
    if isinstance(left, TierCleared) or isinstance(right, TierCleared):
        return left == right
    return (
        type(left) is type(right)
        and left.tier is right.tier
        and left.keys.tolist() == right.keys.tolist()
    )


@pytest.mark.parametrize(
    "event", [BlocksStored(Tier.DRAM, KEYS), BlocksRemoved(Tier.SSD, KEYS), TierCleared(Tier.HBM)]
)
def test_events_come_back(event: Event) -> None:
    raw = convert.event_to_wire(event).SerializeToString()
    assert _same(convert.event_from_wire(index_pb2.Event.FromString(raw)), event)


@pytest.mark.parametrize(
    "message",
    [
        index_pb2.Event(),
        index_pb2.Event(stored=index_pb2.BlocksStored(keys=b"\1" * 8)),
        index_pb2.Event(stored=index_pb2.BlocksStored(tier=2, keys=b"\1" * 7)),  # type: ignore[arg-type]
        index_pb2.Event(removed=index_pb2.BlocksRemoved(tier=2, keys=bytes(8))),  # type: ignore[arg-type]
        index_pb2.Event(cleared=index_pb2.TierCleared(tier=9)),  # type: ignore[arg-type]
    ],
    ids=["empty", "no tier", "torn keys", "key 0", "tier 9"],
)
def test_broken_events_are_refused(message: index_pb2.Event) -> None:
    with pytest.raises(InvalidRequestError):
        convert.event_from_wire(message)


def test_batch_comes_back_with_its_numbers() -> None:
    events = (BlocksStored(Tier.DRAM, KEYS), TierCleared(Tier.SSD))
    batch = EventBatch(NodeId("a"), Incarnation(3), Seq(10), events, 2.5)
    back = convert.batch_from_wire(convert.batch_to_wire(batch))
    assert (back.node_id, back.incarnation, back.seq_first, back.sent_unix_seconds) == (
        "a", 3, 10, 2.5,
    )  # fmt: skip
    assert (back.seq_last, len(back.events)) == (11, 2)
    assert all(map(_same, back.events, events))


def test_snapshot_page_comes_back() -> None:
    page = SnapshotPage(NodeId("a"), Incarnation(3), Seq(10), Tier.DRAM, KEYS, True)
    back = convert.page_from_wire(convert.page_to_wire(page))
    assert back.keys.tolist() == KEYS.tolist()
    assert (back.node_id, back.incarnation, back.seq, back.tier, back.is_last) == (
        "a", 3, 10, Tier.DRAM, True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("value", "there", "back"),
    [
        (DIGEST, convert.digest_to_wire, convert.digest_from_wire),
        (REPORT, convert.report_to_wire, convert.report_from_wire),
        (NODE_HIT, convert.hit_to_wire, convert.hit_from_wire),
        (ENGINE_HIT, convert.engine_hit_to_wire, convert.engine_hit_from_wire),
        (ChainHits((NODE_HIT,), (ENGINE_HIT,)), convert.hits_to_wire, convert.hits_from_wire),
    ],
    ids=["digest", "report", "hit", "engine_hit", "hits"],
)
def test_values_come_back(
    value: object, there: Callable[..., object], back: Callable[..., object]
) -> None:
    assert back(there(value)) == value


def test_an_engine_that_says_too_much_of_itself_is_refused() -> None:
    message = convert.engine_to_wire(replace(ENGINE, url="http://" + "h" * 3000))
    assert convert.engine_from_wire(message).url.endswith("h")
    message.model = "m" * 2000
    with pytest.raises(InvalidRequestError, match="limit is 4096"):
        convert.engine_from_wire(message)


def rows_of(bucket: int) -> BucketRows:
    pool = np.random.default_rng(1).integers(1, 2**64, 5000, np.uint64)
    keys = np.sort(pool[bucket_numbers(pool) == bucket])
    assert keys.size > 3
    return BucketRows(NodeId("a"), Incarnation(4), Seq(9), Tier.SSD, bucket, keys)


def test_bucket_sums_ride_in_a_report_and_come_back() -> None:
    sums = BucketXors(Tier.SSD, tuple(range(2**64 - BUCKETS, 2**64)))
    report = replace(REPORT, bucket_xors=(sums,))
    assert convert.report_from_wire(convert.report_to_wire(report)) == report
    message = convert.report_to_wire(report)
    message.bucket_xors[0].xors += b"\0" * 8
    with pytest.raises(InvalidRequestError, match="bucket"):
        convert.report_from_wire(message)


@pytest.mark.parametrize("bucket", [0, 7, 255])
def test_rows_of_a_bucket_come_back(bucket: int) -> None:
    rows = rows_of(bucket)
    back = convert.bucket_rows_from_wire(convert.bucket_rows_to_wire(rows))
    assert back.keys.tolist() == rows.keys.tolist()
    assert (back.node_id, back.incarnation, back.seq, back.tier, back.bucket) == (
        rows.node_id,
        rows.incarnation,
        rows.seq,
        rows.tier,
        rows.bucket,
    )


@pytest.mark.parametrize("bucket", [8, 256, 2**32 - 1])
def test_keys_of_another_bucket_are_refused(bucket: int) -> None:
    message = convert.bucket_rows_to_wire(rows_of(7))
    message.bucket = bucket
    with pytest.raises(InvalidRequestError, match=str(bucket)):
        convert.bucket_rows_from_wire(message)


def test_choices_of_buckets_come_back_and_are_bounded() -> None:
    choices = (BucketChoice(Tier.DRAM, (0, 9, 255)), BucketChoice(Tier.SSD, (3,)))
    wire = [convert.bucket_choice_to_wire(choice) for choice in choices]
    assert convert.bucket_choices_from_wire(wire) == choices
    for wrong in (
        [wire[0], wire[0]],
        [index_pb2.BucketChoice(tier=2, buckets=b"\2\1")],
        [index_pb2.BucketChoice(tier=2, buckets=b"\2\2")],
        [index_pb2.BucketChoice(tier=2, buckets=bytes(range(MOST_REPAIRED + 1)))],
        [index_pb2.BucketChoice(tier=9, buckets=b"\1")],
        [*wire, *wire],
    ):
        with pytest.raises(InvalidRequestError):
            convert.bucket_choices_from_wire(wrong)
