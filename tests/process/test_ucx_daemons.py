"""Daemons that move blocks over UCX: with each other, with a node that has only tcp, and alone."""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.chains import chain_of, read_chain, write_chain
from tests.helpers.cluster import Cluster, NodeProcess, wait_until
from tests.helpers.daemon_process import DaemonProcess
from tests.helpers.processes import pids_with

needs_nixl = pytest.mark.skipif(
    find_spec("nixl_cu12") is None,
    reason="nixl_cu12 is not installed: pip install --no-deps nixl-cu12==1.5.1",
)
pytestmark = pytest.mark.process
UCX = {"transport.kind": "ucx", "transport.rdma": "off", "transport.agents": 1}


def write(node: NodeProcess, number: int) -> None:
    with node.client() as client:
        write_chain(client, chain_of(number, 6))


def read(node: NodeProcess, number: int) -> int:
    with node.client() as client:
        return read_chain(client, chain_of(number, 6))


def agents_of(node: NodeProcess) -> list[int]:
    return [pid for pid in pids_with("transport.ucx_agent") if parent_of(pid) == node.pid]


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except FileNotFoundError:
        return 0


@needs_nixl
def test_blocks_come_over_ucx_from_ucx_and_over_tcp_from_a_node_that_has_no_more(
    tmp_path: Path,
) -> None:
    cluster = Cluster(tmp_path, nodes=3, settings=UCX)
    a, b, plain = cluster.nodes
    plain.settings.update({"transport.kind": "tcp", "transport.rdma": "off"})
    with cluster:
        write(a, 1)
        write(plain, 2)
        cluster.await_rest()
        wait_until(lambda: read(b, 1) == 6, "blocks come over ucx")
        assert b.gauge("transport_pushed_bytes_total") > 0
        assert b.gauge("transport_plain_bytes_total") == 0
        assert b.gauge('transport_info{lane="tcp/lo",rdma="false",transport="ucx"}') == 1
        wait_until(
            lambda: (
                a.gauge("transport_served_bytes_total") == b.gauge("transport_pushed_bytes_total")
            ),
            "both sides have counted the same bytes",
        )
        wait_until(lambda: read(b, 2) == 6, "blocks come over tcp")
        assert b.gauge("transport_plain_bytes_total") > 0
        wait_until(
            lambda: read(plain, 1) == 6, "plain reads are answered"
        )  # the ucx node answers plain reads on the same port


@needs_nixl
def test_a_killed_agent_is_replaced_and_a_killed_daemon_takes_its_agents_along(
    tmp_path: Path,
) -> None:
    with Cluster(tmp_path, nodes=2, settings=UCX) as cluster:
        a, b = cluster.nodes
        write(a, 1)
        write(a, 2)
        cluster.await_rest()
        for node in (a, b):
            before = agents_of(node)
            assert len(before) == 2
            for pid in before:
                os.kill(pid, signal.SIGKILL)
            wait_until(
                lambda node=node, before=before: (
                    len(agents_of(node)) == 2 and not {*agents_of(node)} & {*before}
                ),
                "both agents are replaced",
            )
            wait_until(
                lambda node=node: node.gauge("transport_replaced_agents_total") >= 1, "it counted"
            )
        wait_until(lambda: read(b, 1) == 6, "new agents bring blocks")
        left = agents_of(a)
        a.kill()
        wait_until(lambda: not {*left} & {*pids_with("transport.ucx_agent")}, "the agents ended")
        a.start()
        cluster.await_rest()
        wait_until(lambda: read(b, 2) == 6, "the next life is pulled from")


def test_a_daemon_that_must_have_rdma_and_has_none_says_so_and_does_not_start(
    tmp_path: Path,
) -> None:
    if list(Path("/sys/class/infiniband").glob("*")):
        pytest.skip("there is an RDMA device here")
    daemon = DaemonProcess(tmp_path, settings={"transport.rdma": "required"})
    try:
        assert "transport.rdma is required" in daemon.refusal() or find_spec("nixl_cu12") is None
    finally:
        daemon.clean()


@needs_nixl
def test_a_device_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    settings = {**UCX, "transport.devices": '["eth-absent"]'}
    daemon = DaemonProcess(tmp_path, settings=settings)
    try:
        assert "eth-absent" in daemon.refusal()
    finally:
        daemon.clean()
