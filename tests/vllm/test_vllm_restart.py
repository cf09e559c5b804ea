"""The promise to a vLLM user: the server dies, its cache does not."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks._vllm import PAGE_TOKENS, ROOT, Server, side_by_side
from tests.helpers.cluster import wait_until
from tests.helpers.daemon_process import MIB, DaemonProcess

pytestmark = pytest.mark.timeout(1800)
PROMPT_TOKENS = 2000


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_killed_and_started_again_finds_all_full_blocks(
    model: Path, tmp_path: Path, ranks: int
) -> None:
    rng = random.Random(11)
    asked = [[rng.randrange(250) for _ in range(PROMPT_TOKENS)] for _ in range(3)]
    plain = Server(tmp_path / "plain", model, "--no-enable-prefix-caching", ranks=ranks)
    # A machine that is busy, or stands still for a minute, must not turn a hit into a miss here.
    patience = {"daemon.lease_seconds": 180.0, "daemon.stage_seconds": 180.0}
    with DaemonProcess(tmp_path / "daemon", capacity_bytes=192 * MIB, settings=patience) as daemon:
        transfer = _documented_transfer(daemon.socket_path)
        transfer["kv_connector_extra_config"].update(timeout_seconds=60.0, load_seconds=60.0)
        option = f"--kv-transfer-config={json.dumps(transfer)}"
        server = Server(tmp_path / "server", model, option, ranks=ranks)
        with side_by_side(plain, server):
            right = [_complete(plain, tokens)[0] for tokens in asked]
            plain.kill()
            assert [_complete(server, tokens) for tokens in asked] == [(t, 0) for t in right]
            full = (PROMPT_TOKENS - 1) // PAGE_TOKENS * PAGE_TOKENS
            _await_blocks(daemon, len(asked) * full // PAGE_TOKENS)
            server.kill()
            server.start()
            assert [_complete(server, tokens) for tokens in asked] == [(t, full) for t in right]
            metrics = server.get("/metrics")
    loaded = [line for line in metrics.splitlines() if "emberkv_loaded_blocks_total{" in line]
    assert float(loaded[0].split()[-1]) == ranks * 3 * full // PAGE_TOKENS


def _documented_transfer(socket_path: Path) -> dict[str, Any]:
    """As docs/vllm.md tells users to write it, with our daemon's socket."""
    page = (ROOT / "docs/vllm.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"--kv-transfer-config '(\{.*?\n *\})'", page, re.DOTALL)
    config: dict[str, Any] = json.loads(text)
    assert config["kv_connector_extra_config"].keys() == {"socket_path", "engine_url"}
    config["kv_connector_extra_config"]["socket_path"] = str(socket_path)
    return config


def _await_blocks(daemon: DaemonProcess, blocks: int) -> None:
    """Wait until the saves, which nobody waits for, have ended."""
    with daemon.operator() as operator:
        wait_until(
            lambda: operator.status().tiers[0].blocks >= blocks, f"{blocks} blocks are saved"
        )


def _complete(server: Server, tokens: list[int]) -> tuple[str, int]:
    """The text, and how many tokens came from a cache."""
    body = {"model": "tiny", "prompt": tokens, "max_tokens": 16, "temperature": 0}
    answer = server.post("/v1/completions", body)
    details = answer["usage"]["prompt_tokens_details"] or {}
    return answer["choices"][0]["text"], details.get("cached_tokens") or 0
