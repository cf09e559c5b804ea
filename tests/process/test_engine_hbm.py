"""A real engine's HBM in the index: told as it changes, gone with the engine, back with it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from emberkv_proto.events import Keys
from emberkv_proto.hashing import block_hashes, index_keys
from emberkv_proto.types import ChainHits, EngineInfo
from global_index.config import IndexSection
from global_index.embedded import GlobalIndex
from global_index.hbm.engines import StreamState
from tests.helpers.daemon_process import DaemonProcess
from tests.helpers.ports import free_pair
from tests.helpers.router_client import request
from tests.helpers.router_process import router_process
from tests.helpers.torch_engine_process import TorchEngineProcess
from tests.helpers.waiting import until, until_asked

pytestmark = pytest.mark.process
FULL_BLOCKS = 12


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("d")) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def engine(
    daemon: DaemonProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TorchEngineProcess]:
    """One for all tests: to start it takes longer than they do."""
    settings = {
        "socket_path": daemon.socket_path,
        "publishes_events": True,
        "events_port": free_pair(),  # the next one answers replays
        "num_blocks": 40,
    }
    with TorchEngineProcess(tmp_path_factory.mktemp("e"), settings=settings) as engine:
        yield engine


@pytest.fixture
async def index(daemon: DaemonProcess) -> AsyncIterator[GlobalIndex]:
    section = IndexSection(
        nodes=(daemon.endpoints["grpc_address"],), backend="python", capacity_blocks=10_000
    )
    async with GlobalIndex(section) as index:
        yield index
        index.check_integrity()
    assert index.faults == 0


def announced(index: GlobalIndex) -> EngineInfo | None:
    return next((engine for node in index.nodes() for engine in node.engines), None)


def is_current(index: GlobalIndex) -> bool:
    return [engine.state for engine in index.engines()] == [StreamState.CURRENT]


def chain(info: EngineInfo, tokens: list[int], salt: bytes = b"") -> Keys:
    return index_keys(block_hashes(info.namespace_id, tokens, info.block_tokens, salt=salt))


def held(hits: ChainHits) -> tuple[int, int]:
    """Blocks in the engine's HBM, and blocks in the node's DRAM."""
    hbm = next((hit.hbm_blocks for hit in hits.engines), 0)
    return hbm, next((hit.dram_blocks for hit in hits.nodes), 0)


async def test_an_index_that_comes_later_asks_for_what_was_said_before(
    engine: TorchEngineProcess, daemon: DaemonProcess
) -> None:
    prompt = list(range(300, 350))
    await asyncio.to_thread(engine.complete, prompt)
    section = IndexSection(nodes=(daemon.endpoints["grpc_address"],), backend="python")
    async with GlobalIndex(section) as index:
        await until(lambda: is_current(index))
        info = announced(index)
        assert info is not None
        keys = chain(info, prompt)
        assert held(index.hits(keys))[0] == FULL_BLOCKS, "current means complete"
        index.check_integrity()


async def test_the_router_shows_and_counts_what_the_engine_tells(
    engine: TorchEngineProcess, daemon: DaemonProcess, tmp_path: Path
) -> None:
    prompt = list(range(20, 70))
    body = {"model": "ember-tiny", "prompt": prompt, "max_tokens": 1}
    nodes = f"index.nodes=['{daemon.endpoints['grpc_address']}']"
    async with router_process(tmp_path, nodes, "router.predicted_seconds=0.01") as router:

        async def told() -> int:
            """Blocks in HBM, as /route/explain has them from the engine's events."""
            got = await request(router.port, "/route/explain", body)
            if got.status != 200 or not got.json["chains"]:
                return 0
            hits = got.json["chains"][0]["engine_hits"]
            return sum(hit["hbm_blocks"] for hit in hits if hit["engine_id"] == "engine-a")

        async def answers() -> bool:
            return (await request(router.port, "/v1/completions", body)).status == 200

        async def knows() -> bool:
            return await told() == FULL_BLOCKS

        async def counted() -> bool:
            wanted = b"emberkv_router_told_hbm_tokens_total 48.0"
            return wanted in (await request(router.port, "/metrics")).body

        await until_asked(answers)
        await until_asked(knows)
        (terms,) = (await request(router.port, "/route/explain", body)).json["engines"]
        assert terms["holding"]["hbm_tokens"] == 4 * FULL_BLOCKS
        assert terms["fetch_seconds"] == 0
        got = await request(router.port, "/v1/completions", body)
        assert got.headers["x-emberkv-hit-tokens"] == str(4 * FULL_BLOCKS)
        await until_asked(counted)
        metrics = (await request(router.port, "/metrics")).body.decode()
        assert re.search(r'emberkv_index_engine_current{engine="[^"]*/engine-a/0"} 1.0', metrics)


async def test_a_stopped_engine_leaves_the_answers_and_comes_back(
    engine: TorchEngineProcess, index: GlobalIndex
) -> None:
    prompt = list(range(400, 450))
    await until(lambda: is_current(index))
    info = announced(index)
    assert info is not None
    keys = chain(info, prompt)
    await asyncio.to_thread(engine.complete, prompt)
    await until(lambda: held(index.hits(keys))[0] == FULL_BLOCKS)
    engine.pause()
    try:
        await until(lambda: index.hits(keys).engines == ())
    finally:
        engine.resume()
    await until(lambda: held(index.hits(keys))[0] == FULL_BLOCKS)


async def test_what_an_engine_computes_is_seen_evicted_and_lost_with_it(
    engine: TorchEngineProcess, index: GlobalIndex
) -> None:
    prompt = list(range(100, 150))
    await until(lambda: is_current(index))
    info = announced(index)
    assert info is not None
    keys = chain(info, prompt)
    await asyncio.to_thread(engine.complete, prompt)
    await asyncio.to_thread(engine.complete, prompt, cache_salt="tenant")
    whole = (FULL_BLOCKS, FULL_BLOCKS)
    await until(lambda: held(index.hits(keys)) == whole)
    salted = chain(info, prompt, b"tenant")
    await until(lambda: held(index.hits(salted)) == whole)

    # Others' blocks push them out of 40; the node keeps its copies.
    for n in range(3):
        await asyncio.to_thread(engine.complete, [n, *range(200, 260)])
    await until(lambda: held(index.hits(salted))[0] < FULL_BLOCKS)
    assert held(index.hits(salted))[1] == FULL_BLOCKS
    (own,) = index.hits(salted).engines
    assert own.hit_blocks == FULL_BLOCKS, "its node has what it has lost"

    engine.kill()
    await until(lambda: index.engines() == [])
    assert held(index.hits(salted)) == (0, FULL_BLOCKS)
    await until(lambda: sum(node.tiers[0].blocks for node in index.nodes()) == index.size().blocks)

    engine.start()
    await until(lambda: is_current(index))
    (own,) = index.hits(keys).engines
    assert (own.hbm_blocks, own.hit_blocks) == (0, FULL_BLOCKS)
    await asyncio.to_thread(engine.complete, prompt)
    await until(lambda: held(index.hits(keys)) == whole)
