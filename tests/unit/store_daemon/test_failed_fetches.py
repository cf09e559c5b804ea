"""Failures that are remembered for a while, and no more of them than fit."""

from __future__ import annotations

from emberkv_proto.types import BlockHash, NodeId
from store_daemon.failed_fetches import MAX_REMEMBERED, FailedFetches

A, B = NodeId("a"), NodeId("b")


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "little"))


def test_peer_is_not_asked_for_a_block_it_did_not_give_until_its_time_is_over() -> None:
    failed = FailedFetches(block_seconds=2.0, peer_seconds=1.0)
    failed.lacks(A, block(1), 10.0)
    assert not failed.may_ask(A, block(1), 11.9)
    assert failed.may_ask(A, block(1), 12.0)
    assert failed.may_ask(A, block(2), 10.0)
    assert failed.may_ask(B, block(1), 10.0)
    failed.check_integrity()


def test_peer_that_is_away_is_asked_for_nothing() -> None:
    failed = FailedFetches(block_seconds=2.0, peer_seconds=1.0)
    failed.is_away(A, 10.0)
    assert not failed.may_ask(A, block(1), 10.9)
    assert failed.may_ask(A, block(1), 11.0)
    assert failed.may_ask(B, block(1), 10.0)


def test_peer_that_has_begun_another_life_is_asked_again_but_not_for_what_it_lacked() -> None:
    failed = FailedFetches(block_seconds=2.0, peer_seconds=1.0)
    failed.is_away(A, 10.0)
    failed.lacks(A, block(1), 10.0)
    failed.is_back(A)
    failed.is_back(B)
    assert failed.may_ask(A, block(2), 10.0)
    assert not failed.may_ask(A, block(1), 10.0)


def test_oldest_failures_are_forgotten_when_there_are_too_many() -> None:
    failed = FailedFetches(block_seconds=2.0, peer_seconds=1.0)
    for number in range(MAX_REMEMBERED + 1):
        failed.lacks(A, block(number), 10.0)
    failed.check_integrity()
    assert failed.may_ask(A, block(0), 10.0)
    assert not failed.may_ask(A, block(1), 10.0)
