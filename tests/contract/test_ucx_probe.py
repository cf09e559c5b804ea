"""What `emberkv doctor` tries before it says that UCX works here."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from client_sdk.transport.agent_process import UCP_AGENT, UCX_AGENT
from client_sdk.transport.ucx_settings import Rdma, UcxSettings
from emberkv_proto.errors import PreflightError
from store_daemon.transport.ucx_probe import probe_ucx


@pytest.mark.parametrize(("program", "module"), [(UCX_AGENT, "nixl_cu12"), (UCP_AGENT, "ucxx")])
def test_bytes_arrive_between_two_agents_and_required_rdma_is_missed(
    program: str, module: str
) -> None:
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    assert any(lane.startswith("tcp/") for lane in probe_ucx(UcxSettings(Rdma.OFF), program))
    if program == UCX_AGENT:
        with pytest.raises(PreflightError, match=r"transport\.rdma is required"):
            probe_ucx(UcxSettings(Rdma.REQUIRED, tls="tcp,self"), program)
