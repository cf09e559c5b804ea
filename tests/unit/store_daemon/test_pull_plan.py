"""Whom a puller asks first."""

from __future__ import annotations

from emberkv_proto.types import NodeHit, NodeId
from store_daemon.pull_plan import Owner, PullCosts, choose_owner

COSTS = PullCosts(ssd_bytes_per_second=1e9, setup_seconds=0.003)
MIB = 1 << 20


def owner(name: str, blocks: int, dram: int, *, speed: float = 1e9, asked_bytes: int = 0) -> Owner:
    hit = NodeHit(NodeId(name), blocks, dram, blocks - dram)
    return Owner(hit, speed, asked_bytes)


def chosen(*owners: Owner) -> str | None:
    found = choose_owner(owners, MIB, COSTS)
    return found.hit.node_id if found is not None else None


def test_nobody_is_chosen_of_none_or_of_those_that_hold_nothing() -> None:
    assert chosen() is None
    assert chosen(owner("a", 0, 0)) is None


def test_longest_run_wins_when_all_are_in_dram_and_as_fast() -> None:
    assert chosen(owner("a", 5, 5), owner("b", 90, 90), owner("c", 60, 60)) == "b"


def test_dram_goes_before_ssd() -> None:
    assert chosen(owner("a", 50, 0), owner("b", 50, 50), owner("c", 50, 20)) == "b"
    assert chosen(owner("a", 100, 0), owner("b", 90, 90)) == "b", "its last ten come from a"


def test_a_few_blocks_in_dram_are_not_worth_a_second_owner() -> None:
    assert chosen(owner("a", 100, 0), owner("b", 2, 2)) == "a"


def test_least_busy_of_equals_is_asked() -> None:
    busy = owner("a", 50, 50, asked_bytes=200 * MIB)
    assert chosen(busy, owner("b", 50, 50, asked_bytes=10 * MIB)) == "b"
    assert chosen(busy, owner("b", 50, 0)) == "b", "its drive is quicker than a's other readers"


def test_faster_peer_is_asked_unless_it_has_much_less() -> None:
    assert chosen(owner("a", 50, 50, speed=1e8), owner("b", 50, 50)) == "b"
    assert chosen(owner("a", 50, 50, speed=9e8), owner("b", 1, 1)) == "a"
