"""A node's daemon is upgraded while its engine serves: no request fails, and its cache is there."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.helpers.pod import Pod
from tests.helpers.site import Site, metrics_of

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(400)]

PROMPTS = [f"{number} " + "the ember keeps the warmth of the fire " * 12 for number in range(8)]
MODEL = "ember-demo"
ENGINE = {
    "model": MODEL,
    "socket_path": "/run/emberkv/daemon.sock",
    "prefix_cache": "false",  # what is hit comes from the daemon
    "layers": 2,
    "d_model": 64,
    "heads": 4,
    "head_dim": 16,
    "ffn": 128,
}


@dataclass
class Load:
    """Asks for one prompt after the other until it is told to stop."""

    url: str
    answers: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def __enter__(self) -> Load:
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        number = 0
        while not self._stopped.is_set():
            try:
                answer = complete(self.url, PROMPTS[number % len(PROMPTS)])
            except (OSError, ValueError) as error:
                self.failures.append(repr(error))
            else:
                self.answers.append(answer["choices"][0]["text"])
            number += 1


def complete(url: str, prompt: str) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    headers = {"content-type": "application/json"}
    request = Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)  # noqa: S310
    with urlopen(request, timeout=30) as answer:  # noqa: S310
        loaded: dict[str, Any] = json.load(answer)
        return loaded


def cached_tokens(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def start_engine(site: Site) -> Pod:
    """The reference engine in the place of vLLM: same user, groups, mounts and port."""
    pod = site.pod("Deployment", "emberkv-vllm")
    port = pod.container("vllm")["ports"][0]["containerPort"]
    settings = [f"engine.{key}={value}" for key, value in {**ENGINE, "port": port}.items()]
    words = [word for setting in settings for word in ("--set", setting)]
    engine = site.start(pod, "vllm", "python", "-m", "client_sdk.engine.torch_engine", *words)
    pod.wait_for("vllm", "startupProbe", engine)
    return pod


def test_no_request_fails_while_the_daemon_is_upgraded_and_all_is_hit_afterwards(
    site: Site,
) -> None:
    store_pod, store = site.start_store()
    router_pod, router = site.start_router()
    start_engine(site)
    router_pod.wait_for("router", "readinessProbe", router)  # the daemon has announced the engine
    port = router_pod.container("router")["ports"][0]["containerPort"]
    url = f"http://127.0.0.1:{port}"
    first = [complete(url, prompt) for prompt in PROMPTS]
    assert [cached_tokens(answer) for answer in first] == [0] * len(PROMPTS)
    expected = {answer["choices"][0]["text"] for answer in first}
    deadline = time.monotonic() + 60
    while True:
        whole = [cached_tokens(complete(url, prompt)) for prompt in PROMPTS]
        if min(whole) > 0 and whole == [cached_tokens(complete(url, p)) for p in PROMPTS]:
            break
        assert time.monotonic() < deadline, "what was computed is not stored"

    before = metrics_of(store_pod, "store", "metrics")
    with Load(url) as load, Load(url) as other:
        store.stop(store_pod.spec["terminationGracePeriodSeconds"])
        away = len(load.answers)
        deadline = time.monotonic() + 60
        while len(load.answers) < away + 3:  # the engine computes meanwhile
            assert time.monotonic() < deadline, load.failures
            time.sleep(0.05)
        store_pod, store = site.start_store()
        after = metrics_of(store_pod, "store", "metrics")
        back = len(load.answers)
        while len(load.answers) < back + len(PROMPTS):
            assert time.monotonic() < deadline + 60, load.failures
            time.sleep(0.05)
    assert load.failures == other.failures == []
    assert set(load.answers) | set(other.answers) <= expected
    dram, ssd = (f'emberkv_store_blocks{{tier="{tier}"}}' for tier in ("dram", "ssd"))
    assert before[dram] > 0
    assert after[dram] >= 0.99 * before[dram]
    assert after[ssd] >= before[ssd] > 0

    deadline = time.monotonic() + 60
    while [cached_tokens(complete(url, prompt)) for prompt in PROMPTS] != whole:
        assert time.monotonic() < deadline, "what was stored before the upgrade is not hit"
    assert metrics_of(store_pod, "store", "metrics")["emberkv_store_corrupt_blocks_total"] == 0
