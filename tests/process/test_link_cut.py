"""Two daemons in network namespaces of their own; the link between them is cut in mid-pull."""

from __future__ import annotations

import asyncio
import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from emberkv_proto.errors import EmberError
from tests.helpers.agreement import await_agreement
from tests.helpers.chains import chain_of, read_chain, write_chain
from tests.helpers.cluster import (
    WAIT_SECONDS,
    IndexProcess,
    NodeProcess,
    indexed_nodes,
    wait_until,
)
from tests.helpers.network import TwoHosts, two_hosts

pytestmark = pytest.mark.process
BLOCKS = 150
"""More than two reads of a pull take at a time."""
PULL_SECONDS = 4.0


class HostedNode(NodeProcess):
    """A node in a network namespace; others reach its blocks over the data link only."""

    def __init__(self, directory: Path, side: str, hosts: TwoHosts, settings: dict[str, Any]):
        super().__init__(directory / side, f"node-{side}", 200, 0, settings)
        self._hosts, self._side = hosts, side
        port = self.grpc_address.rpartition(":")[2]
        self.grpc_address = f"{hosts.control(side)}:{port}"
        self.settings["daemon.grpc_host"] = "0.0.0.0"
        self.settings["daemon.advertised_host"] = hosts.data(side)

    def _command(self) -> list[str]:
        return self._hosts.inside(self._side, super()._command())


class BridgeIndex(IndexProcess):
    """The index, where both hosts reach it over their control links."""

    def __init__(self, directory: Path, nodes: list[str], host: str) -> None:
        super().__init__(directory, nodes, {"index.host": host})
        self.address = f"{host}:{self.address.rpartition(':')[2]}"

    def _is_serving(self) -> bool:
        with contextlib.suppress(EmberError):
            asyncio.run(indexed_nodes(self.address))
            return True
        return False


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["tcp", "ucx"])
def test_a_link_that_is_cut_in_mid_pull_costs_a_miss_and_pulls_go_on_once_it_is_back(
    tmp_path: Path, kind: str
) -> None:
    if kind == "ucx" and find_spec("nixl_cu12") is None:
        pytest.skip("nixl_cu12 is not installed: pip install --no-deps nixl-cu12==1.5.1")
    settings: dict[str, Any] = {"transport.kind": kind, "transport.progress_seconds": 1.5}
    if kind == "ucx":
        settings |= {"transport.rdma": "off", "transport.agents": 1}
        settings["transport.devices"] = '["data"]'  # not over the bridge
    with two_hosts() as hosts, ExitStack() as stack:
        a, b = nodes = [HostedNode(tmp_path, side, hosts, settings) for side in ("a", "b")]
        index = BridgeIndex(tmp_path, [n.grpc_address for n in nodes], hosts.bridge_address())
        a.faults = "peer_serve=delay:1.0@2+"  # the first piece arrives, the second is under way
        for server in (index, *nodes):
            if isinstance(server, HostedNode):
                server.settings["daemon.index_address"] = index.address
            stack.callback(server.clean)
            server.spawn()
        for server in (index, *nodes):
            server.await_serving()
        with a.client() as client:
            write_chain(client, chain_of(1, BLOCKS))
        await_agreement(index.address, a.grpc_address, WAIT_SECONDS)

        with ThreadPoolExecutor(1) as threads:
            begun = time.monotonic()
            reading = threads.submit(read, b)
            time.sleep(0.5)
            hosts.cut()
            got = reading.result(60)
        assert got < BLOCKS
        assert time.monotonic() - begun < PULL_SECONDS + 40
        b.check_integrity()
        assert read(b) < BLOCKS, "bytes went over a link that is down"

        a.kill()
        a.faults = ""
        hosts.mend()
        a.start()
        wait_until(lambda: read(b) == BLOCKS, "pulls over the mended link")
        for node in nodes:
            node.check_integrity()
        await_agreement(index.address, b.grpc_address, WAIT_SECONDS)


def read(node: NodeProcess) -> int:
    with node.client(timeout_seconds=20.0) as client:
        return read_chain(client, chain_of(1, BLOCKS), PULL_SECONDS)
