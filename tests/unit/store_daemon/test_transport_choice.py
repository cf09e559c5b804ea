"""Which transport a configuration means, and what is refused at start."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from client_sdk.cli.doctor import Verdict, check_transport
from client_sdk.transport.ucx_settings import (
    Rdma,
    UcxSettings,
    can_read_by_itself,
    one_sided,
)
from emberkv_proto.errors import PreflightError
from store_daemon.config import TransportSection
from store_daemon.transport import choice
from store_daemon.transport.choice import TransportKind, active_ports, choose

WITH_RDMA = ("self/memory", "tcp/eth0", "rc_mlx5/mlx5_0:1", "dc_mlx5/mlx5_1:1")


@pytest.fixture
def infiniband(tmp_path: Path) -> Path:
    """Two devices; the port of the second is down."""
    for device, state in (("mlx5_0", "4: ACTIVE\n"), ("mlx5_1", "1: DOWN\n")):
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
    return tmp_path


@pytest.fixture(params=[True, False], ids=["nixl", "no-nixl"])
def has_nixl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(choice, "find_spec", lambda name: object() if request.param else None)
    return bool(request.param)


def test_only_ports_whose_link_is_up_count(infiniband: Path, tmp_path: Path) -> None:
    assert list(active_ports(infiniband)) == ["mlx5_0:1"]
    assert list(active_ports(tmp_path / "none")) == []


def test_auto_is_ucx_only_with_a_port_and_nixl(
    infiniband: Path, tmp_path: Path, has_nixl: bool
) -> None:
    assert choose(TransportSection(), tmp_path / "none") is TransportKind.TCP
    expected = TransportKind.UCX if has_nixl else TransportKind.TCP
    assert choose(TransportSection(), infiniband) is expected
    assert choose(TransportSection(rdma="off"), infiniband) is TransportKind.TCP
    assert choose(TransportSection(kind="tcp"), infiniband) is TransportKind.TCP


def test_ucx_by_name_needs_nixl(tmp_path: Path, has_nixl: bool) -> None:
    section = TransportSection(kind="ucx", rdma="off")
    if has_nixl:
        assert choose(section, tmp_path / "none") is TransportKind.UCX
        return
    with pytest.raises(PreflightError, match=r"emberkv\[ucx\]"):
        choose(section, tmp_path / "none")


def test_ucp_by_name_needs_ucxx_and_no_nixl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = TransportSection(kind="ucp")
    monkeypatch.setattr(choice, "find_spec", lambda name: object() if name == "ucxx" else None)
    assert choose(section, tmp_path / "none") is TransportKind.UCP
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    with pytest.raises(PreflightError, match=r"emberkv\[ucp\]"):
        choose(section, tmp_path / "none")


@pytest.mark.parametrize("kind", ["auto", "ucx"])
def test_required_rdma_without_a_port_is_refused(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "find_spec", lambda name: object())
    section = TransportSection.model_validate({"kind": kind, "rdma": "required"})
    with pytest.raises(PreflightError, match="no active port"):
        choose(section, tmp_path / "none")


def test_an_unquoted_off_of_yaml_means_off() -> None:
    assert TransportSection.model_validate({"rdma": False}).rdma == "off"


def test_contradictions_are_refused() -> None:
    for values in (
        {"kind": "tcp", "rdma": "required"},
        {"kind": "tcp", "devices": ["mlx5_0:1"]},
        {"kind": "verbs"},
        {"engine_agents": 1},
        {"kind": "tcp", "engine_agents": 1},
        {"agents": 0},
        {"progress_seconds": 0},
    ):
        with pytest.raises(ValidationError):
            TransportSection.model_validate(values)


def test_a_silent_fallback_to_tcp_is_refused_where_rdma_is_required() -> None:
    with pytest.raises(PreflightError, match=r"required, but UCX finds only self/memory tcp/eth0"):
        UcxSettings(Rdma.REQUIRED).check(("self/memory", "tcp/eth0"))
    UcxSettings(Rdma.REQUIRED).check(WITH_RDMA)
    UcxSettings(Rdma.PREFERRED).check(("self/memory", "tcp/eth0"))


def test_a_named_device_that_is_absent_is_refused() -> None:
    UcxSettings(devices=("mlx5_0:1",)).check(WITH_RDMA)
    with pytest.raises(PreflightError, match="mlx5_7:1"):
        UcxSettings(devices=("mlx5_0:1", "mlx5_7:1")).check(WITH_RDMA)


def test_the_environment_of_the_agents_keeps_what_the_deployment_set() -> None:
    given = {"UCX_TLS": "rc,cuda", "UCX_LOG_LEVEL": "info"}
    chosen = UcxSettings(devices=("mlx5_0:1", "mlx5_1:1")).environment(given)
    assert chosen["UCX_TLS"] == "rc,cuda"
    assert chosen["UCX_LOG_LEVEL"] == "info"
    assert chosen["UCX_NET_DEVICES"] == "mlx5_0:1,mlx5_1:1"
    assert "UCX_NET_DEVICES" not in UcxSettings().environment({})


def test_off_lets_ucx_see_no_rdma_whatever_the_environment_says() -> None:
    assert UcxSettings(Rdma.OFF).environment({"UCX_TLS": "rc"})["UCX_TLS"] == "tcp,self"


def test_reading_by_itself_takes_the_same_kind_on_both_sides() -> None:
    prefixes = UcxSettings().one_sided
    assert one_sided(WITH_RDMA) == ("rc_mlx5/mlx5_0:1", "dc_mlx5/mlx5_1:1")
    assert can_read_by_itself(WITH_RDMA, ("rc_mlx5/mlx5_9:1",), prefixes)
    assert not can_read_by_itself(WITH_RDMA, ("srd/efa_0:1", "tcp/eth0"), prefixes)
    assert not can_read_by_itself(WITH_RDMA, ("tcp/eth0",), prefixes)


def test_doctor_says_tcp_and_fails_what_the_daemon_would_refuse() -> None:
    assert check_transport(TransportSection(kind="tcp")).seen == "tcp"
    finding = check_transport(TransportSection(rdma="required"))
    assert finding.verdict is Verdict.FAIL
    assert finding.fix
