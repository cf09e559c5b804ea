"""vLLM with our connector: what it answers is what it answers without one."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks._vllm import PAGE_TOKENS, Engine, side_by_side, transfer_config
from client_sdk import SyncClient
from emberkv_proto.hashing import block_hashes
from emberkv_proto.layout import Namespace
from emberkv_proto.types import BlockHash, StageState
from tests.helpers.daemon_process import MIB, DaemonProcess

pytestmark = pytest.mark.timeout(600)
Prompts = Callable[..., list[dict[str, Any]]]
FOUND_SECONDS = 120.0
STOPPED_SECONDS = 20.0


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(
        tmp_path_factory.mktemp("daemon"),
        capacity_bytes=64 * MIB,
        ssd_bytes=128 * MIB,
        settings={"ssd.segment_bytes": 8 * MIB},
    ) as process:
        yield process


@pytest.fixture(scope="module")
def engines(
    model: Path, daemon: DaemonProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Engine]]:
    """One without a connector, and one with, which starts while its daemon is away."""
    daemon.kill()
    adapters = {"enable_lora": True, "max_loras": 2}
    plain = Engine(tmp_path_factory.mktemp("plain"), model, enable_prefix_caching=False, **adapters)
    engine = Engine(
        tmp_path_factory.mktemp("engine"),
        model,
        kv_transfer_config=transfer_config(daemon.socket_path),
        **adapters,
    )
    with side_by_side(plain, engine):
        yield plain, engine


@pytest.fixture(scope="module")
def plain(engines: tuple[Engine, Engine]) -> Engine:
    """An engine without a connector: what is right."""
    return engines[0]


@pytest.fixture(scope="module")
def engine(engines: tuple[Engine, Engine]) -> Engine:
    """An engine that loads between steps."""
    return engines[1]


def full_pages(prompt: dict[str, Any]) -> int:
    """Tokens of the full pages before the last token, which is always computed."""
    return (len(prompt["tokens"]) - 1) // PAGE_TOKENS * PAGE_TOKENS


def texts(rows: list[dict[str, Any]]) -> list[list[int]]:
    assert all(row["finish"] == "length" for row in rows)
    return [row["tokens"] for row in rows]


def test_an_engine_whose_daemon_is_away_computes_and_later_finds_it(
    engine: Engine, daemon: DaemonProcess, plain: Engine, prompts: Prompts
) -> None:
    asked = prompts(200, 65, seed=1)
    assert texts(engine.generate(asked)) == texts(plain.generate(asked))
    assert engine.counters()["lost_saves"] > 0
    daemon.start()
    deadline = time.monotonic() + FOUND_SECONDS
    for seed in itertools.count(100):  # the client tries again with back-off
        engine.generate(prompts(70, seed=seed), 1)
        if engine.counters().get("saved_blocks", 0) > 0:
            return
        assert time.monotonic() < deadline, f"nothing was saved:\n{engine.said()}"
        time.sleep(0.1)


def test_a_batch_of_mixed_prefixes_is_found_again_and_answers_alike(
    engine: Engine, plain: Engine, prompts: Prompts
) -> None:
    stems = [row["tokens"] for row in prompts(320, 96, 33, 500, seed=2)]
    rng = random.Random(3)
    asked = [
        {"tokens": stems[n % 4] + [rng.randrange(250) for _ in range(rng.randrange(1, 200))]}
        for n in range(16)
    ]
    right = texts(plain.generate(asked))
    assert texts(engine.generate(asked)) == right
    engine.forget()
    ahead = engine.counters().get("prefetched_requests", 0)
    again = engine.generate(asked)
    assert texts(again) == right
    assert [row["cached"] for row in again] == [full_pages(row) for row in asked]
    assert engine.counters()["prefetched_requests"] >= ahead + 15, "all but the first had to wait"


@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65, 97])
def test_every_prompt_length_is_answered_alike_cold_and_warm(
    engine: Engine, plain: Engine, prompts: Prompts, length: int
) -> None:
    asked = prompts(length, seed=40 + length)
    right = texts(plain.generate(asked, 40))
    assert texts(engine.generate(asked, 40)) == right
    engine.forget()
    (again,) = engine.generate(asked, 40)
    assert again["tokens"] == right[0]
    assert again["cached"] == full_pages(asked[0])


def test_what_was_generated_is_found_by_the_next_turn(
    engine: Engine, plain: Engine, prompts: Prompts
) -> None:
    (first,) = prompts(100, seed=5)
    (answer,) = engine.generate([first], 64)
    engine.forget()
    follow_up = {"tokens": [*first["tokens"], *answer["tokens"], 7, 8, 9]}
    (again,) = engine.generate([follow_up])
    assert again["tokens"] == plain.generate([follow_up])[0]["tokens"]
    assert again["cached"] >= 160, "the 163 tokens that were computed have five full pages"


def test_a_reset_of_the_connector_leaves_the_shared_store_alone(
    engine: Engine, plain: Engine, prompts: Prompts
) -> None:
    asked = prompts(150, seed=61)
    right = texts(plain.generate(asked))
    engine.generate(asked)
    engine.forget()
    assert not engine.reset_all(), "vLLM is told that the store was not emptied"
    (again,) = engine.generate(asked)
    assert (again["tokens"], again["cached"]) == (right[0], full_pages(asked[0]))


def test_salts_and_adapters_share_nothing(
    engine: Engine, model: Path, plain: Engine, prompts: Prompts
) -> None:
    adapters = [
        {"name": name, "id": number, "path": str(model.parent / name)}
        for number, name in enumerate(("adapter_a", "adapter_b"), 1)
    ]
    (bare,) = prompts(160, seed=6)
    kinds = [
        bare,
        {**bare, "salt": "tenant-1"},
        {**bare, "salt": "tenant-2"},
        *({**bare, "lora": adapter} for adapter in adapters),
    ]
    outputs = []
    for kind in kinds:
        (row,) = engine.generate([kind])
        assert row["cached"] == 0, f"found what another stored: {kind.get('salt')}"
        assert row["tokens"] == plain.generate([kind])[0]["tokens"]
        outputs.append(row["tokens"])
    assert outputs[0] != outputs[3] != outputs[4], "the adapters change nothing: no proof"
    engine.forget()
    for kind, output in zip(kinds, outputs, strict=True):
        (row,) = engine.generate([kind])
        assert (row["cached"], row["tokens"]) == (full_pages(bare), output)


def test_blocks_that_cannot_be_read_are_computed_again(
    engine: Engine, daemon: DaemonProcess, plain: Engine, prompts: Prompts
) -> None:
    (asked,) = prompts(400, seed=7)
    right = texts(plain.generate([asked]))
    engine.generate([asked])
    engine.forget()
    _spoil(daemon, asked["tokens"], (3, 5, 6))
    before = engine.counters().get("failed_blocks", 0)
    assert texts(engine.generate([asked])) == right
    assert engine.counters()["failed_blocks"] > before


def _spoil(daemon: DaemonProcess, tokens: list[int], blocks: tuple[int, ...]) -> None:
    """Write over blocks in the pool file, behind everybody's back."""
    namespace = _namespace(daemon)
    hashes = block_hashes(namespace.id, tokens, namespace.block_tokens)
    with (
        SyncClient(daemon.socket_path, namespace, timeout_seconds=30.0) as client,
        client.acquire(hashes) as lease,
    ):
        assert lease.ready_blocks > max(blocks)
        with daemon.pool_path.open("r+b") as pool:
            for block in blocks:
                pool.seek(lease._offsets[block])
                pool.write(b"\xa5" * 4096)


def _namespace(daemon: DaemonProcess) -> Namespace:
    """The only one it knows."""
    (path,) = (daemon.data_dir / "namespaces").glob("*.json")
    return Namespace.from_json(path.read_text())


def test_a_daemon_killed_under_load_costs_time_and_no_answer(
    engine: Engine, daemon: DaemonProcess, plain: Engine, prompts: Prompts
) -> None:
    asked = prompts(*range(100, 900, 100), seed=8)
    right = texts(plain.generate(asked))
    engine.generate(asked)
    engine.forget()
    killer = threading.Timer(0.15, daemon.kill)
    killer.start()
    try:
        assert texts(engine.generate(asked)) == right
    finally:
        killer.join()
    assert texts(engine.generate(asked)) == right
    daemon.start()
    engine.forget()
    await_whole_hits(engine, asked, right)


def await_whole_hits(engine: Engine, asked: list[dict[str, Any]], right: list[list[int]]) -> None:
    """The engine asks a daemon that failed it again only after a while, longer each time."""
    deadline = time.monotonic() + FOUND_SECONDS
    while True:
        rows = engine.generate(asked)
        assert texts(rows) == right
        engine.forget()
        if [row["cached"] for row in rows] == [full_pages(row) for row in asked]:
            return
        assert time.monotonic() < deadline, f"the daemon was not found again: {engine.counters()}"
        time.sleep(0.1)


def test_a_stopped_daemon_is_a_miss(
    engine: Engine, daemon: DaemonProcess, plain: Engine, prompts: Prompts
) -> None:
    asked = prompts(300, 200, seed=9)
    right = texts(plain.generate(asked))
    engine.generate(asked)
    engine.forget()
    until = time.monotonic() + STOPPED_SECONDS
    daemon.pause()
    try:
        while time.monotonic() < until:  # leases and sessions of before run out meanwhile
            assert texts(engine.generate(asked)) == right
            engine.forget()
            time.sleep(0.5)
    finally:
        daemon.resume()
    await_whole_hits(engine, asked, right)


def test_preempted_requests_come_back_alike_from_a_tiny_cache(
    model: Path, plain: Engine, prompts: Prompts, tmp_path: Path
) -> None:
    """Also: loads before each layer, blocks of two pages, chunked prefill, a store that is full."""
    asked = prompts(150, 170, 190, seed=10)
    right = texts(plain.generate(asked, 60))
    with (
        DaemonProcess(tmp_path / "small", node_id="small", capacity_bytes=4 * MIB) as small,
        Engine(
            tmp_path / "engine",
            model,
            kv_transfer_config=transfer_config(
                small.socket_path, load_async=False, block_tokens=2 * PAGE_TOKENS
            ),
            num_gpu_blocks_override=20,
            max_num_batched_tokens=64,
            max_model_len=512,
        ) as engine,
    ):
        for _ in range(3):
            assert texts(engine.generate(asked, 60)) == right
            engine.forget()
        # A step that computed on pages which were not filled must leave nothing in the store.
        _spoil(small, asked[2]["tokens"], (1,))
        for _ in range(2):
            assert texts(engine.generate(asked, 60)) == right
            engine.forget()
        counted = engine.counters()
        assert counted["failed_blocks"] > 0
        assert counted["vllm:num_preemptions"] > 0
        assert counted["loaded_blocks"] > 0
        # Slots that somebody holds make no room: what cannot be saved is no error.
        with SyncClient(small.socket_path, _namespace(small), timeout_seconds=20.0) as client:
            held = client.stage([BlockHash(bytes([number]) * 32) for number in range(1, 65)])
            with held:
                assert StageState.NO_SPACE in held.states
                assert texts(engine.generate(asked, 60)) == right
                engine.forget()
        counted = engine.counters()
        assert counted["skipped_blocks"] > 0
        assert counted.get("errors", 0) == counted.get("lost_saves", 0) == 0
