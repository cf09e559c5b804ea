"""What an index serves beside queries, with real daemons and index processes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.agreement import await_agreement
from tests.helpers.chains import chain_of, write_chain
from tests.helpers.cluster import Cluster, IndexProcess, indexed_nodes
from tests.helpers.server_process import ROOT

pytestmark = pytest.mark.process
WAIT_SECONDS = 30.0


def test_second_index_starts_from_the_first_and_agrees_with_the_daemons(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=2) as cluster:
        for number, node in enumerate(cluster.nodes):
            with node.client() as client:
                write_chain(client, chain_of(number, 20))
        cluster.await_rest()
        addresses = [node.grpc_address for node in cluster.nodes]
        settings = {"index.seed_from": cluster.index.address}
        second = IndexProcess(tmp_path / "second", addresses, settings)
        second.spawn()
        try:
            second.await_serving()
            for node in cluster.nodes:
                await_agreement(second.address, node.grpc_address, WAIT_SECONDS)
            assert "with 2 nodes, 80 blocks" in second.log  # each in DRAM and on SSD
            seen = asyncio.run(indexed_nodes(second.address))
            assert [node.snapshots for node in seen] == [1, 1]  # the first index's, no daemon's
            cluster.index.kill()
            with cluster.nodes[0].client() as client:
                write_chain(client, chain_of(7, 10))
            await_agreement(second.address, addresses[0], WAIT_SECONDS)
        finally:
            second.clean()


def test_nodes_watch_tells_when_a_daemon_is_killed_and_when_it_is_back(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=1) as cluster:
        (node,) = cluster.nodes
        cluster.await_index_state(node, "ok")
        command = [sys.executable, "-m", "client_sdk.cli.main", "nodes", "--watch", "--json"]
        with subprocess.Popen(
            [*command, "--index", cluster.index.address],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as watching:
            assert watching.stdout is not None
            try:
                whole = json.loads(watching.stdout.readline())
                assert whole["is_whole"]
                first_life = whole["nodes"][0]["incarnation"]
                node.kill()
                state = "ok"
                while state == "ok":
                    (seen,) = json.loads(watching.stdout.readline())["nodes"]
                    state = seen["state"]
                assert state == "suspect"
                node.start()
                while state != "ok" or seen["incarnation"] <= first_life:
                    (seen,) = json.loads(watching.stdout.readline())["nodes"]
                    state = seen["state"]
                cluster.index.kill()
                assert watching.wait(WAIT_SECONDS) == 1
                assert watching.stderr is not None
                assert "Traceback" not in watching.stderr.read()
            finally:
                if watching.poll() is None:
                    watching.kill()
