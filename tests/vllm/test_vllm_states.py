"""A model of states and full attention in vLLM: a hit ends where the states are in the store.

vLLM's own prefix cache says what is right: the engine without a connector answers from it, and what
it takes from there another engine takes from the store after a kill.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks._vllm import Engine, make_model, side_by_side, transfer_config
from client_sdk import SyncClient
from emberkv_proto.hashing import block_hashes
from emberkv_proto.layout import GroupKind, Namespace
from tests.helpers.daemon_process import MIB, DaemonProcess

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.since_vllm(0, 32, "before 0.32 vLLM does not tell of states"),
]
PAGE_TOKENS = 160  # no CPU needs longer ones for a state to fit in; some choose 96
STEP_TOKENS = 256
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "block_size": PAGE_TOKENS,
    "enable_prefix_caching": True,
    "prefix_cache_retention_interval": PAGE_TOKENS,  # else states at the ends of prompts only
    "max_num_batched_tokens": STEP_TOKENS,
    "max_model_len": 2048,
}
PATIENT = {"timeout_seconds": 20.0, "load_seconds": 60.0}
LENGTHS = (50, PAGE_TOKENS, PAGE_TOKENS + 1, 2 * PAGE_TOKENS + 1, 700)
TURN_TOKENS = 60
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Told:
    """Prompts, each one's answer, and the next turn of each."""

    prompts: Rows
    answers: Rows
    turns: Rows


def tell(engine: Engine, prompts: Rows) -> Told:
    """Ask one prompt at a time: in bfloat16 the last bits depend on what is computed together."""
    answers = [row for prompt in prompts for row in engine.generate([prompt], TURN_TOKENS)]
    turns = [
        {"tokens": [*prompt["tokens"], *answer["tokens"], 7, 8, 9]}
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return Told(prompts, answers, turns)


def ask(engine: Engine, prompts: Rows) -> list[tuple[list[int], int]]:
    """Of each prompt the answer, and the tokens that were not computed."""
    rows = [row for prompt in prompts for row in engine.generate([prompt])]
    return [(row["tokens"], row["cached"]) for row in rows]


def full_tokens(prompt: dict[str, Any]) -> int:
    return (len(prompt["tokens"]) - 1) // PAGE_TOKENS * PAGE_TOKENS


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    # A machine that is busy must not turn a hit into a miss here.
    patience = {"daemon.lease_seconds": 180.0, "daemon.stage_seconds": 180.0}
    directory = tmp_path_factory.mktemp("daemon")
    with DaemonProcess(directory, capacity_bytes=48 * MIB, settings=patience) as process:
        yield process


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen") / "model"
    make_model(directory, "tiny_qwen")
    return directory


@pytest.fixture(scope="module")
def plain(qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An engine without a connector: what is right. Started beside the one of `earlier`."""
    return Engine(tmp_path_factory.mktemp("plain"), qwen, **OPTIONS)


@pytest.fixture(scope="module")
def earlier(
    qwen: Path, daemon: DaemonProcess, plain: Engine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Told, Told]]:
    """What both were asked and answered, before the one with the connector was killed."""
    rng = random.Random(11)
    asked = [{"tokens": [rng.randrange(250) for _ in range(length)]} for length in LENGTHS]
    killed = connected(tmp_path_factory.mktemp("killed"), qwen, daemon)
    with side_by_side(plain, killed):
        told = tell(plain, asked), tell(killed, asked)
        killed.forget()  # once it holds no page its saves are over
        killed.kill()
        yield told


@pytest.fixture(scope="module")
def engine(
    earlier: tuple[Told, Told],
    qwen: Path,
    daemon: DaemonProcess,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engine]:
    """An engine that starts after another one was killed."""
    with connected(tmp_path_factory.mktemp("engine"), qwen, daemon) as process:
        yield process


def connected(directory: Path, model: Path, daemon: DaemonProcess) -> Engine:
    transfer = transfer_config(daemon.socket_path, **PATIENT)
    return Engine(directory, model, kv_transfer_config=transfer, **OPTIONS)


def test_after_a_kill_a_hit_ends_where_the_engine_s_own_would(
    earlier: tuple[Told, Told], plain: Engine, engine: Engine
) -> None:
    right, told = earlier
    assert [row["tokens"] for row in told.answers] == [row["tokens"] for row in right.answers]
    for asked in (right.prompts, right.turns):  # states at the ends of steps, and of answers
        expected = ask(plain, asked)
        assert [cached for _, cached in expected] == [full_tokens(row) for row in asked]
        assert ask(engine, asked) == expected
    counters = engine.counters()
    assert counters["loaded_blocks"] > 0
    assert counters["failed_blocks"] == counters["errors"] == 0


def test_a_state_that_cannot_be_read_is_computed_again(
    earlier: tuple[Told, Told], plain: Engine, engine: Engine, daemon: DaemonProcess
) -> None:
    asked = earlier[0].prompts[-1]
    ((right, _),) = ask(plain, [asked])
    engine.forget()
    spoil(daemon, asked)
    before = engine.counters()["failed_blocks"]
    ((answer, _),) = ask(engine, [asked])
    assert answer == right
    assert engine.counters()["failed_blocks"] > before


def namespace_of(daemon: DaemonProcess) -> Namespace:
    (path,) = (daemon.data_dir / "namespaces").glob("*.json")
    return Namespace.from_json(path.read_text())


def spoil(daemon: DaemonProcess, prompt: dict[str, Any]) -> None:
    """Write over the state at the end of a hit in the pool file, behind everybody's back."""
    namespace = namespace_of(daemon)
    (part,) = (n for n, g in enumerate(namespace.groups) if g.kind is GroupKind.MAMBA)
    hashes = block_hashes(namespace.id, prompt["tokens"], namespace.block_tokens)
    blocks = full_tokens(prompt) // PAGE_TOKENS
    with (
        SyncClient(daemon.socket_path, namespace, part=part, timeout_seconds=20.0) as client,
        client.acquire(hashes[:blocks]) as lease,
        daemon.pool_path.open("r+b") as pool,
    ):
        assert lease.ready_blocks == blocks
        assert [block for block in range(blocks) if lease.needs(block)] == [blocks - 1]
        pool.seek(lease._offsets[blocks - 1])
        pool.write(b"\xa5" * 4096)
