"""What `where` and `status` make of the index's and the daemons' answers."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from client_sdk.cli.status import NodeView, print_status, status_json
from client_sdk.cli.where import choose_engine, read_tokens
from client_sdk.index_client import IndexedNode
from client_sdk.status import NodeStatus, TierStatus
from emberkv_proto.errors import ConfigError
from emberkv_proto.types import (
    EngineInfo,
    Incarnation,
    NamespaceId,
    NodeId,
    Seq,
    Tier,
    TierDigest,
)

NODE = NodeId("node-a")
ENGINE = EngineInfo("engine-a", "http://e", "m", NamespaceId(bytes(16)), 16)
INDEXED = IndexedNode(
    NODE,
    Incarnation(3),
    Seq(9),
    "ok",
    "exact",
    "127.0.0.1:1",
    (TierDigest(Tier.DRAM, 5, 0), TierDigest(Tier.SSD, 7, 0)),
    (ENGINE,),
    0.25,
    0,
    1,
)
DAEMON = NodeStatus(
    NODE,
    Incarnation(3),
    "serving",
    12.0,
    (
        TierStatus(Tier.DRAM, 1 << 20, 1 << 19, 5, "ok"),
        TierStatus(Tier.SSD, 1 << 30, 1 << 20, 7, "ok"),
    ),
    (ENGINE,),
    2,
    0,
    0,
    Seq(9),
    {},
    "0.1.0",
)


@pytest.mark.parametrize("text", ["1,2,3", "[1, 2, 3]", " [1,2,3] "])
def test_token_ids_are_a_list_or_numbers_with_commas(text: str) -> None:
    assert read_tokens(text) == [1, 2, 3]


@pytest.mark.parametrize("text", ["1,-2", "1.5", "[true]", "a", "4294967296", "@/nowhere"])
def test_what_is_no_token_id_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        read_tokens(text)


def test_the_chain_is_hashed_in_the_namespace_of_the_named_model() -> None:
    other = replace(ENGINE, model="other", namespace_id=NamespaceId(b"1" * 16))
    nodes = [ENGINE, other]
    assert choose_engine(nodes, "other") is other
    with pytest.raises(ConfigError, match=r"\(m, other\); name one"):
        choose_engine(nodes, "")
    with pytest.raises(ConfigError, match="no engine announced model 'x'; there is m, other"):
        choose_engine(nodes, "x")
    assert choose_engine([ENGINE], "") is ENGINE


def test_the_index_matches_only_when_every_tier_counts_the_same() -> None:
    assert NodeView(INDEXED, DAEMON, "").index_matches is True
    fewer = replace(INDEXED, tiers=(TierDigest(Tier.DRAM, 5, 0), TierDigest(Tier.SSD, 6, 0)))
    assert NodeView(fewer, DAEMON, "").index_matches is False
    assert NodeView(INDEXED, None, "away").index_matches is None


def test_status_shows_nodes_tiers_lag_and_engines() -> None:
    view = NodeView(INDEXED, DAEMON, "")
    text = io.StringIO()
    print_status(Console(file=text, width=80), "127.0.0.1:7200", [view])
    shown = text.getvalue()
    for wanted in ("node-a", "exact", "DRAM", "SSD", "engine-a", "serving", "0.2"):
        assert wanted in shown
    loaded = json.loads(json.dumps(status_json("127.0.0.1:7200", [view])))
    node = loaded["nodes"][0]
    assert node["index_blocks"] == {"dram": 5, "ssd": 7}
    assert node["daemon"]["tiers"][1]["tier"] == "ssd"
    assert node["index_matches_daemon"] is True


def test_a_daemon_that_is_away_is_told_as_its_nodes_problem() -> None:
    text = io.StringIO()
    print_status(Console(file=text, width=160), "i", [NodeView(INDEXED, None, "daemon is away")])
    assert "daemon is away" in text.getvalue()


def test_the_hit_rate_counts_what_peers_gave_among_the_missed() -> None:
    counters = {"hit_blocks_dram": 4.0, "hit_blocks_ssd": 2.0, "missed_blocks": 4.0}
    view = NodeView(INDEXED, replace(DAEMON, counters=counters), "")
    assert view.hit_rate == 0.6
    pulled = replace(DAEMON, counters=counters | {"hit_blocks_peer": 2.0})
    assert NodeView(INDEXED, pulled, "").hit_rate == 0.8
    assert NodeView(INDEXED, DAEMON, "").hit_rate is None
