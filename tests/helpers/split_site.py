"""Prefill and decode on different nodes, as real processes behind a router.

    with SplitSite(tmp_path) as site:
        answer = site.complete(prompt, 8)
        site.prefill.kill()

node-a has the prefill engine, node-b two decode engines without a prefix cache of their own. What
was started is ended by pid.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.helpers.cluster import Cluster, NodeProcess, RouterProcess, wait_until
from tests.helpers.server_process import ServerProcess
from tests.helpers.torch_engine_process import TorchEngineProcess

MODEL: dict[str, Any] = {"num_blocks": 1200, "max_model_len": 4096}
"""On top of the tiny engine's settings: prompts of some thousand tokens."""
ANSWER_SECONDS = 50.0


@dataclass(frozen=True)
class Completion:
    """What the client got."""

    status: int
    token_ids: tuple[int, ...]
    usage: dict[str, Any]
    engine: str
    text: str


@dataclass
class Asked:
    """A request under way in a thread."""

    thread: threading.Thread
    answers: list[Completion] = field(default_factory=list)

    def answer(self) -> Completion:
        self.thread.join(ANSWER_SECONDS + 5.0)
        assert self.answers, "no answer in time"
        return self.answers[0]


class SplitSite:
    """A context manager. `prefill_step_tokens`: how much the prefill engine computes at a time."""

    def __init__(self, directory: Path, *, prefill_step_tokens: int, decoders: int = 2) -> None:
        self.cluster = Cluster(
            directory,
            nodes=2,
            routers=1,
            dram_blocks=4000,
            ssd_blocks=6000,
            router_settings={
                "router.remote_prefill_tokens": 64,
                "router.remote_prefill_factor": 1e6,
                # Longer than a fresh engine's first step takes on a busy machine.
                "router.handover_patience_seconds": 8.0,
                "router.health_interval_seconds": 0.2,
                "router.sync_seconds": 0.1,
            },
        )
        a, b = self.cluster.nodes
        self.prefill = self._engine(directory, a, "prefill", max_batch_tokens=prefill_step_tokens)
        self.decoders = [
            self._engine(directory, b, f"decode-{number}", role="decode", prefix_cache=False)
            for number in range(decoders)
        ]
        self._stack = ExitStack()

    @staticmethod
    def _engine(
        directory: Path, node: NodeProcess, name: str, role: str = "prefill", **more: Any
    ) -> TorchEngineProcess:
        settings = {"role": role, "socket_path": node.socket_path, **MODEL, **more}
        return TorchEngineProcess(directory, name, settings)

    @property
    def router(self) -> RouterProcess:
        return self.cluster.routers[0]

    @property
    def node_p(self) -> NodeProcess:
        return self.cluster.nodes[0]

    @property
    def node_d(self) -> NodeProcess:
        return self.cluster.nodes[1]

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Completion:
        """Ask the router; an error is an answer too."""
        body = {"prompt": list(prompt), "max_tokens": max_tokens, "return_token_ids": True}
        url = f"{self.router.endpoint['url']}/v1/completions"
        request = urllib.request.Request(url, json.dumps(body).encode())  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:  # noqa: S310
                text = response.read().decode()
                engine = response.headers.get("x-emberkv-engine", "")
        except urllib.error.HTTPError as error:
            with error:
                return Completion(error.code, (), {}, "", error.read().decode())
        answer = json.loads(text)
        ids = tuple(answer["choices"][0]["token_ids"])
        return Completion(200, ids, answer["usage"], engine, text)

    def ask(self, prompt: Sequence[int], max_tokens: int) -> Asked:
        """As `complete`, in a thread."""
        asked = Asked(threading.Thread(target=lambda: None))

        def work() -> None:
            asked.answers.append(self.complete(prompt, max_tokens))

        asked.thread = threading.Thread(target=work, name="ask")
        asked.thread.start()
        return asked

    def metric(self, name: str, labels: str = "") -> float:
        """Of the router, without its prefix; 0 when it never happened."""
        url = f"{self.router.endpoint['url']}/metrics"
        with urllib.request.urlopen(url, timeout=90) as page:  # noqa: S310
            for line in page.read().decode().splitlines():
                if line.startswith(f"emberkv_router_{name}{labels} "):
                    return float(line.rpartition(" ")[2])
        return 0.0

    def await_ready(self) -> None:
        """Wait until the router knows every engine that runs with its role and its daemon."""
        running = [e for e in (self.prefill, *self.decoders) if e.is_running]

        def holds() -> bool:
            url = f"{self.router.endpoint['url']}/workers"
            with urllib.request.urlopen(url, timeout=90) as page:  # noqa: S310
                workers = json.loads(page.read())["workers"]
            healthy = {w["engine"] for w in workers if w["state"] == "healthy" and w["node_id"]}
            return healthy >= {engine.engine_id for engine in running}

        wait_until(holds, "the router knows all engines")

    def start_again(self, server: ServerProcess) -> None:
        """Start what was killed, and wait until everybody knows of it."""
        server.start()
        for node in self.cluster.nodes:
            self.cluster.await_index_state(node, "ok")
        self.await_ready()
        # What an engine computes before it is back at its daemon is saved nowhere.
        for node, engines in ((self.node_p, [self.prefill]), (self.node_d, self.decoders)):
            running = sum(engine.is_running for engine in engines)
            wait_until(
                lambda node=node, running=running: node.gauge("sessions") >= running,  # type: ignore[misc]
                f"the engines of {node.name} are back at their daemon",
            )

    def __enter__(self) -> SplitSite:
        try:
            self._stack.enter_context(self.cluster)
            for engine in (self.prefill, *self.decoders):
                engine.start()  # one after the other: importing torch takes a core for seconds
            self.await_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for engine in (self.prefill, *self.decoders):
            engine.clean()
        self._stack.__exit__(kind, error, trace)
