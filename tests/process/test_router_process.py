"""`python -m router` as a process: start, endpoint file, index service, signals, mistakes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from emberkv_proto import __version__
from emberkv_proto.v1 import index_pb2, index_pb2_grpc
from router.__main__ import main
from tests.helpers.fake_engine import SSE_HEAD, FakeEngine, chunk, hang, stream
from tests.helpers.router_client import connected, request
from tests.helpers.router_process import command, router_process

pytestmark = pytest.mark.process
EVENTS = [b"data: %d\n\n" % i for i in range(5)] + [b"data: [DONE]\n\n"]


async def test_it_serves_names_its_addresses_and_ends_with_0_after_a_drain(tmp_path: Path) -> None:
    async with FakeEngine().serving() as engine:
        engine.completion = stream(EVENTS, pause_seconds=0.2)
        async with router_process(tmp_path, f"router.engines=[{{url: '{engine.url}'}}]") as router:
            assert router.endpoint["pid"] == router.process.pid
            async with grpc.aio.insecure_channel(router.endpoint["index_address"]) as channel:
                nodes = await index_pb2_grpc.IndexStub(channel).Nodes(
                    index_pb2.NodesRequest(), timeout=90
                )
                assert list(nodes.nodes) == []
            metrics = await request(router.port, "/metrics")
            assert b"emberkv_index_query_seconds" in metrics.body
            async with connected(router.port) as client:
                client.post("/v1/completions", {"prompt": [1]})
                await client.read_head()
                os.kill(router.process.pid, signal.SIGTERM)
                body = await client.reader.read()
                assert body.endswith(b"0\r\n\r\n")
                assert body.count(b"data:") == 6
            assert await asyncio.wait_for(router.process.wait(), 30) == 0


async def test_a_request_that_outlives_the_drain_is_cut_and_the_exit_is_still_0(
    tmp_path: Path,
) -> None:
    async with FakeEngine().serving() as engine:
        engine.completion = hang(SSE_HEAD + chunk(EVENTS[0]))
        url = f"router.engines=[{{url: '{engine.url}'}}]"
        async with router_process(tmp_path, url, "router.drain_seconds=0.3") as router:
            async with connected(router.port) as client:
                client.post("/v1/completions", {"prompt": [1]})
                await client.read_head()
                os.kill(router.process.pid, signal.SIGTERM)
                assert await asyncio.wait_for(router.process.wait(), 30) == 0
            await asyncio.wait_for(engine.aborted.wait(), 30)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("router.polcy=cost", "did you mean 'policy'"),
        ("router.policy=best", "router.policy"),
        ("router.engines=[{url: 'ftp://x'}]", "must look like http://host:port"),
        ("router.port=70000", "router.port"),
        ("rooter.port=1", "unknown section 'rooter'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(
    setting: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--set", setting]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("router: ")
    assert said in line


def test_a_taken_port_is_one_line_and_exit_2(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for key in ("router.port", "index.port"):
            other = "index.port=0" if key == "router.port" else "router.port=0"
            done = subprocess.run(
                command(f"{key}={port}", other),
                capture_output=True,
                text=True,
                timeout=90,
                check=False,
            )
            assert done.returncode == 2
            assert "Traceback" not in done.stderr
            # gRPC may log a line of its own before ours.
            ours = [line for line in done.stderr.splitlines() if line.startswith("router: ")]
            assert len(ours) == 1
            assert str(port) in ours[0]


def test_version_is_printed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "router", "--version"],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    assert done.stdout.strip() == f"emberkv {__version__}"
