"""`emberkv nodes`: what it prints of the nodes, and of their changes."""

from __future__ import annotations

import io
import json

from rich.console import Console

from client_sdk.cli.nodes import show_json_lines, show_text
from client_sdk.index_client import IndexedNode, WatchedNodes
from emberkv_proto.types import (
    EngineInfo,
    Incarnation,
    NamespaceId,
    NodeId,
    Seq,
    Tier,
    TierDigest,
)

NODE = IndexedNode(
    NodeId("node-a"),
    Incarnation(3),
    Seq(9),
    "ok",
    "exact",
    "127.0.0.1:7100",
    (TierDigest(Tier.DRAM, 5, 0), TierDigest(Tier.SSD, 7, 0)),
    (EngineInfo("engine-a", "http://e", "m", NamespaceId(bytes(16)), 16),),
    0.25,
    0,
    1,
)


def printed(*changes: WatchedNodes) -> str:
    text = io.StringIO()
    show = show_text(Console(file=text, width=160))
    for change in changes:
        show(change)
    return text.getvalue()


def test_all_nodes_are_a_table_and_changes_are_lines() -> None:
    shown = printed(
        WatchedNodes(True, (NODE,), ()), WatchedNodes(False, (NODE,), (NodeId("[b]node[/b]"),))
    )
    table, *changes = shown.split("\n", 2)[1:]
    for word in ("node-a", "ok", "exact", "3", "127.0.0.1:7100", "DRAM 5, SSD 7", "engine-a (m)"):
        assert word in table
    assert "node-a ok exact; engines: engine-a (m)" in changes[0]
    assert "[b]node[/b] is known no longer" in changes[0]


def test_an_empty_index_is_said_to_be_empty() -> None:
    assert printed(WatchedNodes(True, (), ())) == "the index knows no node\n"


def test_each_change_is_one_line_of_json() -> None:
    lines: list[str] = []
    show_json_lines(lines.append)(WatchedNodes(False, (NODE,), (NodeId("b"),)))
    assert json.loads(lines[0]) == {
        "is_whole": False,
        "nodes": [
            {
                "node_id": "node-a",
                "state": "ok",
                "exactness": "exact",
                "incarnation": 3,
                "seq": 9,
                "grpc_address": "127.0.0.1:7100",
                "blocks": {"dram": 5, "ssd": 7},
                "lag_seconds": 0.25,
                "engines": [
                    {
                        "engine_id": "engine-a",
                        "url": "http://e",
                        "model": "m",
                        "role": "both",
                        "dp_rank": 0,
                    }
                ],
            }
        ],
        "removed": ["b"],
    }
