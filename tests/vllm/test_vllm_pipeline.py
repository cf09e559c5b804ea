"""Stages of a pipeline have their own layers: a block is a hit when each stored its part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks._vllm import PAGE_TOKENS, Engine, transfer_config
from client_sdk import SyncClient
from emberkv_proto.hashing import block_hashes
from emberkv_proto.layout import Namespace
from tests.helpers.daemon_process import MIB, DaemonProcess

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.since_vllm(0, 32, "pipelines on a CPU were not tried with an older vLLM"),
]
LAYERS_OF_STAGES = "1,3"  # of the four of client_sdk.engine.tiny_llama
PATIENT = {"timeout_seconds": 20.0, "load_seconds": 60.0}


def test_a_pipeline_finds_what_all_of_its_stages_stored(
    model: Path,
    tmp_path: Path,
    prompts: Callable[..., list[dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", LAYERS_OF_STAGES)
    asked = prompts(33, 100, 300, seed=31)
    full = [(len(row["tokens"]) - 1) // PAGE_TOKENS * PAGE_TOKENS for row in asked]
    patience = {"daemon.lease_seconds": 180.0, "daemon.stage_seconds": 180.0}
    with (
        DaemonProcess(tmp_path / "daemon", capacity_bytes=64 * MIB, settings=patience) as daemon,
        Engine(
            tmp_path / "engine",
            model,
            pipeline_parallel_size=2,
            # vLLM's CPU runner makes what stages hand over while it warms up a compiled model.
            enforce_eager=False,
            compilation_config={"mode": 1, "backend": "eager"},
            distributed_executor_backend="mp",
            kv_transfer_config=transfer_config(daemon.socket_path, **PATIENT),
        ) as engine,
    ):
        right = engine.generate(asked)
        assert [row["cached"] for row in right] == [0, 0, 0]
        engine.forget()
        again = engine.generate(asked)
        assert [(row["tokens"], row["cached"]) for row in again] == [
            (row["tokens"], tokens) for row, tokens in zip(right, full, strict=True)
        ]
        assert engine.counters()["loaded_blocks"] == 2 * sum(full) // PAGE_TOKENS
        engine.forget()
        spoil_last_stage(daemon, asked[-1], full[-1] // PAGE_TOKENS)
        (row,) = engine.generate(asked[-1:])
        assert row["tokens"] == right[-1]["tokens"]
        assert engine.counters()["failed_blocks"] > engine.counters()["errors"] == 0


def spoil_last_stage(daemon: DaemonProcess, prompt: dict[str, Any], blocks: int) -> None:
    """Write over a block's part of the last stage in the pool file, behind everybody's back."""
    (path,) = (daemon.data_dir / "namespaces").glob("*.json")
    namespace = Namespace.from_json(path.read_text())
    assert (len(namespace.groups), namespace.shards) == (1, 2)
    hashes = block_hashes(namespace.id, prompt["tokens"], namespace.block_tokens)[:blocks]
    with (
        SyncClient(daemon.socket_path, namespace, part=1, timeout_seconds=20.0) as client,
        client.acquire(hashes) as lease,
        daemon.pool_path.open("r+b") as pool,
    ):
        assert lease.ready_blocks == blocks
        pool.seek(lease._offsets[blocks // 2])
        pool.write(b"\xa5" * 4096)
