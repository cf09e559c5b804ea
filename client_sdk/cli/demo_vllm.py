"""The demo's engines as real vLLM servers on the CPU, with a tiny model made for it."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import client_sdk
import emberkv_proto
from client_sdk.cli.cluster_plan import LOOPBACK, ClusterPlan, NodePlan, choose_port
from client_sdk.cli.demo_settings import MIB, REFERENCE, DemoEngine, DemoSize
from client_sdk.cli.openai_client import UNTOLD
from client_sdk.cli.process import ProcessSpec
from emberkv_proto.errors import ConfigError

VLLM_ENGINE = DemoEngine("tiny", 32, 250, (UNTOLD,), (UNTOLD,))
VLLM_SIZE = DemoSize(requests=20, longest_blocks=60, engine_blocks=256, dram_bytes=48 * MIB)
BLOCK_BYTES = 131072
"""Of the tiny model: 4 layers of keys and values, 2 heads of 64 float32, 32 tokens."""
READY_SECONDS = 400.0
MODEL_SECONDS = 300.0
PATIENT = {"timeout_seconds": 20.0, "load_seconds": 60.0, "peer_seconds": 20.0}
"""A busy machine must not turn hits into misses."""


def vllm_environment() -> dict[str, str]:
    """Offline, and one thread: the number of threads changes the last bits of what is computed."""
    environment = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": "1",
    }
    roots = [Path(package.__path__[0]).parent for package in (client_sdk, emberkv_proto)]
    if (roots[0] / "pyproject.toml").exists():  # a checkout; what is installed stays out of vLLM's
        environment["PYTHONPATH"] = ":".join(map(str, roots))
    return environment


def require_vllm(python: Path) -> None:
    """Raises ConfigError unless this interpreter has vLLM and our SDK."""
    try:
        _run(python, "-c", "import vllm, client_sdk.engine.vllm_connector")
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1:]
        raise ConfigError(
            f"--vllm {python}: it cannot import vLLM and the connector ({' '.join(said)});"
            " name the interpreter of vLLM's environment, with `pip install --no-deps emberkv`"
            " done in it (docs/vllm.md)"
        ) from None


def write_tiny_model(python: Path, directory: Path) -> None:
    """Write the model that the servers serve. Raises ConfigError when that fails."""
    try:
        _run(python, "-m", "client_sdk.engine.tiny_llama", str(directory))
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"the tiny model was not written: {getattr(error, 'stderr', '') or error}"
        ) from None


def with_vllm(plan: ClusterPlan, size: DemoSize, python: Path, model: Path) -> ClusterPlan:
    """The same cluster with vLLM servers as its engines, and one more without any cache."""
    memory = f"--kv-cache-memory-bytes={size.engine_blocks * BLOCK_BYTES}"
    nodes = tuple(
        replace(
            node,
            engine=_server(
                node.engine,
                python,
                model,
                node.engine_url,
                memory,
                f"--kv-transfer-config={json.dumps(_transfer(node))}",
            ),
        )
        for node in plan.nodes
    )
    url = f"http://{LOOPBACK}:{choose_port()}"
    log = plan.log_dir / f"{REFERENCE}.log"
    like = replace(plan.nodes[0].engine, name=REFERENCE, log_file=log)
    reference = _server(like, python, model, url, memory, "--no-enable-prefix-caching")
    return replace(plan, nodes=nodes, extras=(reference,))


def _transfer(node: NodePlan) -> dict[str, object]:
    return {
        "kv_connector": "EmberConnector",
        "kv_connector_module_path": "client_sdk.engine.vllm_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "engine_id": node.engine.name,
        "kv_connector_extra_config": {
            "socket_path": str(node.socket_path),
            "engine_url": node.engine_url,
            **PATIENT,
        },
    }


def _server(like: ProcessSpec, python: Path, model: Path, url: str, *more: str) -> ProcessSpec:
    return replace(
        like,
        module="vllm.entrypoints.openai.api_server",
        arguments=(
            f"--model={model}",
            f"--served-model-name={VLLM_ENGINE.model}",
            f"--host={LOOPBACK}",
            f"--port={url.rpartition(':')[2]}",
            "--enforce-eager",
            "--dtype=float32",
            f"--block-size={VLLM_ENGINE.block_tokens}",
            "--max-model-len=4096",
            "--enable-prompt-tokens-details",
            *more,
        ),
        ready_seconds=READY_SECONDS,
        environment=tuple(vllm_environment().items()),
        python=str(python.absolute()),  # not resolved: a venv's is a link
        health_url=f"{url}/health",
    )


def _run(python: Path, *arguments: str) -> None:
    subprocess.run(
        [str(python), *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=MODEL_SECONDS,
        env={**os.environ, **vllm_environment()},
    )
