"""vLLM servers on two nodes behind our router, and what a client of theirs sees.

with VllmSite(tmp_path, model, roles=("prefill", "decode")) as site:
    answer = site.complete(site.router_url, tokens)
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks._vllm import Server, side_by_side, transfer_config
from tests.helpers.agreement import await_agreement
from tests.helpers.cluster import RouterProcess, wait_until
from tests.helpers.daemon_process import MIB, DaemonProcess
from tests.helpers.ports import free_port

ANSWER_SECONDS = 120.0
ANSWER_TOKENS = 16


@dataclass(frozen=True)
class Completion:
    """What the client got."""

    tokens: list[int]
    prompt_tokens: int
    cached: int
    """Tokens that the engine did not compute, by its own word."""
    engine: str
    """By the router's header; empty without it."""
    predicted: int
    """Tokens that the router did not expect to be computed."""
    body: dict[str, Any]


class VllmSite:
    """A context manager: node-0 with the engine vllm-0, node-1 with vllm-1, and a router."""

    def __init__(
        self,
        directory: Path,
        model: Path,
        *options: str,
        roles: tuple[str, str] = ("both", "both"),
        router: Mapping[str, Any] | None = None,
        connector: Mapping[str, Any] | None = None,
    ) -> None:
        """`options` of both servers; settings of router and connectors on top of patient ones."""
        self._addresses = [f"127.0.0.1:{free_port()}" for _ in roles]
        self._index_address = f"127.0.0.1:{free_port()}"
        self.daemons = [
            DaemonProcess(
                directory / f"node-{number}",
                node_id=f"node-{number}",
                capacity_bytes=64 * MIB,
                settings={
                    "daemon.grpc_port": address.rpartition(":")[2],
                    "daemon.index_address": self._index_address,
                    "daemon.peer_timeout_seconds": 20.0,
                    "daemon.index_timeout_seconds": 20.0,
                },
            )
            for number, address in enumerate(self._addresses)
        ]
        settings = {"index.port": self._index_address.rpartition(":")[2], **(router or {})}
        self.router = RouterProcess(directory, 0, self._addresses, settings)
        self.servers = [Server(directory / f"server-{n}", model, *options) for n in (0, 1)]
        patient = {
            "timeout_seconds": 20.0,
            "load_seconds": 60.0,
            "peer_seconds": 20.0,
            **(connector or {}),
        }
        for number, (server, daemon) in enumerate(zip(self.servers, self.daemons, strict=True)):
            transfer = transfer_config(
                daemon.socket_path, engine_url=server.url, role=roles[number], **patient
            )
            transfer["engine_id"] = f"vllm-{number}"
            server.add(f"--kv-transfer-config={json.dumps(transfer)}")
        self._stack = ExitStack()

    def __enter__(self) -> VllmSite:
        try:
            for daemon in self.daemons:
                self._stack.enter_context(daemon)
            self._stack.callback(self.router.clean)
            self.router.spawn()
            self._stack.enter_context(side_by_side(*self.servers))
            self.router.await_serving()
            self.await_ready()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def router_url(self) -> str:
        return str(self.router.endpoint["url"])

    def await_ready(self) -> None:
        """Wait until the router knows both engines, each with its node."""

        def holds() -> bool:
            with urllib.request.urlopen(f"{self.router_url}/workers", timeout=10) as page:  # noqa: S310
                workers = json.loads(page.read())["workers"]
            healthy = {w["engine"] for w in workers if w["state"] == "healthy" and w["node_id"]}
            return healthy >= {"vllm-0", "vllm-1"}

        wait_until(holds, "the router knows both engines")

    def settle(self) -> None:
        """Wait until the index says what the nodes have."""
        for address in self._addresses:
            await_agreement(self._index_address, address, 60.0)

    def metric(self, name: str, labels: str = "") -> float:
        """Of the router, without its prefix; 0 when it never happened."""
        return metric(self.router_url, f"emberkv_router_{name}{labels}")

    def complete(self, url: str, prompt: Sequence[int] | str, **more: Any) -> Completion:
        """Ask a server, or the router."""
        body = {"prompt": prompt if isinstance(prompt, str) else list(prompt), **more}
        return self.ask(f"{url}/v1/completions", body)

    def ask(self, url: str, body: Mapping[str, Any]) -> Completion:
        """Ask for a greedy answer. Raises AssertionError where there is none."""
        asked = {
            "model": "tiny",
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **body,
        }
        request = urllib.request.Request(  # noqa: S310
            url, json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:  # noqa: S310
                    return _completion(answer.headers, json.load(answer))
            except urllib.error.HTTPError as error:  # noqa: PERF203
                with error:
                    said = error.read()[:500]
                # Until the router has heard of the engines there is nobody to ask.
                if error.code != 503 or time.monotonic() > deadline:
                    raise AssertionError(f"{error.code}: {said!r} to {body}") from error
                time.sleep(0.2)


def metric(url: str, name: str) -> float:
    """The sum of a metric's rows, labels or not; 0 when it never happened."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as page:  # noqa: S310
        rows = [row for row in page.read().decode().splitlines() if not row.startswith("#")]
    exact = [row for row in rows if row.startswith(f"{name} ")]
    found = exact or [row for row in rows if row.startswith(name + "{")]
    return sum(float(row.rpartition(" ")[2]) for row in found)


def _completion(headers: Any, body: dict[str, Any]) -> Completion:
    usage, (choice,) = body["usage"], body["choices"]
    return Completion(
        choice["token_ids"],
        usage["prompt_tokens"],
        (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0,
        headers.get("x-emberkv-engine", ""),
        int(headers.get("x-emberkv-hit-tokens", 0)),
        body,
    )
