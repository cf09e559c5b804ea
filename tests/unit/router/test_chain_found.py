"""What a chain's answer says of one node and one engine, however its URL was written."""

from __future__ import annotations

from emberkv_proto.types import ChainHits, EngineHit, NodeHit, NodeId
from router.decision import Chain

ONE, TWO = NodeId("one"), NodeId("two")
FOUND = ChainHits(
    (NodeHit(ONE, 9, 5, 4), NodeHit(TWO, 4, 4, 0)),
    (
        EngineHit("a", 1, "http://a:1/", ONE, 9, 9, 0, 0),
        EngineHit("a", 0, "http://a:1/", ONE, 7, 7, 0, 0),
        EngineHit("b", 0, "http://b:1", TWO, 4, 4, 0, 0),
    ),
)


def test_an_engine_is_found_by_its_url_and_by_the_rank_that_has_most() -> None:
    chain = Chain((), (), FOUND)
    assert chain.on_engine("http://a:1") == FOUND.engines[0]
    assert chain.on_engine("http://b:1") == FOUND.engines[2]
    assert chain.on_engine("http://c:1") is None


def test_the_best_node_beside_one_is_another() -> None:
    chain = Chain((), (), FOUND)
    assert chain.on_node("two") == FOUND.nodes[1]
    assert chain.on_node("three") is None
    assert (chain.best_beside("one"), chain.best_beside("two")) == (4, 9)
    assert chain.best_beside("three") == 9
    assert Chain((), (), ChainHits()).best_beside("one") == 0
