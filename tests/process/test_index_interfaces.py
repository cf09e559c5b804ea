"""What an index serves beside queries, with real daemons and index processes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from client_sdk import SyncClient
from client_sdk.sync_client import StagedWrite
from emberkv_proto.hashing import index_keys
from emberkv_proto.types import BlockHash, EngineInfo
from tests.helpers.agreement import await_agreement
from tests.helpers.chains import BLOCK_TOKENS, NAMESPACE, chain_of, payload_of, write_chain
from tests.helpers.cluster import Cluster, IndexProcess, indexed_nodes, wait_until
from tests.helpers.daemon_process import MIB, DaemonProcess
from tests.helpers.kv_listener import KvListener
from tests.helpers.ports import free_port
from tests.helpers.server_process import ROOT

pytestmark = pytest.mark.process
WAIT_SECONDS = 60.0
TIERS = {"dram": "CPU", "ssd": "STORAGE"}


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


def ask(address: str, path: str, **fields: Any) -> tuple[int, Any]:
    request = Request(f"http://{address}{path}")
    if fields:
        request.data = json.dumps(fields).encode()
        request.add_header("Content-Type", "application/json")
    try:
        with urlopen(request, timeout=WAIT_SECONDS) as answer:  # noqa: S310
            return answer.status, json.loads(answer.read())
    except HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def test_other_routers_ask_by_http_and_register_a_daemon(tmp_path: Path) -> None:
    tokens = [3, 0, *range(2, 20 * BLOCK_TOKENS)]
    engine = EngineInfo("engine-a", "http://127.0.0.1:1", "m", NAMESPACE.id, BLOCK_TOKENS)
    with Cluster(tmp_path, nodes=1) as cluster:
        (node,) = cluster.nodes
        with SyncClient(node.socket_path, NAMESPACE, engine=engine, timeout_seconds=30.0) as client:
            write_chain(client, chain_of(3, 20))
            cluster.await_rest()
            alone = IndexProcess(tmp_path / "alone", [], {})
            alone.spawn()
            try:
                alone.await_serving()
                question = {"model_name": "m", "token_ids": tokens}
                assert ask(alone.http_address, "/query", **question)[0] == 404
                daemon = {"type": "EmberKV", "endpoint": node.grpc_address}
                assert ask(alone.http_address, "/register", **daemon)[0] == 201
                hit = {"engine-a": {"0": 20 * BLOCK_TOKENS}}
                for address in (alone.http_address, cluster.index.http_address):
                    wait_until(
                        lambda at=address: ask(at, "/query", **question)[1].get("scores") == hit,
                        "the hit of all blocks by HTTP",
                    )
                hashes = [block_hash.hex() for block_hash in chain_of(3, 25)]
                asked = {"model": "m", "seq_hashes": hashes}
                status, found = ask(alone.http_address, "/query_by_hash", **asked)
                assert status == 200
                assert found["default"]["engine-a"]["CPU"] == 20 * BLOCK_TOKENS
                _, workers = ask(alone.http_address, "/workers")
                assert [worker["instance_id"] for worker in workers] == ["node-a", "engine-a"]
                _, dump = ask(alone.http_address, "/dump")
                assert len(dump["emberkv:default"]["events"]) == 2  # DRAM and SSD
                assert ask(alone.http_address, "/query", model="m")[0] == 400
                unwanted = {"type": "EmberKV", "instance_id": node.grpc_address}
                assert ask(alone.http_address, "/unregister", **unwanted)[0] == 200
                assert ask(alone.http_address, "/unregister", **unwanted)[0] == 404
            finally:
                alone.clean()


async def test_daemon_tells_its_events_over_zmq_through_kill_and_restart(tmp_path: Path) -> None:
    ports = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    settings = {"events.zmq_endpoint": ports[0], "events.zmq_replay_endpoint": ports[1]}
    chain = index_keys(chain_of(5, 20)).tolist()
    sizes = {"capacity_bytes": MIB // 8, "extent_bytes": MIB // 16, "ssd_bytes": 8 * MIB}
    with DaemonProcess(tmp_path, settings=settings, **sizes) as daemon:
        with SyncClient(daemon.socket_path, NAMESPACE, timeout_seconds=30.0) as client:
            write_chain(client, chain_of(5, 20))
            async with KvListener(*ports) as listener:
                await heard(listener, "STORAGE", chain)
                assert listener.resident["CPU"] <= set(chain)
                for number in range(6, 12):
                    write_chain(client, chain_of(number, 20))
                    await asyncio.to_thread(settled, daemon)
                told = counted = None
                for _ in range(600):
                    await listener.catch_up(listener.next)
                    totals = await asyncio.to_thread(daemon.metrics)
                    counted = [totals[f'emberkv_store_blocks{{tier="{t}"}}'] for t in TIERS]
                    told = [len(listener.resident[medium]) for medium in TIERS.values()]
                    if told == counted:
                        break
                    await asyncio.sleep(0.1)
                assert told == counted
                assert listener.missed == []
        daemon.kill()
        daemon.start()
        async with KvListener(*ports) as listener:
            await heard(listener, "STORAGE", chain)
            assert listener.sizes == {BLOCK_TOKENS}


def settled(daemon: DaemonProcess) -> None:
    wait_until(
        lambda: daemon.metrics()["emberkv_store_writeback_queue_blocks"] == 0, "written back"
    )


async def heard(listener: KvListener, medium: str, keys: list[int]) -> None:
    """Wait until all these blocks were said to be there."""
    for _ in range(600):
        await listener.catch_up(listener.next)
        if set(keys) <= listener.resident[medium]:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"of {len(keys)} blocks {len(listener.resident[medium])} were told")


def emberkv(*arguments: str) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, "-m", "client_sdk.cli.main", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def test_where_tells_a_hole_from_a_node_that_is_gone(tmp_path: Path) -> None:
    engine = EngineInfo("engine-a", "http://127.0.0.1:1", "m", NAMESPACE.id, BLOCK_TOKENS)
    tokens = ",".join(str(token) for token in [3, 0, *range(2, 20 * BLOCK_TOKENS)])
    with Cluster(tmp_path, nodes=2) as cluster:
        whole, holed = cluster.nodes
        chain = chain_of(3, 20)
        with whole.client() as client:
            write_chain(client, chain)
        with (
            SyncClient(holed.socket_path, NAMESPACE, engine=engine, timeout_seconds=30.0) as client,
            holed.operator() as operator,
        ):
            write_chain(client, chain[:8])
            with stage_rest(client, chain) as write:
                write.commit()
            cluster.await_rest()
            asked = ["where", "--tokens", tokens, "--json", "--index", cluster.index.address]
            asked += ["--router", "http://127.0.0.1:1"]
            found = emberkv(*asked)
            reasons = {node["node_id"]: node["reason"] for node in found["nodes"]}
            assert reasons == {"node-a": "all_there", "node-b": "hole"}
            (there, hole, behind) = found["nodes"][1]["runs"]
            assert (there["last"], hole, behind["first"]) == (
                7,
                {"first": 8, "last": 9, "tiers": []},
                10,
            )
            salted = emberkv(*asked, "--salt", "another tenant")
            assert {node["reason"] for node in salted["nodes"]} == {"nothing_stored"}
            assert "with the salt given" in salted["hint"]
            assert operator.check() == []
        whole.kill()
        cluster.await_index_state(whole, "suspect")
        hashes = [block_hash.hex() for block_hash in chain]
        by_hash = emberkv("where", "--hashes", ",".join(hashes), *asked[3:])
        assert by_hash["nodes"][0]["reason"] == "node_away"
        assert by_hash["nodes"][0]["hit_blocks"] == 0
        assert by_hash["nodes"][0]["runs"][0]["last"] == 19
        whole.start()


def stage_rest(client: SyncClient, chain: list[BlockHash]) -> StagedWrite:
    """Stage and fill all but the first ten blocks of a chain."""
    write = client.stage(chain[10:], parent=chain[9])
    for number in write.granted:
        write.view(number)[:] = payload_of(chain[10 + number])
    return write


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
