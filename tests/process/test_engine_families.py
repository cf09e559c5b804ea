"""vLLM and SGLang on one daemon: neither ever sees a block of the other's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from client_sdk import SyncClient
from emberkv_proto.chains import chain_hashes
from emberkv_proto.layout import Group, GroupKind, Namespace
from emberkv_proto.types import BlockHash, HashScheme, StageState
from tests.helpers.daemon_process import DaemonProcess

pytestmark = pytest.mark.process
VLLM = Namespace(
    model="/models/tiny",
    weights_id="same",
    kv_dtype="bfloat16",
    layout_fingerprint="equal on purpose",
    block_tokens=16,
    groups=(Group(GroupKind.FULL, 4, 4096),),
    engine_family="vllm",
)
SGLANG = replace(VLLM, engine_family="sglang")
TOKENS = list(range(640))


def put(client: SyncClient, hashes: list[BlockHash], byte: int) -> list[StageState]:
    payload = bytes([byte]) * (client.part_bytes * len(hashes))
    return list(client.put(hashes, payload).states)


def test_equal_prompts_of_equal_models_are_two_chains(tmp_path: Path) -> None:
    vllm_hashes = chain_hashes(HashScheme.EMBER, VLLM.id, TOKENS, 16)
    sglang_hashes = chain_hashes(HashScheme.SGLANG, SGLANG.id, TOKENS, 16)
    assert not {*vllm_hashes} & {*sglang_hashes}
    other = replace(SGLANG, model="/models/other")
    assert not {*sglang_hashes} & {*chain_hashes(HashScheme.SGLANG, other.id, TOKENS, 16)}
    with (
        DaemonProcess(tmp_path) as daemon,
        SyncClient(daemon.socket_path, VLLM, timeout_seconds=30.0) as vllm,
        SyncClient(daemon.socket_path, SGLANG, timeout_seconds=30.0) as sglang,
        SyncClient(daemon.socket_path, other, timeout_seconds=30.0) as stranger,
    ):
        vllm.connect()
        sglang.connect()
        assert set(put(vllm, vllm_hashes, 1)) == {StageState.GRANTED}
        assert set(put(sglang, sglang_hashes, 2)) == {StageState.GRANTED}
        for client, own, byte in ((vllm, vllm_hashes, 1), (sglang, sglang_hashes, 2)):
            with client.acquire(own) as lease:
                assert lease.usable_blocks == len(own)
                assert {*lease.view(0), *lease.view(len(own) - 1)} == {byte}
        # Even who knows the other's hashes gets nothing: a block belongs to its namespace.
        for client, foreign in (
            (vllm, sglang_hashes),
            (sglang, vllm_hashes),
            (stranger, sglang_hashes),
        ):
            assert client.probe(foreign).hit_blocks == 0
            with client.acquire(foreign) as lease:
                assert lease.usable_blocks == 0
            with client.stage(foreign) as staged:
                assert set(staged.states) == {StageState.NO_SPACE}
        with daemon.operator() as operator:
            assert operator.check() == []
            assert operator.status().tiers[0].blocks == 2 * len(vllm_hashes)
