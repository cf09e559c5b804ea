"""A real Envoy with deploy/envoy/envoy.yaml, on ports of its own, as a process of a test."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from client_sdk.aio import timeout
from tests.helpers.router_client import request

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "deploy/envoy/envoy.yaml"
START_SECONDS = 90


def envoy_binary() -> str | None:
    """EMBERKV_ENVOY, or the one of `make test-envoy`, or one on the PATH."""
    named = os.environ.get("EMBERKV_ENVOY")
    own = ROOT / ".venvs/envoy/bin/envoy"
    return named or (str(own) if own.exists() else shutil.which("envoy"))


@dataclass(frozen=True)
class Envoy:
    port: int
    admin_port: int

    async def stats(self, prefix: str) -> dict[str, int]:
        got = await request(self.admin_port, f"/stats?format=json&filter=^{prefix}")
        return {item["name"]: item["value"] for item in got.json["stats"] if "name" in item}


def configuration(
    picker_port: int, engine_ports: Sequence[int], modes: Mapping[str, str]
) -> dict[str, Any]:
    """The file, with free ports, these engines, and `modes` in its processing_mode."""
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    config["admin"]["address"]["socket_address"]["port_value"] = 0
    (listener,) = config["static_resources"]["listeners"]
    listener["address"]["socket_address"]["port_value"] = 0
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"][0]["typed_config"]["processing_mode"].update(modes)
    picker, engines = config["static_resources"]["clusters"]
    picker["load_assignment"]["endpoints"][0]["lb_endpoints"] = [_endpoint(picker_port)]
    engines["load_assignment"]["endpoints"][0]["lb_endpoints"] = list(map(_endpoint, engine_ports))
    return config


def _endpoint(port: int) -> dict[str, Any]:
    address = {"socket_address": {"address": "127.0.0.1", "port_value": port}}
    return {"endpoint": {"address": address}}


@asynccontextmanager
async def running_envoy(tmp_path: Path, config: Mapping[str, Any]) -> AsyncIterator[Envoy]:
    """Ready to serve when the block begins."""
    binary = envoy_binary()
    assert binary is not None
    file, admin, log = (tmp_path / name for name in ("envoy.json", "admin", "envoy.log"))
    file.write_text(json.dumps(config))
    arguments = ["-c", str(file), "--admin-address-path", str(admin), "--concurrency", "1"]
    quiet = ["--disable-hot-restart", "--log-path", str(log), "-l", "warning"]
    process = await asyncio.create_subprocess_exec(binary, *arguments, *quiet)
    try:
        async with timeout(START_SECONDS):
            while not admin.exists() or ":" not in admin.read_text():
                assert process.returncode is None, log.read_text() if log.exists() else "no log"
                await asyncio.sleep(0.05)
            admin_port = int(admin.read_text().rpartition(":")[2])
            while (await request(admin_port, "/ready")).status != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        listeners = (await request(admin_port, "/listeners?format=json")).json
        address = listeners["listener_statuses"][0]["local_address"]["socket_address"]
        yield Envoy(address["port_value"], admin_port)
        sys.stderr.write(log.read_text() if log.exists() else "")
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 30)
            except asyncio.TimeoutError:
                process.kill()
                await process.wait()
        process._transport.close()  # type: ignore[attr-defined]
