"""The index against the daemons' own publisher and gRPC carrier, not a model of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import numpy as np
import pytest

from client_sdk import aio
from emberkv_proto.types import Tier
from global_index.config import IndexSection
from global_index.embedded import GlobalIndex
from global_index.ingest import Exactness
from tests.helpers.peer_doubles import small_namespace
from tests.helpers.peer_node import PeerNode, peer_node


@pytest.fixture
def node() -> Iterator[PeerNode]:
    with peer_node(small_namespace()) as node:
        yield node


async def _change(node: PeerNode, seed: int) -> None:
    choose = random.Random(seed)
    for _ in range(200):
        keys = set(choose.sample(range(1, 500), 20))
        if choose.random() < 0.6:
            node.residency.store(Tier.DRAM, keys)
        else:
            node.residency.remove(Tier.DRAM, keys)


async def test_index_equals_the_publisher_s_digests_after_random_changes(node: PeerNode) -> None:
    section = IndexSection(nodes=(node.grpc_address,), capacity_blocks=10_000)
    async with GlobalIndex(section) as index, aio.timeout(60):
        for seed in range(5):
            changed = asyncio.run_coroutine_threadsafe(_change(node, seed), node.loop)
            await asyncio.wrap_future(changed)
            while True:
                views = index.nodes()
                if views and views[0].seq == node.publisher.seq:
                    break
                await asyncio.sleep(0.02)
        while index.nodes()[0].exactness is not Exactness.EXACT:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        truth = set(node.residency.resident_keys(Tier.DRAM).tolist())
        universe = np.arange(1, 500, dtype=np.uint64)
        (trace,) = index.explain(universe)
        held = {key for key, tiers in zip(universe.tolist(), trace.tiers, strict=True) if tiers}
        assert held == truth
        (view,) = index.nodes()
        assert view.tiers[0].blocks == len(truth)
        assert (view.counts.gaps, view.counts.digest_mismatches) == (0, 0)
        index.check_integrity()


async def test_a_daemon_is_found_by_its_name_and_left_when_the_name_drops_it(
    node: PeerNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = int(node.grpc_address.rpartition(":")[2])
    section = IndexSection(
        nodes=(f"dns:///localhost:{port}",),
        resolve_seconds=0.05,
        suspect_seconds=0.5,
        gone_seconds=1.0,
        capacity_blocks=10_000,
    )
    loop = asyncio.get_running_loop()
    real, answers_nobody = loop.getaddrinfo, False

    async def lookup(*arguments: object, **keywords: object) -> object:
        return [] if answers_nobody else await real(*arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "getaddrinfo", lookup)
    async with GlobalIndex(section) as index, aio.timeout(60):
        while not index.nodes():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        (counts,) = index.lookups().values()
        assert counts.addresses >= 1
        answers_nobody = True
        while index.nodes():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert index.streams() == {}
        index.check_integrity()
