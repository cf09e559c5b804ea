"""Which prompts the demo's phases choose, from what the index says."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import pytest
from rich.console import Console

from client_sdk.cli.cluster import Cluster
from client_sdk.cli.cluster_plan import ClusterSection, plan_cluster
from client_sdk.cli.demo_phases import USUAL_BLOCKS, both_tiers, least_in_dram
from client_sdk.cli.demo_run import DemoRun, Holding, resent, until
from client_sdk.cli.demo_settings import (
    FULL,
    QUICK,
    REFERENCE,
    TORCH_ENGINE,
    DemoPrompt,
    read_prompts,
    store_settings,
    torch_engine_settings,
    with_reference,
)
from client_sdk.cli.openai_client import Answer
from client_sdk.cli.trace import default_trace_path
from client_sdk.engine.torch_engine.config import EngineSettings
from client_sdk.settings import load_settings
from emberkv_proto.errors import DeadlineError, UnavailableError
from emberkv_proto.types import NodeHit, NodeId

ANSWER = Answer((1,), "", 1, {}, 0.1)


@pytest.fixture
async def run(tmp_path: Path):  # type: ignore[no-untyped-def]
    ports = itertools.count(20000)
    plan = plan_cluster(ClusterSection(base_dir=tmp_path), None, (), lambda: next(ports))
    async with aiohttp.ClientSession() as session:
        prompts = read_prompts(default_trace_path(), QUICK, TORCH_ENGINE)
        yield DemoRun(Console(), Cluster(plan), session, TORCH_ENGINE, prompts, QUICK)


def holding(name: str, blocks: int, hits: Mapping[str, tuple[int, int]]) -> Holding:
    by_node = {
        NodeId(node): NodeHit(NodeId(node), dram + ssd, dram, ssd)
        for node, (dram, ssd) in hits.items()
    }
    return Holding(DemoPrompt(name, ()), blocks, by_node)


def test_both_tiers_takes_whole_prompts_of_node_a_from_either_end(run: DemoRun) -> None:
    holdings = [
        holding("in dram", 4, {"node-a": (4, 0)}),
        holding("on ssd", 4, {"node-a": (0, 4)}),
        holding("half", 4, {"node-a": (2, 0)}),
        holding("elsewhere", 4, {"node-b": (4, 0)}),
    ]
    assert [prompt.name for prompt in both_tiers(run, holdings)] == ["in dram", "on ssd"]


def test_least_in_dram_fills_the_engines_pool_and_leaves_the_longest_out(run: DemoRun) -> None:
    holdings = [holding(str(n), 10, {"node-a": (n, 10 - n)}) for n in reversed(range(10))]
    holdings.append(holding("long", USUAL_BLOCKS + 1, {}))
    chosen = [prompt.name for prompt in least_in_dram(run, holdings)]
    assert chosen == ["0", "1", "2", "3", "4"]
    assert 10 * len(chosen) > QUICK.engine_blocks


def test_the_reference_engine_has_no_store_and_no_cache() -> None:
    plan = with_reference(
        plan_cluster(ClusterSection(), None, (*torch_engine_settings(FULL), *store_settings(FULL)))
    )
    (spec,) = plan.extras
    assert spec.name == REFERENCE
    overrides = [item for item in spec.arguments if item != "--set"]
    reference = load_settings(EngineSettings, None, overrides, {}).engine
    assert (reference.socket_path, reference.prefix_cache) == ("", False)
    other = [item for item in plan.nodes[0].engine.arguments if item != "--set"]
    cached = load_settings(EngineSettings, None, other, {}).engine
    assert cached.prefix_cache
    assert reference.namespace("w") == cached.namespace("w")
    assert reference.port != cached.port


@pytest.mark.parametrize("size", [FULL, QUICK])
def test_each_prompt_fits_the_engine(size) -> None:  # type: ignore[no-untyped-def]
    prompts = read_prompts(default_trace_path(), size, TORCH_ENGINE)
    assert len(prompts) == size.requests
    assert max(len(prompt.token_ids) for prompt in prompts) + 8 <= 16 * size.engine_blocks


async def test_a_request_is_sent_again_when_its_engine_dies_and_that_is_counted() -> None:
    outcomes = iter([UnavailableError("died"), UnavailableError("died"), ANSWER])

    async def send() -> Answer:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    assert (await resent(send)).interruptions == 2


async def test_a_request_is_not_sent_again_for_ever() -> None:
    async def send() -> Answer:
        raise UnavailableError("nobody")

    with pytest.raises(UnavailableError):
        await resent(send, attempts_left=1)


async def test_waiting_has_a_deadline_and_says_the_last_problem() -> None:
    async def never() -> bool:
        raise UnavailableError("index is away")

    with pytest.raises(DeadlineError, match=r"the index.*index is away"):
        await until("the index", never, 0.2)
