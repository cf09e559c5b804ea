"""A model of windows and full attention in vLLM: three groups of layers, a hit is one for all."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks._vllm import PAGE_TOKENS, Engine, make_model, transfer_config
from client_sdk import SyncClient
from emberkv_proto.groups import needed_from
from emberkv_proto.hashing import block_hashes
from emberkv_proto.layout import Group, GroupKind, Namespace
from emberkv_proto.types import BlockHash
from tests.helpers.daemon_process import MIB, DaemonProcess

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.since_vllm(0, 30, "before 0.30 vLLM cannot be told of a load that failed by group"),
]
WINDOW_TOKENS = 80  # of client_sdk.engine.tiny_gemma, the token itself among them
WINDOW = Group(GroupKind.SLIDING_WINDOW, 2, 1, WINDOW_TOKENS - 1)
WINDOW_PART, FULL_PART = 0, 2
MORE_TOKENS = 100
FEW_PAGES = 30
PATIENT = {"timeout_seconds": 20.0, "load_seconds": 60.0}


def random_prompts(*lengths: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [{"tokens": [rng.randrange(250) for _ in range(length)]} for length in lengths]


def full_tokens(prompt: dict[str, Any]) -> int:
    """Tokens of the full blocks before the last token, which is always computed."""
    return (len(prompt["tokens"]) - 1) // PAGE_TOKENS * PAGE_TOKENS


def texts(rows: list[dict[str, Any]]) -> list[list[int]]:
    assert all(row["finish"] == "length" for row in rows)
    return [row["tokens"] for row in rows]


def parts_of_hit(blocks: int) -> int:
    """Parts that a hit of so many blocks loads: all of the full group's, two windows."""
    return blocks + 2 * (blocks - needed_from(WINDOW, PAGE_TOKENS, blocks))


def namespace_of(daemon: DaemonProcess) -> Namespace:
    (path,) = (daemon.data_dir / "namespaces").glob("*.json")
    return Namespace.from_json(path.read_text())


def hashes_of(namespace: Namespace, prompt: dict[str, Any]) -> list[BlockHash]:
    return block_hashes(namespace.id, prompt["tokens"], namespace.block_tokens)


def spoil(daemon: DaemonProcess, prompt: dict[str, Any], part: int, blocks: Sequence[int]) -> None:
    """Write over parts of a hit in the pool file, behind everybody's back."""
    namespace = namespace_of(daemon)
    hashes = hashes_of(namespace, prompt)
    with (
        SyncClient(daemon.socket_path, namespace, part=part, timeout_seconds=20.0) as client,
        client.acquire(hashes) as lease,
        daemon.pool_path.open("r+b") as pool,
    ):
        assert lease.ready_blocks == len(hashes)
        for block in blocks:
            assert lease.needs(block)
            pool.seek(lease._offsets[block])
            pool.write(b"\xa5" * 4096)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gemma") / "model"
    make_model(directory, "tiny_gemma")
    return directory


@pytest.fixture(scope="module")
def plain(gemma: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine without a connector: what is right."""
    directory = tmp_path_factory.mktemp("plain")
    with Engine(directory, gemma, enable_prefix_caching=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    # A machine that is busy must not turn a hit into a miss here.
    patience = {"daemon.lease_seconds": 180.0, "daemon.stage_seconds": 180.0}
    directory = tmp_path_factory.mktemp("daemon")
    with DaemonProcess(directory, capacity_bytes=24 * MIB, settings=patience) as process:
        yield process


@dataclass(frozen=True)
class Earlier:
    """What an engine with a tiny cache was asked and answered before it was killed."""

    asked: list[dict[str, Any]]
    answers: list[list[list[int]]]
    counters: dict[str, float]


@pytest.fixture(scope="module")
def earlier(
    gemma: Path, daemon: DaemonProcess, tmp_path_factory: pytest.TempPathFactory
) -> Earlier:
    asked = random_prompts(60, 70, 80, 300, seed=1)
    with Engine(
        tmp_path_factory.mktemp("earlier"),
        gemma,
        kv_transfer_config=transfer_config(daemon.socket_path, **PATIENT),
        num_gpu_blocks_override=FEW_PAGES,
        max_num_batched_tokens=64,
        max_model_len=416,
    ) as engine:
        answers = []
        for _ in range(2):
            answers.append(texts(engine.generate(asked, MORE_TOKENS)))
            engine.forget()
        counters = engine.counters()
        engine.kill()
    return Earlier(asked, answers, counters)


@pytest.fixture(scope="module")
def right(earlier: Earlier, plain: Engine) -> list[list[int]]:
    """What the earlier engine should have answered."""
    return texts(plain.generate(earlier.asked, MORE_TOKENS))


@pytest.fixture(scope="module")
def engine(
    earlier: Earlier, gemma: Path, daemon: DaemonProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """An engine that starts after another one was killed, and asks for loads before each layer."""
    with Engine(
        tmp_path_factory.mktemp("engine"),
        gemma,
        kv_transfer_config=transfer_config(daemon.socket_path, load_async=False, **PATIENT),
    ) as process:
        yield process


def test_pages_that_windows_leave_behind_are_saved_before_others_get_them(
    earlier: Earlier, right: list[list[int]]
) -> None:
    assert earlier.answers == [right, right]
    assert earlier.counters["vllm:num_preemptions"] > 0, "the cache was large enough: no proof"
    saved = earlier.counters["saved_blocks"] + earlier.counters["present_blocks"]
    assert saved > 2 * FEW_PAGES
    assert earlier.counters["failed_blocks"] == earlier.counters["errors"] == 0


def test_an_engine_started_after_a_kill_finds_every_full_block(
    engine: Engine, earlier: Earlier, right: list[list[int]]
) -> None:
    before = engine.counters().get("loaded_blocks", 0)
    rows = engine.generate(earlier.asked, MORE_TOKENS)
    assert texts(rows) == right
    full = [full_tokens(row) for row in earlier.asked]
    assert [row["cached"] for row in rows] == full
    loaded = engine.counters()["loaded_blocks"] - before
    assert loaded == sum(parts_of_hit(tokens // PAGE_TOKENS) for tokens in full)


def test_every_length_around_pages_and_the_window_is_answered_alike(
    engine: Engine, plain: Engine
) -> None:
    lengths = (1, 31, 32, 33, 64, 65, 79, 80, 81, 96, 97, 111, 112, 113, 128, 129, 160, 161)
    asked = random_prompts(*lengths, seed=2)
    right = texts(plain.generate(asked))
    assert texts(engine.generate(asked)) == right
    engine.forget()
    rows = engine.generate(asked)
    assert texts(rows) == right
    assert [row["cached"] for row in rows] == [full_tokens(row) for row in asked]


def test_the_engines_own_pages_and_the_stores_make_one_window(
    engine: Engine, plain: Engine
) -> None:
    (long,) = random_prompts(420, seed=3)
    short = {"tokens": long["tokens"][:200]}
    (right,) = texts(plain.generate([long]))
    engine.generate([long])
    engine.forget()
    engine.generate([short])
    (row,) = engine.generate([long])  # the window of its hit begins beyond what the engine has
    assert (row["tokens"], row["cached"]) == (right, full_tokens(long))
    engine.forget()
    near = {"tokens": long["tokens"][:395]}
    engine.generate([near])
    (row,) = engine.generate([long])  # and here within it
    assert (row["tokens"], row["cached"]) == (right, full_tokens(long))


def test_what_was_generated_is_found_by_the_next_turn(engine: Engine, plain: Engine) -> None:
    (first,) = random_prompts(100, seed=4)
    (answer,) = engine.generate([first], 64)
    engine.forget()
    follow_up = {"tokens": [*first["tokens"], *answer["tokens"], 7, 8, 9]}
    (row,) = engine.generate([follow_up])
    assert row["tokens"] == plain.generate([follow_up])[0]["tokens"]
    assert row["cached"] == 160


@pytest.mark.parametrize("part", [WINDOW_PART, FULL_PART])
def test_a_part_that_cannot_be_read_is_computed_again(
    engine: Engine, daemon: DaemonProcess, plain: Engine, part: int
) -> None:
    (asked,) = random_prompts(300, seed=5 + part)
    right = texts(plain.generate([asked]))
    engine.generate([asked])
    engine.forget()
    spoil(daemon, asked, part, (7, 8))
    before = engine.counters().get("failed_blocks", 0)
    assert texts(engine.generate([asked])) == right
    assert engine.counters()["failed_blocks"] > before


def test_what_no_hit_needs_may_be_lost(
    engine: Engine, daemon: DaemonProcess, plain: Engine
) -> None:
    (long,) = random_prompts(1000, seed=8)
    short = {"tokens": long["tokens"][:330]}
    right = texts(plain.generate([long, short]))
    namespace = namespace_of(daemon)
    hashes = hashes_of(namespace, long)
    with SyncClient(daemon.socket_path, namespace, timeout_seconds=20.0) as client:

        def held(prompt: dict[str, Any]) -> int:
            return client.probe(hashes[: full_tokens(prompt) // PAGE_TOKENS]).hit_blocks

        for _ in range(5):  # a save that a busy machine lost is a miss, and saved by the next one
            engine.generate([long])
            engine.forget()
            if held(long) == full_tokens(long) // PAGE_TOKENS:
                break
        for seed in range(20):  # fill the pool; whole hits of `long` keep what they need
            engine.forget()
            kept = held(long)
            (row,) = engine.generate([long])
            assert (row["tokens"], row["cached"]) == (right[0], full_tokens(long)), (
                f"{kept} blocks held in round {seed}: {engine.counters()}"
            )
            if held(short) < full_tokens(short) // PAGE_TOKENS:
                break
            engine.generate(random_prompts(600, seed=100 + seed))
        else:
            raise AssertionError("no part was given up")
        engine.forget()
        expected = held(short) * PAGE_TOKENS
        (row,) = engine.generate([short])
        assert (row["tokens"], row["cached"]) == (right[1], expected)
        engine.forget()
        (row,) = engine.generate([short])  # computed, and saved into the gaps
        assert (row["tokens"], row["cached"]) == (right[1], full_tokens(short))


def test_a_daemon_killed_under_load_costs_time_and_no_answer(
    engine: Engine, daemon: DaemonProcess, plain: Engine
) -> None:
    asked = random_prompts(100, 250, 400, 550, seed=9)
    right = texts(plain.generate(asked))
    engine.generate(asked)
    engine.forget()
    killer = threading.Timer(0.05, daemon.kill)
    killer.start()
    try:
        assert texts(engine.generate(asked)) == right
    finally:
        killer.join()
    assert texts(engine.generate(asked)) == right
    assert engine.counters()["errors"] == 0
