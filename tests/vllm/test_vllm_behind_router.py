"""Two vLLM servers on two nodes behind our router: requests follow their cache, also to a peer."""

from __future__ import annotations

import json
import random
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks._vllm import PAGE_TOKENS, Server, transfer_config
from tests.helpers.agreement import await_agreement
from tests.helpers.cluster import RouterProcess
from tests.helpers.daemon_process import MIB, DaemonProcess
from tests.helpers.ports import free_port

pytestmark = pytest.mark.timeout(900)
CONVERSATIONS = 6
FIRST_TOKENS = 300


def test_a_follow_up_goes_where_its_prefix_is_and_moves_with_its_cache(
    model: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        index_port = free_port()
        daemons = [
            stack.enter_context(
                DaemonProcess(
                    tmp_path / f"node-{n}",
                    node_id=f"node-{n}",
                    capacity_bytes=64 * MIB,
                    settings={
                        "daemon.grpc_port": address.rpartition(":")[2],
                        "daemon.index_address": f"127.0.0.1:{index_port}",
                        "daemon.peer_timeout_seconds": 20.0,
                    },
                )
            )
            for n, address in enumerate(addresses)
        ]
        router = RouterProcess(tmp_path, 0, addresses, {"index.port": index_port})
        stack.callback(router.clean)
        router.spawn()
        servers = [Server(tmp_path / f"server-{n}", model) for n in range(2)]
        for number, (server, daemon) in enumerate(zip(servers, daemons, strict=True)):
            transfer = transfer_config(
                daemon.socket_path,
                engine_url=server.url,
                timeout_seconds=20.0,
                load_seconds=60.0,
                peer_seconds=20.0,
            )
            transfer["engine_id"] = f"vllm-{number}"
            server.add(f"--kv-transfer-config={json.dumps(transfer)}")
            stack.enter_context(server)
        router.await_serving()

        def settle() -> None:
            for address in addresses:
                await_agreement(f"127.0.0.1:{index_port}", address, 60.0)

        url = router.endpoint["url"]
        rng = random.Random(12)
        talks = [[rng.randrange(250) for _ in range(FIRST_TOKENS)] for _ in range(CONVERSATIONS)]
        homes = []
        for talk in talks:
            answer = _complete(url, talk)
            homes.append(answer.engine)
            talk += answer.tokens
        assert len(set(homes)) == 2, "all went to one engine: no proof"
        settle()
        for turn in range(2):
            for talk, home in zip(talks, homes, strict=True):
                known = len(talk) // PAGE_TOKENS * PAGE_TOKENS
                talk += [rng.randrange(250) for _ in range(40)]
                answer = _complete(url, talk)
                assert answer.engine == home, f"turn {turn} left its prefix"
                assert answer.cached >= known - PAGE_TOKENS
                talk += answer.tokens
            settle()

        servers[0].kill()
        moved = [talk for talk, home in zip(talks, homes, strict=True) if home == "vllm-0"]
        assert moved
        for talk in moved:
            talk += [rng.randrange(250) for _ in range(40)]
            answer = _complete(url, talk)
            assert answer.engine == "vllm-1"
            assert answer.cached >= FIRST_TOKENS, "the dead engine's node has it, one pull away"


class _Answer:
    def __init__(self, engine: str, body: dict[str, Any]) -> None:
        self.engine = engine
        self.tokens: list[int] = body["choices"][0]["token_ids"]
        self.cached: int = (body["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0


def _complete(url: str, tokens: list[int]) -> _Answer:
    body = {
        "model": "tiny",
        "prompt": tokens,
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(  # noqa: S310
        url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
                return _Answer(answer.headers["x-emberkv-engine"], json.load(answer))
        except urllib.error.HTTPError as error:  # noqa: PERF203
            # Until the router has heard of the engines there is nobody to ask.
            if error.code != 503 or time.monotonic() > deadline:
                raise AssertionError(f"{error.code}: {error.read()[:500]!r}") from error
            time.sleep(0.2)
