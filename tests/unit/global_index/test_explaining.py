"""The Explain call: every node's and every followed engine's blocks of a chain."""

from __future__ import annotations

import numpy as np
import pytest

from client_sdk.index_client import IndexClient, TracedNode
from emberkv_proto.errors import InvalidRequestError
from emberkv_proto.hashing import block_hashes, index_keys
from emberkv_proto.types import NamespaceId, NodeId, Tier
from global_index import explaining
from global_index.config import IndexSection
from global_index.embedded import GlobalIndex
from global_index.service import start_server
from tests.helpers.event_publisher import EventPublisher, stored
from tests.helpers.model_daemon import ModelDaemon, ModelServer
from tests.helpers.waiting import until

SPACE = NamespaceId(b"n" * 16)
TOKENS = list(range(40))
KEYS = index_keys(block_hashes(SPACE, TOKENS, 4))


async def test_nodes_and_engines_are_traced_block_by_block_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(explaining, "PIECE_BLOCKS", 3)
    server = ModelServer(ModelDaemon("n1"))
    server.daemon.store(Tier.DRAM, KEYS[:4].tolist())
    server.daemon.store(Tier.SSD, [*KEYS[2:6].tolist(), int(KEYS[9])])
    await server.start()
    async with EventPublisher() as publisher:
        engine = {
            "engine_id": "e1",
            "model": "m",
            "node_id": "n1",
            "events": publisher.events_endpoint,
            "replay": publisher.replay_endpoint,
            "block_tokens": 4,
            "namespace_id": SPACE.hex(),
        }
        section = IndexSection(
            nodes=(server.address,), engines=(engine,), backend="python", capacity_blocks=10_000
        )
        index = GlobalIndex(section)
        grpc_server, port = await start_server(index, "127.0.0.1", 0, lambda _: None)
        client = IndexClient(f"127.0.0.1:{port}", timeout_seconds=10)
        try:
            async with index:
                await publisher.publish(stored([1, 2], TOKENS[:8]))
                await until(lambda: any(hit.hbm_blocks == 2 for hit in index.hits(KEYS).engines))
                await until(lambda: bool(index.hits(KEYS).nodes))
                found = await client.explain(KEYS)
                tiers = bytes([2, 2, 6, 6, 4, 4, 0, 0, 0, 4])
                assert found.nodes == (TracedNode(NodeId("n1"), "ok", "exact", tiers),)
                (traced,) = found.engines
                assert (traced.engine.engine_id, traced.node_id) == ("e1", "n1")
                assert (traced.state, traced.tiers) == ("current", bytes([1, 1, *[0] * 8]))
                nobody = await client.explain(np.empty(0, np.uint64))
                assert [node.tiers for node in nobody.nodes] == [b""]
                with pytest.raises(InvalidRequestError, match="at most 16384 are explained"):
                    await client.explain(np.arange(1, 16386, dtype=np.uint64))
            index.check_integrity()
            assert index.faults == 0
        finally:
            await client.close()
            await grpc_server.stop(None)
            await server.stop()
