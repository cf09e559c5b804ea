"""`emberkv up` with the example config: answers, status, where, and a clean end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from client_sdk.cli.cluster_plan import SHM
from tests.helpers.processes import pids_with
from tests.helpers.up import EMBERKV, ROOT, UpProcess, running_up

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(400)]
PROMPT = "The keeper of the lighthouse writes into the log, every hour, what he has seen."


@dataclass(frozen=True)
class Running:
    """What the tests ask of it."""

    up: UpProcess

    def post(self, path: str, **body: object) -> bytes:
        data = json.dumps({"model": "ember-demo", **body}).encode()
        request = Request(  # noqa: S310 - our own router
            self.up.router_url + path, data, {"content-type": "application/json"}
        )
        with urlopen(request, timeout=90) as response:  # noqa: S310
            answer: bytes = response.read()
        return answer

    def emberkv(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*EMBERKV, *arguments, "--index", self.up.index_address]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False
        )


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Running]:
    with running_up(tmp_path, "deploy/example.yaml") as up:
        yield Running(up)


def test_the_example_cluster_answers_shows_its_state_and_ends_clean(cluster: Running) -> None:
    whole = json.loads(
        cluster.post(
            "/v1/chat/completions", messages=[{"role": "user", "content": PROMPT}], max_tokens=8
        )
    )
    assert len(whole["choices"][0]["message"]["content"]) == 8
    streamed = cluster.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    )
    events = [line[6:] for line in streamed.splitlines() if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

    state = _page_with_fill(cluster)
    assert [node["exactness"] for node in state["nodes"]] == ["exact", "exact"]
    tiers = [tier for node in state["nodes"] for tier in node["tiers"]]
    assert [tier["tier"] for tier in tiers] == ["DRAM", "SSD"] * 2
    assert min(tier["capacity_bytes"] for tier in tiers) > 0
    assert len(state["decisions"]) == state["window"]["requests"] == 2
    assert state["totals"]["delivered_hit_tokens"] > 0

    nodes = _settled_status(cluster)
    assert [node["node_id"] for node in nodes] == ["node-a", "node-b"]
    for node in nodes:
        assert node["state"] == "ok"
        assert node["index_lag_seconds"] < 10
        assert [tier["tier"] for tier in node["daemon"]["tiers"]] == ["dram", "ssd"]
        assert len(node["engines"]) == 1
    assert sum(node["index_blocks"].get("dram", 0) for node in nodes) > 0
    assert any(node["daemon"]["hit_rate"] is not None for node in nodes)
    table = cluster.emberkv("status")
    assert table.returncode == 0, table.stderr
    assert "node-a" in table.stdout

    cluster.post("/v1/completions", prompt=PROMPT, max_tokens=1)
    _settled_status(cluster)
    where = cluster.emberkv("where", PROMPT, "--json", "--router", cluster.up.router_url)
    assert where.returncode == 0, where.stderr
    found = json.loads(where.stdout)
    assert max(node["hit_blocks"] for node in found["nodes"]) == len(found["blocks"]) > 0
    assert found["route"]["chosen"] is not None, found["route"]

    (run_dir,) = (path.name for path in cluster.up.base_dir.iterdir())
    run_id = run_dir.removeprefix("emberkv-")
    assert len(pids_with(run_id)) == 5
    cluster.up.process.send_signal(signal.SIGINT)
    assert cluster.up.process.wait(timeout=90) == 0
    assert pids_with(run_id) == []
    assert os.listdir(cluster.up.base_dir) == []
    assert not list(SHM.glob(f"emberkv-{run_id}-*"))


def _page_with_fill(cluster: Running) -> dict[str, Any]:
    """What the page shows, once a daemon has reported that its tiers hold something."""
    deadline = time.monotonic() + 60
    while True:
        with urlopen(f"{cluster.up.router_url}/ui/state", timeout=90) as page:  # noqa: S310
            state: dict[str, Any] = json.load(page)
        if any(tier["used_bytes"] for node in state["nodes"] for tier in node["tiers"]):
            return state
        assert time.monotonic() < deadline, state["nodes"]
        time.sleep(0.2)


def _settled_status(cluster: Running) -> list[dict]:  # type: ignore[type-arg]
    """Status once the index counts what the daemons hold."""
    deadline = time.monotonic() + 60
    while True:
        ran = cluster.emberkv("status", "--json")
        assert ran.returncode == 0, ran.stderr
        nodes: list[dict] = json.loads(ran.stdout)["nodes"]  # type: ignore[type-arg]
        if all(node["index_matches_daemon"] and node["engines"] for node in nodes):
            return nodes
        assert time.monotonic() < deadline, ran.stdout
        time.sleep(0.3)
