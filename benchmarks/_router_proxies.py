"""What stands between clients and engines: our router, others', a bare aiohttp proxy, nginx."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks._peer_servers import HOST
from benchmarks._peers import (
    SGLANG_ROUTER,
    SMG,
    VLLM_ROUTER,
    Peer,
    PeerUnavailableError,
    installed,
)
from benchmarks._router_backend import MODEL
from benchmarks._workers import ROOT, end_process
from client_sdk.cli.cluster_plan import choose_port

START_SECONDS = 240.0
"""Kernels may have to be compiled first."""
_PROCESS_CPU_CLOCK = 2
"""As clock_getcpuclockid(3) makes a clock's number of a process id."""
BLOCK_TOKENS = 64
PEERS = (SGLANG_ROUTER, VLLM_ROUTER, SMG)


@dataclass(frozen=True, slots=True)
class Engines:
    """Where the instant engines listen, and where they tell what they hold."""

    ports: Sequence[int]
    endpoints: Sequence[Sequence[str]]

    @property
    def urls(self) -> list[str]:
        return [f"http://{HOST}:{port}" for port in self.ports]


@dataclass(frozen=True, slots=True)
class Proxy:
    """One that serves."""

    name: str
    port: int
    pid: int

    def cpu_seconds(self) -> float:
        """CPU time of all its threads and children."""
        pids = [self.pid, *(child.pid for child in psutil.Process(self.pid).children(True))]
        return sum(time.clock_gettime((~pid << 3) | _PROCESS_CPU_CLOCK) for pid in pids)


@contextmanager
def our_router(engines: Engines) -> Iterator[Proxy]:
    """With its index, told by the engines what they hold, and default settings."""
    with tempfile.TemporaryDirectory(prefix="emberkv-bench-") as name:
        endpoint = Path(name) / "router.json"
        named = [
            {
                "engine_id": f"e{number}",
                "url": url,
                "model": MODEL,
                "events": events,
                "replay": replay,
                "block_tokens": BLOCK_TOKENS,
            }
            for number, (url, (events, replay)) in enumerate(
                zip(engines.urls, engines.endpoints, strict=True)
            )
        ]
        config = Path(name) / "router.yaml"
        values = {
            "router": {"port": 0, "endpoint_file": str(endpoint), "log_level": "warning"},
            "index": {"port": 0, "engines": named},
        }
        config.write_text(json.dumps(values))
        command = [sys.executable, "-m", "router", "--config", str(config)]
        with _started("emberkv", command) as process:
            _until("emberkv", process, endpoint.exists)
            port = int(json.loads(endpoint.read_text())["url"].rpartition(":")[2])
            yield Proxy("emberkv", port, process.pid)


@contextmanager
def aiohttp_proxy(engines: Engines) -> Iterator[Proxy]:
    port = choose_port()
    command = [sys.executable, "-m", "benchmarks._router_aiohttp", str(port), *engines.urls]
    with _started("aiohttp", command) as process:
        _until("aiohttp", process, lambda: _answers(port))
        yield Proxy("aiohttp", port, process.pid)


@contextmanager
def nginx(engines: Engines) -> Iterator[Proxy]:
    """One worker, connections kept to the engines, nothing buffered."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if program is None:
        raise PeerUnavailableError("nginx is not on the PATH; Debian: apt-get install nginx-light")
    port = choose_port()
    servers = "".join(f"server {HOST}:{port};" for port in engines.ports)
    with tempfile.TemporaryDirectory(prefix="emberkv-bench-") as name:
        config = Path(name) / "nginx.conf"
        config.write_text(
            f"worker_processes 1; pid {name}/pid; error_log {name}/error.log;\n"
            "events { worker_connections 4096; }\n"
            f"http {{ access_log off; client_body_temp_path {name}/b; proxy_temp_path {name}/p;\n"
            f"fastcgi_temp_path {name}/f; uwsgi_temp_path {name}/u; scgi_temp_path {name}/s;\n"
            "client_max_body_size 0; client_body_buffer_size 1m; keepalive_requests 1000000;\n"
            f"upstream engines {{ {servers} keepalive 256; keepalive_requests 1000000; }}\n"
            f"server {{ listen {HOST}:{port}; location / {{ proxy_pass http://engines;\n"
            'proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; } } }\n'
        )
        command = [program, "-c", str(config), "-p", name, "-g", "daemon off;"]
        with _started("nginx", command) as process:
            _until("nginx", process, lambda: _answers(port))
            yield Proxy("nginx", port, process.pid)


@contextmanager
def peer_router(peer: Peer, engines: Engines, directory: Path) -> Iterator[Proxy]:
    """A Rust router in its own venv, choosing by its tree of the prompts it has seen."""
    programs = installed(peer, directory)
    port, prometheus = choose_port(), choose_port()
    module = f"{peer.name.replace('-', '_')}.launch_router"
    command = [
        str(programs / "python"),
        *("-m", module, "--host", HOST, "--port", str(port), "--policy", "cache_aware"),
        *("--worker-urls", *engines.urls, "--log-level", "error"),
        *("--prometheus-host", HOST, "--prometheus-port", str(prometheus)),
    ]
    with _started(peer.name, command) as process:
        _until(peer.name, process, lambda: _answers(port))
        yield Proxy(peer.name, port, process.pid)


@contextmanager
def every_proxy(
    engines: Engines, directory: Path | None
) -> Iterator[tuple[list[Proxy], list[str]]]:
    """All that can run here, ours first, and why others cannot."""
    with ExitStack() as stack:
        serving = [stack.enter_context(our_router(engines))]
        missing: list[str] = []
        makers = [aiohttp_proxy(engines)]
        if directory is not None:
            makers += [nginx(engines), *(peer_router(peer, engines, directory) for peer in PEERS)]
        for maker in makers:
            try:
                serving.append(stack.enter_context(maker))
            except PeerUnavailableError as error:  # noqa: PERF203
                missing.append(str(error))
        yield serving, missing


@contextmanager
def _started(name: str, command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(list(command), stdout=sys.stderr, cwd=ROOT, env=dict(os.environ))
    try:
        yield process
    finally:
        process.terminate()
        end_process(process)


def _until(name: str, process: subprocess.Popen[bytes], is_ready) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + START_SECONDS
    while not is_ready():
        if process.poll() is not None:
            raise PeerUnavailableError(f"{name} ended at start, code {process.returncode}")
        if time.monotonic() > deadline:
            raise PeerUnavailableError(f"{name} did not serve within {START_SECONDS} s")
        time.sleep(0.05)


def _answers(port: int) -> bool:
    """Whether a completion goes through: some listen long before they know their engines."""
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}).encode()
    request = urllib.request.Request(
        f"http://{HOST}:{port}/v1/chat/completions",
        body,
        {"content-type": "application/json"},
    )
    with suppress(OSError), urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310
        return bool(answer.status == 200)
    return False
