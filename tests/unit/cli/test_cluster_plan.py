"""How a cluster's processes are derived from one configuration."""

from __future__ import annotations

import itertools
import socket
from pathlib import Path

import pytest
from pydantic import ValidationError

from client_sdk.cli.cluster_plan import (
    LOOPBACK,
    ClusterPlan,
    ClusterSection,
    choose_port,
    plan_cluster,
)
from client_sdk.cli.process import ProcessSpec
from client_sdk.engine.torch_engine.config import EngineSettings
from client_sdk.settings import load_settings
from emberkv_proto.errors import ConfigError
from router.config import RouterSettings
from store_daemon.config import DaemonSettings


def planned(section: ClusterSection, overrides: tuple[str, ...] = ()) -> ClusterPlan:
    ports = itertools.count(20000)
    return plan_cluster(section, None, overrides, lambda: next(ports), "cafe0001")


def overrides_of(spec: ProcessSpec) -> list[str]:
    assert spec.arguments[0::2] == ("--set",) * (len(spec.arguments) // 2)
    return list(spec.arguments[1::2])


def test_each_process_accepts_the_arguments_it_is_given() -> None:
    plan = planned(ClusterSection(nodes=3))
    for node in plan.nodes:
        daemon = load_settings(DaemonSettings, None, overrides_of(node.daemon), {})
        assert daemon.node.id == node.node_id
        assert daemon.daemon.socket_path == node.socket_path
        assert f"{daemon.daemon.grpc_host}:{daemon.daemon.grpc_port}" == node.grpc_address
        assert daemon.daemon.index_address == plan.index_address
        engine = load_settings(EngineSettings, None, overrides_of(node.engine), {}).engine
        assert engine.socket_path == str(node.socket_path)
        assert f"http://{engine.host}:{engine.port}" == node.engine_url
    router = load_settings(RouterSettings, None, overrides_of(plan.router), {})
    assert router.index.nodes == tuple(node.grpc_address for node in plan.nodes)
    assert f"{router.index.host}:{router.index.port}" == plan.index_address
    assert f"http://{router.router.host}:{router.router.port}" == plan.router_url


def test_no_two_processes_share_a_port_a_path_or_a_name() -> None:
    plan = planned(ClusterSection(nodes=4, router_port=0, index_port=0))
    ports, paths = [plan.index_address, plan.router_url], []
    for node in plan.nodes:
        daemon = load_settings(DaemonSettings, None, overrides_of(node.daemon), {})
        section = daemon.daemon
        ports += [str(section.grpc_port), str(section.transport_port), str(section.metrics_port)]
        ports.append(node.engine_url)
        paths += [daemon.dram.path, daemon.ssd.path, section.data_dir, section.socket_path]
    assert len(set(ports)) == len(ports)
    assert len(set(paths)) == len(paths)
    assert len({spec.name for spec in plan.specs}) == len(plan.specs) == 9


def test_what_the_user_sets_reaches_every_process_and_derived_values_win() -> None:
    plan = planned(ClusterSection(), ("engine.layers=2", "daemon.grpc_port=5"))
    for spec in plan.specs:
        assert overrides_of(spec)[:2] == ["engine.layers=2", "daemon.grpc_port=5"]
    first = load_settings(DaemonSettings, None, overrides_of(plan.nodes[0].daemon), {})
    assert first.daemon.grpc_port != 5


def test_the_users_file_is_handed_on_by_its_absolute_path() -> None:
    plan = plan_cluster(ClusterSection(), Path("some.yaml"), (), lambda: 1, "cafe0001")
    for spec in plan.specs:
        assert spec.arguments[:2] == ("--config", str(Path.cwd() / "some.yaml"))


def test_fixed_ports_are_kept() -> None:
    plan = planned(ClusterSection(router_port=8123, index_port=8124))
    assert plan.router_url == "http://127.0.0.1:8123"
    assert plan.index_address == "127.0.0.1:8124"


def test_a_base_dir_too_deep_for_a_socket_is_refused_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"107; set a shorter cluster\.base_dir"):
        planned(ClusterSection(base_dir=tmp_path / ("deep" * 30)))


def test_a_cluster_has_at_least_one_node() -> None:
    with pytest.raises(ValidationError):
        ClusterSection(nodes=0)


def test_a_chosen_port_is_free_and_below_the_range_of_outgoing_connections() -> None:
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    port = choose_port()
    assert 10000 <= port < max(low, 11000)
    with socket.socket() as probe:
        probe.bind((LOOPBACK, port))


def test_ports_that_are_chosen_before_any_is_bound_all_differ() -> None:
    assert len({choose_port() for _ in range(800)}) == 800


def test_directories_are_private_and_removed_whole(tmp_path: Path) -> None:
    plan = planned(ClusterSection(base_dir=tmp_path))
    plan.create_directories()
    assert plan.run_dir.stat().st_mode & 0o777 == 0o700
    (plan.run_dir / "node-a" / "left.bin").write_bytes(b"x")
    plan.remove_files()
    assert list(tmp_path.iterdir()) == []
    plan.remove_files()


def test_first_nodes_prefill_and_the_others_decode_when_told_so() -> None:
    plan = plan_cluster(ClusterSection(nodes=3, prefill_nodes=1))
    roles = [
        [argument for argument in node.engine.arguments if argument.startswith("engine.role=")]
        for node in plan.nodes
    ]
    assert roles == [["engine.role=prefill"], ["engine.role=decode"], ["engine.role=decode"]]
    plain = plan_cluster(ClusterSection(nodes=2))
    assert not any("engine.role" in argument for argument in plain.nodes[0].engine.arguments)


def test_somebody_must_decode() -> None:
    with pytest.raises(ValueError, match="leaves none of 2 nodes to decode"):
        ClusterSection(nodes=2, prefill_nodes=2)
