"""What callers of both indexers send, and what is refused with a word about the field."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from emberkv_proto.errors import InvalidRequestError
from emberkv_proto.hashing import block_hashes, index_keys
from emberkv_proto.request_keys import adapter_key
from emberkv_proto.types import NamespaceId
from global_index import http_bodies
from global_index.http_bodies import (
    Registration,
    Shape,
    Unregistration,
    read_hashes_question,
    read_registration,
    read_tokens_question,
    read_unregistration,
)

HASHES = block_hashes(NamespaceId(bytes(16)), list(range(64)), 16)


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def test_mooncakes_query_is_read() -> None:
    question = read_tokens_question(
        body(
            model="m",
            lora_name=None,
            token_ids=[1, 4294967295],
            tenant_id="t",
            instance_id="i",
            block_size=64,
            cache_salt="s",
        )
    )
    assert question.shape is Shape.MOONCAKE
    assert (question.model, question.tenant, question.instance_id) == ("m", "t", "i")
    assert (question.block_tokens, question.salt, question.adapter) == (64, b"s", ())
    assert question.tokens.tolist() == [1, 4294967295]


def test_dynamos_query_is_read() -> None:
    question = read_tokens_question(body(model_name="m", token_ids=[], unknown=[1]))
    assert question.shape is Shape.DYNAMO
    assert (question.tenant, question.instance_id, question.block_tokens) == ("default", None, None)
    assert question.tokens.tolist() == []
    assert question.salt == b""


def test_an_adapter_needs_its_weights_as_in_every_other_hash() -> None:
    fields = {"model_name": "m", "token_ids": [1], "lora_name": "a"}
    question = read_tokens_question(body(**fields, lora_weights_id="w"))
    assert question.adapter == (adapter_key("a", "w"),)
    with pytest.raises(InvalidRequestError, match="lora_weights_id"):
        read_tokens_question(body(**fields))


@pytest.mark.parametrize("field", ["seq_hashes", "block_hashes", "block_hash"])
def test_hashes_are_numbers_of_either_sign_or_whole_hashes(field: str) -> None:
    keys = index_keys(HASHES)
    big = int(keys[0])
    asked: list[Any] = [big, big - (1 << 64) if big >> 63 else big, HASHES[1].hex(), -1, 0]
    question = read_hashes_question(json.dumps({"model_name": "m", field: asked}).encode())
    assert question.keys.tolist() == [big, big, int(keys[1]), (1 << 64) - 1, 0]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "JSON object"),
        (b"\xff", "no JSON"),
        (body(token_ids=[1]), "model or modelname or model_name is missing"),
        (body(model="m"), "token_ids is missing"),
        (body(model=7, token_ids=[1]), "model must be a string"),
        (body(model="m" * 2000, token_ids=[1]), "model must be a string"),
        (body(model="m", token_ids="1"), "token_ids"),
        (body(model="m", token_ids=[-1]), "token_ids"),
        (body(model="m", token_ids=[1 << 32]), "token_ids"),
        (body(model="m", token_ids=[1 << 70]), "token_ids"),
        (body(model="m", token_ids=[1.5]), "token_ids"),
        (body(model="m", token_ids=[True]), "token_ids"),
        (body(model="m", token_ids=[[1], [2, 3]]), "token_ids"),
        (body(model="m", token_ids=["1"]), "token_ids"),
        (body(model="m", token_ids=[1], block_size=0), "block_size"),
        (body(model="m", token_ids=[1], block_size=16.0), "block_size"),
        (body(model="m", token_ids=[1], instance_id=[]), "instance_id"),
        (body(model="m", token_ids=[1], cache_salt=5), "cache_salt"),
        (body(model="m", token_ids=[1], lora_id=3), "lora_id"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(raw: bytes, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        read_tokens_question(raw)


@pytest.mark.parametrize("first", [1, ""])
def test_one_long_text_among_token_ids_costs_no_memory(first: object) -> None:
    raw = body(model="m", token_ids=[first, "x" * 100_000, *[""] * 200])
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError, match="token_ids"):
            read_tokens_question(raw)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def test_lists_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_bodies, "MAX_TOKENS", 3)
    read_tokens_question(body(model="m", token_ids=[1] * 3))
    with pytest.raises(InvalidRequestError, match="at most 3"):
        read_tokens_question(body(model="m", token_ids=[1] * 4))
    with pytest.raises(InvalidRequestError, match="at most 65536"):
        read_hashes_question(body(model="m", seq_hashes=[1] * 65537))


@pytest.mark.parametrize("value", [1 << 64, -(1 << 63) - 1, "ab", "g" * 64, 1.0, True, None])
def test_what_is_no_hash_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="64 bits"):
        read_hashes_question(body(model="m", seq_hashes=[value]))


def test_registrations_of_both_kinds_are_read() -> None:
    mooncake = read_registration(
        body(
            endpoint="tcp://1.1.1.1:5557",
            replay_endpoint="tcp://1.1.1.1:5558",
            type="vLLM",
            modelname="m",
            instance_id="i",
            block_size=16,
            store_block_size=64,
            dp_rank=2,
            node_id="n",
        )
    )
    assert mooncake == Registration(
        Shape.MOONCAKE,
        "vllm",
        "i",
        2,
        "tcp://1.1.1.1:5557",
        "tcp://1.1.1.1:5558",
        "m",
        "default",
        16,
        64,
        "n",
        "",
        "",
    )
    dynamo = read_registration(
        body(instance_id=7, endpoint="tcp://h:1", model_name="m", block_size=16)
    )
    assert (dynamo.shape, dynamo.instance_id, dynamo.dp_rank) == (Shape.DYNAMO, "7", 0)
    assert (dynamo.kind, dynamo.store_block_tokens) == ("vllm", 16)
    daemon = read_registration(body(type="EmberKV", endpoint="h:7100"))
    assert (daemon.kind, daemon.endpoint, daemon.instance_id) == ("emberkv", "h:7100", "")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": "m", "block_size": 16, "endpoint": "e"}, "instance_id is missing"),
        ({"model": "m", "block_size": 16, "instance_id": "i"}, "endpoint is missing"),
        ({"model": "m", "endpoint": "e", "instance_id": "i"}, "block_size is missing"),
        ({"block_size": 1, "endpoint": "e", "instance_id": "i"}, "model"),
        (
            {
                "model": "m",
                "block_size": 16,
                "store_block_size": 24,
                "endpoint": "e",
                "instance_id": "i",
            },
            "no multiple",
        ),
        (
            {"model": "m", "block_size": 16, "endpoint": "e", "instance_id": "i", "dp_rank": 4096},
            "dp_rank",
        ),
    ],
)
def test_registrations_that_lack_something_are_refused_by_name(
    fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        read_registration(body(**fields))


def test_an_unregistration_without_a_rank_means_all_of_them() -> None:
    assert read_unregistration(body(instance_id=7, model_name="m")) == Unregistration(
        Shape.DYNAMO, "vllm", "7", None, "default"
    )
    assert read_unregistration(body(instance_id="i", modelname="m", dp_rank=0)).dp_rank == 0
