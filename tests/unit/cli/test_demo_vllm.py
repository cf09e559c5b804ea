"""The demo's cluster when its engines are vLLM servers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from client_sdk.cli.cluster_plan import ClusterSection, plan_cluster
from client_sdk.cli.demo_settings import REFERENCE, read_prompts
from client_sdk.cli.demo_vllm import VLLM_ENGINE, VLLM_SIZE, require_vllm, with_vllm
from client_sdk.cli.trace import default_trace_path
from emberkv_proto.errors import ConfigError


def test_each_engine_reaches_its_own_daemon_and_the_reference_none(tmp_path: Path) -> None:
    plain = plan_cluster(ClusterSection(base_dir=tmp_path))
    plan = with_vllm(plain, VLLM_SIZE, Path("/venv/bin/python"), Path("/model"))
    for node in plan.nodes:
        given = dict(a.lstrip("-").split("=", 1) for a in node.engine.arguments if "=" in a)
        transfer = json.loads(given["kv-transfer-config"])
        extra = transfer["kv_connector_extra_config"]
        assert extra["socket_path"] == str(node.socket_path)
        assert extra["engine_url"] == node.engine_url == f"http://127.0.0.1:{given['port']}"
        assert node.engine.health_url == f"{node.engine_url}/health"
        assert node.engine.python == "/venv/bin/python"
    (reference,) = plan.extras
    assert reference.name == REFERENCE
    assert "--no-enable-prefix-caching" in reference.arguments
    assert not any("kv-transfer-config" in argument for argument in reference.arguments)
    ports = {spec.health_url for spec in plan.specs if spec.health_url}
    assert len(ports) == 3


def test_an_interpreter_is_found_from_other_directories(tmp_path: Path) -> None:
    plain = plan_cluster(ClusterSection(base_dir=tmp_path))
    plan = with_vllm(plain, VLLM_SIZE, Path("venv/bin/python"), Path("/model"))
    servers = [*(node.engine for node in plan.nodes), *plan.extras]
    assert {server.python for server in servers} == {f"{Path.cwd()}/venv/bin/python"}


def test_the_prompts_fit_one_request_and_fill_an_engine() -> None:
    prompts = read_prompts(default_trace_path(), VLLM_SIZE, VLLM_ENGINE)
    assert len(prompts) == VLLM_SIZE.requests
    assert max(len(prompt.token_ids) for prompt in prompts) < 4096 - 32
    blocks = sum(len(prompt.token_ids) // VLLM_ENGINE.block_tokens for prompt in prompts)
    assert blocks > VLLM_SIZE.engine_blocks, "an engine could keep them all by itself"


def test_an_interpreter_without_vllm_is_refused_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--vllm .*vllm.*pip install --no-deps emberkv"):
        require_vllm(Path(sys.executable))
    with pytest.raises(ConfigError, match="cannot import"):
        require_vllm(tmp_path / "none")
