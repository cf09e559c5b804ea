"""Hits of nodes and engines as Mooncake's and Dynamo's callers expect to read them."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest

from emberkv_proto.errors import InvalidRequestError
from emberkv_proto.events import Keys
from emberkv_proto.hashing import block_hashes, index_keys
from emberkv_proto.types import ChainHits, EngineHit, NamespaceId, NodeHit, NodeId
from global_index.http_answers import (
    ChainKind,
    Instance,
    UnknownModelError,
    answer_hashes,
    answer_tokens,
    shaped,
)
from global_index.http_bodies import read_hashes_question, read_tokens_question

A, B = NodeId("node-a"), NodeId("node-b")
KIND = ChainKind(NamespaceId(b"k" * 16), 16)
OTHER = ChainKind(NamespaceId(b"o" * 16), 4)
TOKENS = list(range(100))
KNOWN = [
    Instance("e1", 0, A, "m", KIND),
    Instance("e1", 1, A, "m", KIND),
    Instance("e2", 0, B, "m", KIND),
    Instance("x", 0, B, "other", OTHER),
    Instance("node-c", 0, NodeId("node-c"), None, None),
]
HITS = ChainHits(
    (NodeHit(A, 4, 3, 1), NodeHit(B, 2, 0, 2), NodeHit(NodeId("node-c"), 1, 1, 0)),
    (EngineHit("e1", 1, "http://e1", A, 6, 2, 3, 1),),
)


class Index:
    """Answers HITS for one chain, nothing for others."""

    def __init__(self, chain: Keys) -> None:
        self.chain = chain
        self.asked: list[Keys] = []

    async def __call__(self, keys: Keys) -> ChainHits:
        self.asked.append(keys)
        return HITS if np.array_equal(keys, self.chain) else ChainHits()


def index_for(kind: ChainKind, salt: bytes = b"") -> Index:
    return Index(index_keys(block_hashes(kind.namespace_id, TOKENS, kind.block_tokens, salt=salt)))


async def query(known: Sequence[Instance], index: Index, **fields: object) -> dict[str, object]:
    question = read_tokens_question(json.dumps({"token_ids": TOKENS, **fields}).encode())
    return shaped(question, await answer_tokens(known, index, question))


async def test_dynamos_answer_has_scores_by_rank_and_tokens_by_medium() -> None:
    assert await query(KNOWN, index_for(KIND), model_name="m") == {
        "scores": {"e1": {"0": 64, "1": 96}, "e2": {"0": 32}, "node-c": {"0": 16}},
        "frequencies": [],
        "instances": {
            "e1": {
                "longest_matched": 96,
                "gpu": 32,
                "cpu": 80,
                "disk": 96,
                "dp": {"0": 64, "1": 96},
            },
            "e2": {"longest_matched": 32, "gpu": 0, "cpu": 0, "disk": 32, "dp": {"0": 32}},
            "node-c": {"longest_matched": 16, "gpu": 0, "cpu": 16, "disk": 16, "dp": {"0": 16}},
        },
    }


async def test_mooncakes_answer_stands_under_the_callers_tenant() -> None:
    assert await query(KNOWN, index_for(KIND), model="m", tenant_id="t", instance_id="e1") == {
        "t": {
            "e1": {
                "longest_matched": 96,
                "GPU": 32,
                "CPU": 80,
                "DISK": 96,
                "DP": {"0": 64, "1": 96},
            }
        }
    }


async def test_an_instance_that_is_named_is_told_of_even_without_a_hit() -> None:
    assert await query(KNOWN, index_for(OTHER), model="m", instance_id="e2") == {
        "default": {"e2": {"longest_matched": 0, "GPU": 0, "CPU": 0, "DISK": 0, "DP": {"0": 0}}}
    }
    assert await query(KNOWN, index_for(OTHER), model="m") == {"default": {}}
    assert await query(KNOWN, index_for(KIND), model="m", instance_id="nobody") == {"default": {}}


async def test_the_salt_is_in_the_hashes_that_are_asked_for() -> None:
    assert (await query(KNOWN, index_for(KIND, b"s"), model="m", cache_salt="s"))["default"]
    assert not (await query(KNOWN, index_for(KIND, b"s"), model="m"))["default"]


async def test_each_kind_of_a_model_is_asked_with_its_own_hashes() -> None:
    index = index_for(OTHER)
    known = [*KNOWN, Instance("e3", 0, B, "m", OTHER)]
    answer = await query(known, index, model="m")
    assert len(index.asked) == 2
    assert answer == {
        "default": {
            "e3": {"longest_matched": 8, "GPU": 0, "CPU": 0, "DISK": 8, "DP": {"0": 8}},
            "node-c": {"longest_matched": 4, "GPU": 0, "CPU": 4, "DISK": 4, "DP": {"0": 4}},
        }
    }


async def test_a_prompt_without_a_full_block_asks_nobody() -> None:
    index = index_for(KIND)
    assert await query(KNOWN, index, model="m", token_ids=[1, 2, 3]) == {"default": {}}
    assert index.asked == []


async def test_a_model_that_nobody_serves_is_named_beside_those_that_are() -> None:
    with pytest.raises(UnknownModelError, match="'nope' is known; there is m, other"):
        await query(KNOWN, index_for(KIND), model="nope")
    with pytest.raises(UnknownModelError, match="no engine at all"):
        await query(KNOWN[4:], index_for(KIND), model="m")


async def test_hashes_are_asked_as_they_are_and_must_be_of_our_blocks() -> None:
    index = index_for(KIND)
    asked = {"model_name": "m", "seq_hashes": index.chain.tolist(), "block_size": 16}
    question = read_hashes_question(json.dumps(asked).encode())
    hits = await answer_hashes(KNOWN, index, question)
    assert {(hit.instance_id, hit.dp_rank): hit.tokens for hit in hits} == {
        ("e1", 0): 64,
        ("e1", 1): 96,
        ("e2", 0): 32,
        ("node-c", 0): 16,
    }
    wrong = read_hashes_question(json.dumps({**asked, "block_size": 64}).encode())
    with pytest.raises(InvalidRequestError, match="blocks of m have 16 tokens here"):
        await answer_hashes(KNOWN, index, wrong)
    empty = read_hashes_question(json.dumps({**asked, "seq_hashes": []}).encode())
    assert await answer_hashes(KNOWN, index, empty) == []
