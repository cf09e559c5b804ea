"""Whatever bytes come, the router answers them or hangs up: no error of its own, nothing left over.

Requests are drawn at random and then damaged; the seed is in the test's name.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
from typing import Any

import pytest

from tests.helpers.fake_engine import FakeEngine, answer
from tests.helpers.router_client import RunningRouter, connected, request, running_router

ROUNDS = 12
AT_ONCE = 16
SILENCE_SECONDS = 0.3
PATHS = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/route/explain",
    "/admin/policy",
    "/workers",
    "/health",
    "/ready",
    "/metrics",
    "/nothing",
    "/%00",
    "*",
]
METHODS = ["GET", "POST", "POST", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH"]
HEADERS = [
    "Host: r",
    "Connection: close",
    "Connection: keep-alive, x-hop",
    "X-Hop: 1",
    "Expect: 100-continue",
    "Transfer-Encoding: chunked",
    "Upgrade: h2c",
    "Content-Type: text/plain",
    "X-Request-Id: " + "a" * 300,
    "X-Emberkv-Priority: low",
    "X-Emberkv-Priority: soon",
    "X-Session-Id: \xff\xfe",
    "Authorization: Bearer x",
    "Cookie: " + "c" * 2000,
    "Accept-Encoding: gzip",
]
ODD: list[Any] = [[], {}, [1, 2, 3], [[1]], ["a", "b"], "\ud800", "x" * 5000, 2**70]
VALUES: list[Any] = [None, True, 0, -1, 1.5, "", "m", *ODD]
FIELDS = ["model", "prompt", "messages", "stream", "priority", "cache_salt", "tools", "user", "n"]


def drawn(rng: random.Random) -> bytes:
    """A request, more or less."""
    body = json.dumps(
        {rng.choice(FIELDS): rng.choice(VALUES) for _ in range(rng.randrange(6))}
    ).encode()
    if rng.random() < 0.2:
        body = rng.choice([b"", b"[", b"{}", b"null", b'{"a":NaN}', b"\xff\xfe", body[:-1]])
    if rng.random() < 0.5:
        body = body[:-1] + b',"model":"m"}' if len(body) > 2 else body
    head = [f"{rng.choice(METHODS)} {rng.choice(PATHS)} HTTP/1.{rng.choice('1110')}"]
    head += rng.sample(HEADERS, rng.randrange(4))
    if rng.random() < 0.9:
        head.append(f"Content-Length: {len(body) + rng.choice([0, 0, 0, 0, 0, -1, 1])}")
    raw = "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + body
    if rng.random() < 0.3:
        at = rng.randrange(len(raw))
        kind = rng.randrange(3)
        if kind == 0:
            raw = raw[:at]
        elif kind == 1:
            raw = raw[:at] + rng.randbytes(rng.randrange(1, 8)) + raw[at:]
        else:
            raw = raw[:at] + raw[at + rng.randrange(1, 20) :]
    return raw


async def statuses(router: RunningRouter, rng: random.Random) -> list[int]:
    """Send some requests on one connection; what came back until it closed or fell silent."""
    came = b""
    async with connected(router.port) as client:
        for _ in range(rng.randrange(1, 4)):
            client.send(drawn(rng))
            if rng.random() < 0.5:
                await asyncio.sleep(0)
        with contextlib.suppress(asyncio.TimeoutError, ConnectionError):
            while data := await asyncio.wait_for(client.reader.read(65536), SILENCE_SECONDS):
                came += data
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", came)]


@pytest.mark.parametrize("seed", range(3))
async def test_nothing_that_comes_makes_an_error_of_the_routers_own(seed: int) -> None:
    rng = random.Random(seed)
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        engine.tokenize = answer({"tokens": [1, 2, 3]})
        found: list[int] = []
        for _ in range(ROUNDS):
            own = [random.Random(rng.random()) for _ in range(AT_ONCE)]
            for each in await asyncio.gather(*(statuses(router, one) for one in own)):
                found += each
        assert len(found) > 50
        assert not [status for status in found if status >= 500 and status != 501], found
        await router.settled()
        got = await request(router.port, "/v1/completions", {"model": "m", "prompt": [1, 2]})
        assert got.status == 200
        assert (await request(router.port, "/metrics")).status == 200
