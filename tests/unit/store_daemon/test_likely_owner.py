"""The node that is asked before the index: only while it was the right one again and again."""

from __future__ import annotations

from emberkv_proto.types import NodeId
from store_daemon.likely_owner import CHOSEN_IN_A_ROW, KNOWN_SECONDS, MOST_GUESSES, LikelyOwner

A, B = NodeId("a"), NodeId("b")


def told(*nodes: NodeId) -> LikelyOwner:
    likely = LikelyOwner()
    for node in nodes:
        likely.gave(node, 0.0)
    return likely


def test_a_node_is_likely_once_it_was_named_often_enough_in_a_row() -> None:
    assert told().guess(0.0) is None
    assert told(*[A] * (CHOSEN_IN_A_ROW - 1)).guess(0.0) is None
    assert told(*[A] * CHOSEN_IN_A_ROW).guess(0.0) == A
    assert told(A, A, B).guess(0.0) is None
    assert told(A, B, A, B).guess(0.0) is None
    assert told(A, B, B).guess(0.0) == B


def test_a_wrong_guess_has_to_be_earned_anew() -> None:
    likely = told(A, A, A)
    likely.was_wrong()
    assert likely.guess(0.0) is None
    likely.gave(A, 0.0)
    assert likely.guess(0.0) is None
    likely.gave(A, 0.0)
    assert likely.guess(0.0) == A


def test_the_index_is_asked_after_a_pause() -> None:
    likely = told(A, A)
    assert likely.guess(KNOWN_SECONDS) == A
    assert likely.guess(KNOWN_SECONDS + 0.1) is None


def test_the_index_is_asked_once_in_a_while() -> None:
    likely = told(A, A)
    for _ in range(2):
        assert [likely.guess(0.0) for _ in range(MOST_GUESSES)] == [A] * MOST_GUESSES
        assert likely.guess(0.0) is None
    likely.gave(B, 0.0)
    assert likely.guess(0.0) is None
