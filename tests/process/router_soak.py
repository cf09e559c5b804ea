"""A router under mixed load while its engines are restarted and its clients hang up.

`make router-soak MINUTES=30`. One engine is always there, so every request must be answered. Only a
stream whose engine died after its first byte may end with an error event, and is counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from client_sdk.aio import timeout
from tests.helpers.fake_engine import FakeEngine, FakeRequest, answer, stream
from tests.helpers.router_client import RawClient, connected, request
from tests.helpers.router_process import RouterProcess, router_process

ENGINES = 3
CLIENTS = 12
EVENT = b'data: {"choices":[{"text":" ember"}]}\n\n'
DONE = b"data: [DONE]\n\n"
SETTLE_SECONDS = 30.0
SETTINGS = (
    "router.health_interval_seconds=0.1",
    "router.breaker_open_seconds=0.2",
    "router.sync_seconds=0.05",
    "router.retry_share=1",
    "router.log_level=error",
)


@dataclass
class Report:
    """What came of all requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    restarts: int = 0
    left_over: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        failed = [name for name in self.outcomes if name not in ("answered", "left", "cut")]
        return not failed and not self.left_over


def body(rng: random.Random, *, is_stream: bool) -> dict[str, Any]:
    group = rng.randrange(8)
    prompt = [*range(1000 * group, 1000 * group + rng.randrange(20, 400)), rng.randrange(10**6)]
    return {"model": "m", "prompt": prompt, "stream": is_stream}


async def _complete(asked: FakeRequest, writer: asyncio.StreamWriter) -> bool:
    """Some milliseconds of prefill, then an answer or a stream."""
    await asyncio.sleep(0.005)
    if asked.json.get("stream"):
        return await stream([EVENT] * 8 + [DONE], 0.003)(asked, writer)
    return await answer({"choices": [{"text": "ember"}]})(asked, writer)


async def leave_early(port: int, rng: random.Random) -> None:
    """Send a request, or a part of one, and hang up at a random moment."""
    raw = json.dumps(body(rng, is_stream=rng.random() < 0.6)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: r\r\ncontent-length: {len(raw)}\r\n\r\n"
    data = head.encode() + raw
    async with connected(port) as client:
        whole = rng.random() < 0.9
        client.send(data if whole else data[: rng.randrange(len(data))])
        if rng.random() < 0.3:
            with contextlib.suppress(ConnectionError, OSError):
                client.writer.write_eof()
        await asyncio.sleep(rng.random() * 0.04)


async def ask(port: int, rng: random.Random) -> str:
    """One request to its end; how that was."""
    is_stream = rng.random() < 0.5
    async with connected(port) as client:
        client.post("/v1/completions", body(rng, is_stream=is_stream))
        try:
            got = await RawClient.read(client)
        except asyncio.IncompleteReadError:
            return "connection cut"
        if got.status != 200:
            return f"status {got.status}: {got.body[:200].decode('utf-8', 'replace')}"
        if not is_stream or got.body.endswith(DONE):
            return "answered"
        return "cut" if EVENT in got.body or b"upstream_error" in got.body else "half a stream"


async def restart(engines: Sequence[FakeEngine], rng: random.Random, report: Report) -> None:
    """One engine after the other goes away and comes back at its port."""
    while True:
        engine = rng.choice(engines)
        await engine.stop()
        await asyncio.sleep(rng.random() * 0.2)
        await engine.start()
        engine.requests.clear()
        report.restarts += 1
        await asyncio.sleep(0.5)  # the router sees it before the next one goes


async def left_over(router: RouterProcess, engines: Sequence[FakeEngine]) -> list[str]:
    """What is still in flight when nobody asks any more; waits for it to end."""
    found: list[str] = []
    deadline = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < deadline:
        workers = (await request(router.port, "/workers")).json["workers"]
        found = [
            f"{worker['url']}: {worker['load']}"
            for worker in workers
            if worker["load"]["active_requests"] or worker["load"]["queued_prefill_tokens"]
        ]
        found += [f"{e.url} works on {e.active} requests" for e in engines if e.active]
        if not found:
            break
        await asyncio.sleep(0.1)
    return found


async def soak(
    seconds: float, seed: int, *, least_departures: int = 0, has_restarts: bool = True
) -> Report:
    """Run for so long, and until so many clients have hung up."""
    report, rng = Report(), random.Random(seed)
    engines = [FakeEngine() for _ in range(ENGINES)]
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="emberkv-soak-"))
        for engine in engines:
            engine.completion = _complete
            await stack.enter_async_context(engine.serving())
        urls = json.dumps([{"url": engine.url} for engine in engines])
        router = await stack.enter_async_context(
            router_process(Path(directory), f"router.engines={urls}", *SETTINGS)
        )
        await _until_all_healthy(router)
        deadline = time.monotonic() + seconds

        async def client(number: int) -> None:
            own = random.Random(seed * 1000 + number)
            while time.monotonic() < deadline or report.outcomes["left"] < least_departures:
                if own.random() < 0.4 or time.monotonic() >= deadline:
                    await leave_early(router.port, own)
                    report.outcomes["left"] += 1
                else:
                    report.outcomes[await ask(router.port, own)] += 1

        restarting = asyncio.ensure_future(
            restart(engines, rng, report) if has_restarts else asyncio.sleep(0)
        )
        try:
            await asyncio.gather(*(client(number) for number in range(CLIENTS)))
        finally:
            restarting.cancel()
            await asyncio.gather(restarting, return_exceptions=True)
            for engine in engines:
                if engine.is_down:
                    await engine.start()
        report.left_over = await left_over(router, engines)
        assert router.process.returncode is None, "the router ended"
    return report


async def _until_all_healthy(router: RouterProcess) -> None:
    async with timeout(SETTLE_SECONDS):
        while True:
            workers = (await request(router.port, "/workers")).json["workers"]
            if all(worker["state"] == "healthy" for worker in workers):
                return
            await asyncio.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.process.router_soak")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    report = asyncio.run(soak(60 * arguments.minutes, arguments.seed))
    print(f"seed {arguments.seed}: {dict(report.outcomes)}, {report.restarts} restarts")
    for line in report.left_over:
        print(f"left over: {line}", file=sys.stderr)
    raise SystemExit(not report.is_good)


if __name__ == "__main__":
    main()
