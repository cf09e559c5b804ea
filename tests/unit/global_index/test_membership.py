"""Silence, return and removal of nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from emberkv_proto.types import Incarnation, NodeId
from global_index.membership import MAX_REMOVED, Liveness, Membership, Transition

A, B = NodeId("a"), NodeId("b")
ONE, TWO = Incarnation(1), Incarnation(2)


@pytest.fixture
def members() -> Iterator[Membership]:
    members = Membership(3.0, 30.0)
    yield members
    members.check_integrity()


def test_silence_makes_a_node_suspect_then_gone_and_a_message_makes_it_ok(
    members: Membership,
) -> None:
    members.hear(A, ONE, 0.0)
    members.hear(B, ONE, 2.0)
    assert members.tick(2.9) == []
    assert members.tick(3.0) == [Transition(A, Liveness.SUSPECT)]
    assert members.tick(4.0) == []
    assert members.tick(31.0) == [Transition(A, Liveness.GONE), Transition(B, Liveness.SUSPECT)]
    assert members.hear(A, ONE, 40.0)
    assert members.state(A) is Liveness.OK
    assert members.tick(41.0) == [Transition(B, Liveness.GONE)]


def test_removed_node_comes_back_with_a_newer_incarnation_only(members: Membership) -> None:
    members.hear(A, ONE, 0.0)
    members.remove(A, ONE)
    assert not members.hear(A, ONE, 1.0)
    assert members.state(A) is Liveness.REMOVED
    assert members.hear(A, TWO, 2.0)
    assert members.state(A) is Liveness.OK


def test_readmitted_node_comes_back_in_the_same_life(members: Membership) -> None:
    members.hear(A, ONE, 0.0)
    members.remove(A, ONE)
    members.readmit(A)
    assert members.hear(A, ONE, 1.0)


def test_fences_of_removed_nodes_are_bounded(members: Membership) -> None:
    for number in range(MAX_REMOVED + 10):
        members.hear(NodeId(f"n{number}"), ONE, 0.0)
        members.remove(NodeId(f"n{number}"), ONE)
    members.check_integrity()
    assert members.state(NodeId("n0")) is None


def test_unknown_node_has_no_state_and_infinite_silence(members: Membership) -> None:
    assert members.state(A) is None
    assert members.silent_seconds(A, 1.0) == float("inf")


def test_bounds_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ValueError, match="suspect"):
        Membership(5.0, 5.0)
