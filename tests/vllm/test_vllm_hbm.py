"""vLLM's own KV events in the index: the same blocks, by our hashes, that its connector stores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks._vllm import PAGE_TOKENS, Engine, transfer_config
from emberkv_proto.hashing import block_hashes, index_keys
from emberkv_proto.types import EngineInfo, TierDigest
from global_index.config import IndexSection
from global_index.embedded import GlobalIndex
from global_index.hbm.engines import StreamState
from tests.helpers.daemon_process import MIB, DaemonProcess
from tests.helpers.ports import free_port
from tests.helpers.waiting import until

pytestmark = pytest.mark.timeout(600)
Prompts = Callable[..., list[dict[str, Any]]]
PAGES = 2
"""Of the engine in a block of ours."""


def announced(index: GlobalIndex) -> list[EngineInfo]:
    return [engine for node in index.nodes() for engine in node.engines]


def in_dram(index: GlobalIndex) -> TierDigest:
    """Rows of the one node: how many, and the XOR of their keys."""
    (node,) = index.nodes()
    return TierDigest(node.tiers[0].tier, node.tiers[0].blocks, node.tiers[0].xor)


def in_hbm(index: GlobalIndex) -> TierDigest:
    (engine,) = index.engines()
    return TierDigest(engine.digest.tier, engine.digest.blocks, engine.digest.xor)


def same_rows(one: TierDigest, other: TierDigest) -> bool:
    return (one.blocks, one.xor) == (other.blocks, other.xor)


async def test_what_vllm_tells_is_what_its_connector_stores(
    model: Path, prompts: Prompts, tmp_path: Path
) -> None:
    events, replays = free_port(), free_port()
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replays}",
    }
    with DaemonProcess(tmp_path / "daemon", capacity_bytes=64 * MIB) as daemon:
        transfer = transfer_config(
            daemon.socket_path, engine_url="http://127.0.0.1:8000", block_tokens=PAGES * PAGE_TOKENS
        )
        with Engine(
            tmp_path / "engine", model, kv_transfer_config=transfer, kv_events_config=config
        ) as engine:
            first = prompts(500, 300, seed=1)
            await asyncio.to_thread(engine.generate, first)  # before anybody listens
            section = IndexSection(
                nodes=(daemon.endpoints["grpc_address"],),
                backend="python",
                capacity_blocks=10_000,
            )
            async with GlobalIndex(section) as index:
                await until(lambda: [e.state for e in index.engines()] == [StreamState.CURRENT])
                (info,) = announced(index)
                assert (info.events_endpoint, info.replay_endpoint) == (
                    f"tcp://127.0.0.1:{events}",
                    f"tcp://127.0.0.1:{replays}",
                )
                assert info.engine_block_tokens == PAGE_TOKENS
                stem = first[0]["tokens"]
                await asyncio.to_thread(
                    engine.generate,
                    [
                        {"tokens": [*stem[:320], *range(200)]},
                        {"tokens": stem, "salt": "tenant"},
                        *prompts(200, seed=2),
                    ],
                )
                await asyncio.to_thread(engine.generate, prompts(3, seed=3), 1)  # saves end
                # Two processes tell of them: until both have, and by the same hashes.
                await until(
                    lambda: same_rows(in_hbm(index), in_dram(index)) and in_dram(index).blocks > 20
                )
                keys = index_keys(
                    block_hashes(info.namespace_id, stem, info.block_tokens, salt=b"tenant")
                )
                (hit,) = index.hits(keys).engines
                assert (hit.hit_blocks, hit.hbm_blocks) == (len(keys), len(keys))

                stored = in_dram(index)
                await asyncio.to_thread(engine.forget)
                await asyncio.to_thread(engine.generate, [{"tokens": [1, 2, 3]}], 1)
                await until(lambda: in_hbm(index).blocks == 0)
                assert in_dram(index) == stored, "a reset of the engine's cache is not the node's"
                (hit,) = index.hits(keys).engines
                assert (hit.hit_blocks, hit.hbm_blocks) == (len(keys), 0)

                # Loaded back from the store: vLLM tells of those blocks as of any others.
                await asyncio.to_thread(engine.generate, [{"tokens": stem, "salt": "tenant"}], 1)
                await until(lambda: index.hits(keys).engines[0].hbm_blocks == len(keys))
                (view,) = index.engines()
                assert view.streamed.malformed_events == view.streamed.unknown_events == 0
                assert view.blocks.not_understood == view.blocks.unmatched_removals == 0
                assert view.streamed.lost == view.streamed.restarts == view.streamed.gaps == 0
                index.check_integrity()
