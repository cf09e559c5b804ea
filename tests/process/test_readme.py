"""What the READMEs show is run as they show it: the cluster's commands and the SDK's snippets."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emberkv_proto.layout import Group, GroupKind, KvLayout, Namespace
from tests.helpers.daemon_process import DaemonProcess
from tests.helpers.up import EMBERKV, ROOT, running_up

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(400)]
LAYERS, BLOCK_TOKENS, KV_HEADS, HEAD_DIM, BLOCKS = 2, 16, 1, 8, 5
LAYOUT = KvLayout(dtype="float32", layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM)
PART_BYTES = LAYERS * 2 * BLOCK_TOKENS * KV_HEADS * HEAD_DIM * 4
NAMESPACE = Namespace(
    model="m",
    weights_id="w",
    kv_dtype=LAYOUT.dtype,
    layout_fingerprint=LAYOUT.fingerprint,
    block_tokens=BLOCK_TOKENS,
    groups=(Group(GroupKind.FULL, LAYERS, PART_BYTES),),
)
TOKENS = list(range(BLOCKS * BLOCK_TOKENS + 3))


def fenced(readme: str, heading: str, language: str) -> str:
    """The first fenced block of a language under a heading."""
    section = (ROOT / readme).read_text(encoding="utf-8").partition(f"## {heading}\n")[2]
    found = re.search(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert found is not None, f"{readme}: no {language or 'plain'} block under {heading!r}"
    return found[1]


def run_snippet(snippet: str, daemon: DaemonProcess, **names: Any) -> dict[str, Any]:
    """Run it against this daemon with the names it leaves to its reader; return what it defined."""
    path = "/run/emberkv/daemon.sock"
    assert path in snippet
    scope = {"namespace": NAMESPACE, "token_ids": TOKENS, **names}
    exec(snippet.replace(path, str(daemon.socket_path)), scope)  # noqa: S102 - our own README
    return scope


def copies(pages: np.ndarray) -> dict[str, Callable[[int, memoryview], None]]:
    """The reader's own copies between pages, a row each, and slots."""

    def copy_into_my_pages(page: int, view: memoryview) -> None:
        pages[page] = np.frombuffer(view, np.uint8)

    def copy_from_my_pages(page: int, view: memoryview) -> None:
        view[:] = pages[page].tobytes()

    return {"copy_into_my_pages": copy_into_my_pages, "copy_from_my_pages": copy_from_my_pages}


def test_the_snippet_for_engines_stores_blocks_and_finds_them_again(tmp_path: Path) -> None:
    snippet = fenced("README.md", "In an engine", "python")
    written = np.random.default_rng(7).integers(0, 256, (BLOCKS, PART_BYTES), np.uint8)
    read = np.zeros_like(written)
    with DaemonProcess(tmp_path) as daemon:
        assert run_snippet(snippet, daemon, **copies(written))["ready"] == 0
        assert run_snippet(snippet, daemon, **copies(read))["ready"] == BLOCKS
    assert np.array_equal(read, written)


def test_the_sdks_example_stores_pages_and_brings_them_back(tmp_path: Path) -> None:
    snippet = fenced("client_sdk/README.md", "Example", "python")
    shape = (LAYERS, 2, BLOCKS + 1, BLOCK_TOKENS, KV_HEADS, HEAD_DIM)
    written = np.random.default_rng(7).random(shape, np.float32)
    read = np.zeros_like(written)
    page_ids = [3, 0, 5, 1, 2]
    with DaemonProcess(tmp_path) as daemon:
        for pages, found in ((written, 0), (read, BLOCKS)):
            scope = run_snippet(snippet, daemon, kv_pages=list(pages), page_ids=page_ids)
            scope["client"].close()
            assert scope["ready"] == found
            assert scope["client"].counters.errors == 0
    assert np.array_equal(read[:, :, page_ids], written[:, :, page_ids])


@pytest.mark.skipif(shutil.which("curl") is None, reason="the README's request is made with curl")
def test_the_commands_of_a_cluster_of_your_own_work(tmp_path: Path) -> None:
    block = fenced("README.md", "A cluster of your own", "")
    commands = [shlex.split(line, comments=True) for line in block.replace("\\\n", "").splitlines()]
    up, *others = commands
    assert up[:3] == [".venv/bin/emberkv", "up", "--config"]
    emberkv = ".venv/bin/emberkv"
    assert [command[0] for command in others] == [emberkv, "curl", emberkv, emberkv]
    with running_up(tmp_path, up[3]) as cluster:
        addresses = {
            "status": ("--index", cluster.index_address),
            "nodes": ("--index", cluster.index_address),
            "where": ("--index", cluster.index_address, "--router", cluster.router_url),
        }
        shown = []
        for name, *arguments in others:
            if name == "curl":
                words = [a.replace("http://127.0.0.1:8000", cluster.router_url) for a in arguments]
                command = [name, *words]
            else:
                command = [*EMBERKV, *arguments, *addresses[arguments[0]]]
            ran = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False
            )
            assert ran.returncode == 0, ran.stdout + ran.stderr
            shown.append(ran.stdout)
    status, answer, nodes, where = shown
    assert "engine-a" in nodes
    assert "node-a" in status
    assert '"completion_tokens": 16' in answer
    assert "would choose engine-" in where
