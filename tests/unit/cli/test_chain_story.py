"""Why a hit ends where it ends, in words and as a reason for programs."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from client_sdk.cli.chain_story import (
    DRAM,
    HBM,
    SSD,
    AskedChain,
    EndReason,
    TierRun,
    engine_where,
    hint_of,
    node_where,
    runs_of,
)
from client_sdk.cli.where import Adapter, Where, read_hashes
from client_sdk.cli.where_report import MAX_RUNS_SHOWN, print_where, where_json
from client_sdk.index_client import IndexedNode, TracedEngine, TracedNode
from emberkv_proto.errors import ConfigError
from emberkv_proto.hashing import block_hashes
from emberkv_proto.types import (
    EngineInfo,
    Incarnation,
    NamespaceId,
    NodeHit,
    NodeId,
    Seq,
    Tier,
)

NODE_ID = NodeId("node-a")
ENGINE = EngineInfo("engine-a", "http://e", "m", NamespaceId(b"n" * 16), 16)
NODE = IndexedNode(NODE_ID, Incarnation(1), Seq(1), "ok", "exact", "h:1", (), (ENGINE,), 0.1, 0, 0)
HASHES = tuple(block_hashes(ENGINE.namespace_id, list(range(256 * 16)), 16))
CHAIN = AskedChain(HASHES, tuple(range(256 * 16)), ENGINE)


def traced(*runs: tuple[int, int]) -> TracedNode:
    """Blocks of each run, and their tiers; the rest is missing."""
    tiers = b"".join(bytes([held]) * count for count, held in runs)
    return TracedNode(NODE_ID, "ok", "exact", tiers + bytes(256 - len(tiers)))


def test_a_chain_with_a_hole_ends_there_and_says_what_lies_behind() -> None:
    found = node_where(NODE, traced((100, DRAM | SSD), (10, 0), (146, SSD)), CHAIN)
    assert (found.hit_blocks, found.dram_blocks, found.ssd_blocks) == (100, 100, 0)
    assert found.reason is EndReason.HOLE
    assert found.ends_because == (
        "blocks 100-109 are in neither DRAM nor SSD; 146 blocks behind the hole cannot be used"
    )
    assert [str(run) for run in found.runs] == [
        "0-99 DRAM+SSD",
        "100-109 missing",
        "110-255 SSD",
    ]


def test_tiers_that_alternate_do_not_end_a_hit() -> None:
    found = node_where(NODE, traced((10, DRAM), (90, SSD), (156, DRAM | SSD)), CHAIN)
    assert (found.hit_blocks, found.dram_blocks, found.ssd_blocks) == (256, 166, 90)
    assert (found.reason, found.ends_because) == (
        EndReason.ALL_THERE,
        "all full blocks are there",
    )


@pytest.mark.parametrize(
    ("runs", "reason", "words"),
    [
        (((200, SSD),), EndReason.STORED_NO_FURTHER, "blocks 200-255 are in neither DRAM nor SSD"),
        (((255, DRAM),), EndReason.STORED_NO_FURTHER, "block 255 is in neither DRAM nor SSD"),
        (
            ((0, 0), (1, 0), (1, DRAM)),
            EndReason.HOLE,
            "block 0 is in neither DRAM nor SSD; 1",
        ),
        ((), EndReason.NOTHING_STORED, "no block of this chain is here"),
    ],
)
def test_the_reason_follows_from_what_is_there(
    runs: tuple[tuple[int, int], ...], reason: EndReason, words: str
) -> None:
    found = node_where(NODE, traced(*runs), CHAIN)
    assert found.reason is reason
    assert found.ends_because.startswith(words)
    doubtful = node_where(replace(NODE, exactness="degraded"), traced(*runs), CHAIN)
    assert doubtful.ends_because.endswith("(as far as a degraded index knows)")


def test_a_node_that_is_silent_or_gone_counts_for_nothing_and_says_what_it_would() -> None:
    found = node_where(replace(NODE, state="suspect"), traced((20, SSD)), CHAIN)
    assert (found.hit_blocks, found.reason) == (0, EndReason.NODE_AWAY)
    assert found.ends_because == (
        "the node is suspect, so it is in no answer; 20 blocks at the head would count"
    )
    assert found.runs[0] == TierRun(0, 19, (Tier.SSD,))
    nothing = node_where(replace(NODE, state="gone"), traced(), CHAIN)
    assert nothing.ends_because == "the node is gone, so it is in no answer"


def test_a_node_that_another_process_follows_is_told_of_by_its_hit() -> None:
    found = node_where(NODE, None, CHAIN, NodeHit(NODE_ID, 30, 10, 20))
    assert (found.hit_blocks, found.dram_blocks, found.ssd_blocks) == (30, 10, 20)
    assert found.reason is EndReason.NOT_TRACED
    assert found.ends_because.startswith("block 30 does not count")
    whole = node_where(NODE, None, CHAIN, NodeHit(NODE_ID, 256, 256, 0))
    assert whole.reason is EndReason.ALL_THERE
    silent = node_where(replace(NODE, state="suspect"), None, CHAIN)
    assert silent.reason is EndReason.NODE_AWAY
    assert node_where(NODE, None, replace(CHAIN, hashes=())).reason is EndReason.NO_FULL_BLOCK


def test_a_prompt_shorter_than_a_block_has_no_hit_anywhere() -> None:
    short = replace(CHAIN, hashes=(), tokens=(1, 2))
    found = node_where(NODE, TracedNode(NODE_ID, "ok", "exact", b""), short)
    assert (found.reason, found.ends_because) == (
        EndReason.NO_FULL_BLOCK,
        "the prompt fills no block",
    )
    assert hint_of(short, [found], []) == ""


def test_engines_of_another_namespace_or_model_explain_an_empty_node() -> None:
    other = replace(ENGINE, namespace_id=NamespaceId(b"o" * 16))
    found = node_where(replace(NODE, engines=(other,)), traced(), CHAIN)
    assert found.reason is EndReason.OTHER_NAMESPACE
    assert "engines of m are of another namespace" in found.ends_because
    stranger = node_where(replace(NODE, engines=(replace(other, model="x"),)), traced(), CHAIN)
    assert stranger.reason is EndReason.OTHER_MODEL
    assert "(x)" in stranger.ends_because
    both = node_where(replace(NODE, engines=(other, ENGINE)), traced(), CHAIN)
    assert both.reason is EndReason.NOTHING_STORED
    none = node_where(replace(NODE, engines=()), traced(), CHAIN)
    assert none.reason is EndReason.NOTHING_STORED


def test_when_nobody_has_anything_the_hint_names_what_is_in_the_hashes() -> None:
    empty = [node_where(NODE, traced(), CHAIN)]
    hint = hint_of(CHAIN, empty, [])
    for words in ("without a cache salt", "without an adapter", "--salt", "blocks of 16 tokens"):
        assert words in hint
    given = hint_of(replace(CHAIN, is_salted=True, adapter="sql"), empty, [])
    assert "with the salt given, with adapter sql" in given
    assert "evicted everywhere" in hint_of(replace(CHAIN, engine=None), empty, [])
    assert hint_of(CHAIN, [node_where(NODE, traced((1, SSD)), CHAIN)], []) == ""


def test_an_engine_alternates_between_its_hbm_and_its_node() -> None:
    node_tiers = traced((10, DRAM), (10, 0), (5, SSD)).tiers
    node = node_where(NODE, TracedNode(NODE_ID, "ok", "exact", node_tiers), CHAIN)
    hbm = bytes([0] * 10 + [HBM] * 12 + [0] * 234)
    found = engine_where(TracedEngine(ENGINE, NODE_ID, "current", hbm), node, node_tiers)
    assert (found.hit_blocks, found.hbm_blocks) == (25, 12)
    assert found.reason is EndReason.STORED_NO_FURTHER
    assert found.ends_because == "blocks 25-255 are neither in its HBM nor on its node"
    away = engine_where(TracedEngine(ENGINE, NODE_ID, "away", hbm), node, node_tiers)
    assert (away.hit_blocks, away.hbm_blocks) == (10, 0)
    assert away.ends_because.endswith("its event stream is away, so its HBM does not count")
    suspect = node_where(replace(NODE, state="suspect"), None, CHAIN)
    alone = engine_where(TracedEngine(ENGINE, NODE_ID, "current", hbm), suspect, node_tiers)
    assert (alone.hit_blocks, alone.reason) == (0, EndReason.HOLE)


def test_runs_cover_every_block_once() -> None:
    tiers = bytes([DRAM, DRAM, 0, SSD, SSD | HBM, SSD | HBM])
    assert runs_of(tiers) == (
        TierRun(0, 1, (Tier.DRAM,)),
        TierRun(2, 2, ()),
        TierRun(3, 3, (Tier.SSD,)),
        TierRun(4, 5, (Tier.HBM, Tier.SSD)),
    )
    assert runs_of(b"") == ()


def where_of(*runs: tuple[int, int]) -> Where:
    trace = traced(*runs)
    node = node_where(NODE, trace, CHAIN)
    engine = engine_where(TracedEngine(ENGINE, NODE_ID, "current", bytes(256)), node, trace.tiers)
    return Where("m", 256 * 16, 16, HASHES, (node,), (engine,), "", None, "away")


def test_the_report_of_a_long_chain_is_short_and_the_json_has_all() -> None:
    many = where_of(*((1, DRAM if number % 2 else SSD) for number in range(100)))
    text = io.StringIO()
    print_where(Console(file=text, width=200), many)
    shown = text.getvalue()
    assert "100/256" in shown
    assert f"and {101 - MAX_RUNS_SHOWN} more runs" in shown
    assert len(shown.splitlines()) < 20
    loaded = json.loads(json.dumps(where_json(many)))
    assert len(loaded["nodes"][0]["runs"]) == 101
    assert loaded["nodes"][0]["reason"] == "stored_no_further"
    assert loaded["engines"][0]["hit_tokens"] == 1600
    assert loaded["blocks"][0] == HASHES[0].hex()


def test_hashes_are_read_as_words_json_or_from_what_where_printed(tmp_path: Path) -> None:
    words = [block_hash.hex() for block_hash in HASHES[:2]]
    file = tmp_path / "where.json"
    file.write_text(json.dumps({"blocks": words, "nodes": []}))
    for text in (",".join(words), " ".join(words), json.dumps(words), f"@{file}"):
        assert read_hashes(text) == HASHES[:2]


@pytest.mark.parametrize("text", ["xyz", "ab", "[1]", "{}", "[", "@/nowhere", '{"blocks": 7}'])
def test_what_is_no_hash_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        read_hashes(text)


def test_an_adapter_has_a_name_and_weights() -> None:
    assert Adapter.parse("a=w=1") == Adapter("a", "w=1")
    for text in ("a", "=w", "a="):
        with pytest.raises(ConfigError, match="NAME=WEIGHTS_ID"):
            Adapter.parse(text)
