"""The promise to an SGLang user: the server dies, the daemon dies, the cache does not."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
import urllib.error
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from emberkv_proto.chains import chain_hashes
from emberkv_proto.hashing import index_keys
from emberkv_proto.types import EngineInfo, HashScheme, TierDigest
from global_index.config import IndexSection
from global_index.embedded import GlobalIndex
from global_index.hbm.engines import StreamState
from tests.helpers.daemon_process import MIB, DaemonProcess
from tests.helpers.ports import free_port
from tests.helpers.sglang_process import extra_config
from tests.helpers.sglang_server import (
    PAGE_TOKENS,
    Answer,
    SglangServer,
    storage_options,
)
from tests.helpers.waiting import until

pytestmark = pytest.mark.timeout(3000)
PROMPT_TOKENS = 1000
FULL = (PROMPT_TOKENS - 1) // PAGE_TOKENS * PAGE_TOKENS
PROMPTS = 3
FAULTS = {
    "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.2",
    "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.05",
}
# A machine that is busy, or stands still for a minute, must not turn a hit into a miss here.
PATIENT = {"timeout_seconds": 60.0, "load_seconds": 60.0, "hicache_storage_pass_prefix_keys": True}
PATIENCE = {"daemon.lease_seconds": 180.0, "daemon.stage_seconds": 180.0}


@pytest.fixture(scope="module")
def asked() -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(250) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]


def same(answers: Sequence[Answer], right: Sequence[Answer]) -> bool:
    """Equal tokens, and as likely ones. What is prefilled in other pieces differs in last bits."""
    return all(
        answer.output_ids == known.output_ids
        and answer.logprobs == pytest.approx(known.logprobs, abs=1e-4)
        for answer, known in zip(answers, right, strict=True)
    )


def config_of(daemon: DaemonProcess, **more: Any) -> dict[str, Any]:
    return extra_config(daemon.socket_path, prefetch_threshold=PAGE_TOKENS, **PATIENT, **more)


def pages_in(daemon: DaemonProcess) -> int:
    with daemon.operator() as operator:
        assert operator.check() == []
        return operator.status().tiers[0].blocks


async def test_a_server_and_a_daemon_that_die_find_all_full_pages_again(
    model: Path, asked: list[list[int]], tmp_path: Path
) -> None:
    with DaemonProcess(tmp_path / "daemon", capacity_bytes=192 * MIB, settings=PATIENCE) as daemon:
        with SglangServer(tmp_path / "first", model, **FAULTS) as server:
            right = [server.ask(tokens) for tokens in asked]
            for number, answer in enumerate(right):  # or equal answers would prove nothing
                others = right[:number] + right[number + 1 :]
                assert not any(same([answer], [other]) for other in others), "prompts look alike"
            _save_under_faults(server, daemon, asked, right)
            server.kill()
        await _come_back(daemon, model, asked, right, tmp_path)


def _save_under_faults(
    server: SglangServer,
    daemon: DaemonProcess,
    asked: Sequence[Sequence[int]],
    right: Sequence[Answer],
) -> None:
    """Attached at run time, with SGLang's own faults around it, until all pages are there."""
    pages = PROMPTS * FULL // PAGE_TOKENS
    assert "did you mean socket_path" in _refusal(server, daemon)
    server.attach(config_of(daemon))
    for _ in range(40):
        server.forget()
        assert same([server.ask(tokens) for tokens in asked], right), "faults changed an answer"
        if pages_in(daemon) == pages:
            break
    assert pages_in(daemon) == pages, "a page was never saved"
    assert server.counter("errors") == 0
    server.detach()
    server.forget()
    answers = [server.ask(tokens) for tokens in asked]
    assert same(answers, right)
    assert not any(answer.stored_tokens for answer in answers)


def _refusal(server: SglangServer, daemon: DaemonProcess) -> str:
    wrong = {**config_of(daemon), "socket_pth": "/x"}
    try:
        return server.attach(wrong)
    except urllib.error.HTTPError as error:
        return error.read().decode()


async def _come_back(
    daemon: DaemonProcess,
    model: Path,
    asked: Sequence[Sequence[int]],
    right: Sequence[Answer],
    tmp_path: Path,
) -> None:
    events, replays = free_port(), free_port()
    published = {
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replays}",
    }
    options = storage_options(config_of(daemon, engine_url="http://127.0.0.1:30000"))
    told = f"--kv-events-config={json.dumps(published)}"
    with SglangServer(tmp_path / "second", model, *options, told) as server:
        _all_from_storage(server, asked, right)
        assert server.counter("loaded_pages") == PROMPTS * FULL // PAGE_TOKENS
        await _same_rows(server, daemon, asked, (events, replays))
        server.forget()
        daemon.kill()
        assert same([server.ask(tokens) for tokens in asked], right), "without its daemon"
        daemon.start()
        _get_in_touch(server)
        server.forget()
        _all_from_storage(server, asked, right)
        with daemon.operator() as operator:
            assert operator.check() == []
        assert server.counter("errors") == 0


def _get_in_touch(server: SglangServer) -> None:
    """Ask for other things until a lookup is answered: the first one may find a dead session."""
    deadline = time.monotonic() + 120
    for number in itertools.count():
        failed, asked = server.counter("failed_lookups"), server.counter("lookups")
        server.ask([number % 250] * 3 * PAGE_TOKENS)
        if server.counter("failed_lookups") == failed and server.counter("lookups") > asked:
            return
        assert time.monotonic() < deadline, "the backend does not find its daemon again"


def _all_from_storage(
    server: SglangServer, asked: Sequence[Sequence[int]], right: Sequence[Answer]
) -> None:
    answers = [server.ask(tokens) for tokens in asked]
    assert [answer.stored_tokens for answer in answers] == [FULL] * len(asked)
    assert same(answers, right)


async def _same_rows(
    server: SglangServer,
    daemon: DaemonProcess,
    asked: Sequence[Sequence[int]],
    ports: tuple[int, int],
) -> None:
    """What SGLang tells of its own cache are the rows of what its backend has stored."""
    section = IndexSection(
        nodes=(daemon.endpoints["grpc_address"],), backend="python", capacity_blocks=10_000
    )
    async with GlobalIndex(section) as index:
        await until(lambda: [e.state for e in index.engines()] == [StreamState.CURRENT], 120)
        (info,) = _announced(index)
        assert info.hash_scheme is HashScheme.SGLANG
        assert info.events_endpoint == f"tcp://127.0.0.1:{ports[0]}"
        assert info.replay_endpoint == f"tcp://127.0.0.1:{ports[1]}"
        await asyncio.to_thread(server.ask, asked[0], "tenant")
        await asyncio.to_thread(server.ask, [*asked[0][:320], *range(200)])
        await until(lambda: _in_hbm(index).blocks == _in_dram(index).blocks > 100, 120)
        assert _in_hbm(index).xor == _in_dram(index).xor, "other hashes than the backend's"
        for salt in (b"", b"tenant"):
            keys = index_keys(
                chain_hashes(
                    info.hash_scheme, info.namespace_id, asked[0], info.block_tokens, salt=salt
                )
            )
            (hit,) = index.hits(keys).engines
            assert (hit.hit_blocks, hit.hbm_blocks) == (len(keys), len(keys)), salt
        stored = _in_dram(index)
        await asyncio.to_thread(server.forget)
        await asyncio.to_thread(server.ask, [1, 2, 3])
        await until(lambda: _in_hbm(index).blocks == 0, 120)
        assert _in_dram(index) == stored, "a reset of the engine's cache is not the node's"
        (view,) = index.engines()
        assert view.streamed.malformed_events == view.streamed.unknown_events == 0
        assert view.blocks.not_understood == view.blocks.unmatched_removals == 0
        index.check_integrity()


def _announced(index: GlobalIndex) -> list[EngineInfo]:
    return [engine for node in index.nodes() for engine in node.engines]


def _in_dram(index: GlobalIndex) -> TierDigest:
    """Rows of the one node: how many, and the XOR of their keys."""
    (node,) = index.nodes()
    return TierDigest(node.tiers[0].tier, node.tiers[0].blocks, node.tiers[0].xor)


def _in_hbm(index: GlobalIndex) -> TierDigest:
    (engine,) = index.engines()
    return TierDigest(engine.digest.tier, engine.digest.blocks, engine.digest.xor)
