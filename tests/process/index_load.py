"""Load for the index campaign: engines' writes and reads on nodes, requests at routers."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from client_sdk import SyncClient
from emberkv_proto.errors import EmberError
from emberkv_proto.types import BlockHash, EngineInfo
from tests.helpers.chains import BLOCK_TOKENS, NAMESPACE, chain_of, read_chain, write_chain
from tests.helpers.cluster import NodeProcess, RouterProcess
from tests.helpers.fake_engine import FakeEngine

CHAINS = 24
"""Different chains a node's engine writes; more than its DRAM holds."""
CHAIN_BLOCKS = 6
REQUEST_SECONDS = 3.0
BREATH_SECONDS = 0.01
JOIN_SECONDS = 30.0


def chain_of_node(number: int, place: int) -> list[BlockHash]:
    return chain_of(1000 * place + number, CHAIN_BLOCKS)


def prompt_of(number: int, place: int) -> list[int]:
    """The tokens whose blocks are `chain_of_node`."""
    name = 1000 * place + number
    return [name & 0xFFFFFFFF, name >> 32, *range(2, CHAIN_BLOCKS * BLOCK_TOKENS)]


@contextmanager
def fake_engines(count: int) -> Iterator[list[FakeEngine]]:
    """Engines that answer at once, on a loop in a thread of their own."""
    engines = [FakeEngine() for _ in range(count)]
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="fake-engines")
    thread.start()

    async def each(what: str) -> None:
        for engine in engines:
            await getattr(engine, what)()

    try:
        asyncio.run_coroutine_threadsafe(each("start"), loop).result(JOIN_SECONDS)
        yield engines
    finally:
        asyncio.run_coroutine_threadsafe(each("stop"), loop).result(JOIN_SECONDS)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(JOIN_SECONDS)
        loop.close()


class NodeLoad:
    """Writes and reads chains on one node until it is closed; a daemon that is away is waited for.

    `hold` returns when nothing is under way and none begins until `go_on`.
    """

    def __init__(self, node: NodeProcess, place: int, engine_url: str, seed: int) -> None:
        self._node = node
        self._place = place
        self._engine = EngineInfo(f"engine-{place}", engine_url, "m", NAMESPACE.id, BLOCK_TOKENS)
        self._random = random.Random(seed)
        self._may_run = threading.Event()
        self._may_run.set()
        self._is_idle = threading.Event()
        self._is_over = False
        self.done = 0
        self.wrong: list[str] = []
        """Reads that brought other bytes than were written."""
        self._thread = threading.Thread(target=self._run, name=f"load-{node.name}")
        self._thread.start()

    def hold(self) -> None:
        self._may_run.clear()
        assert self._is_idle.wait(JOIN_SECONDS), f"{self._node.name}: a call does not end"

    def go_on(self) -> None:
        self._may_run.set()

    def close(self) -> None:
        self._is_over = True
        self._may_run.set()
        self._thread.join(JOIN_SECONDS)
        assert not self._thread.is_alive(), f"{self._node.name}: its load does not end"

    def _run(self) -> None:
        while not self._is_over:
            with contextlib.suppress(EmberError):
                self._use_one_connection()
            time.sleep(BREATH_SECONDS)

    def _use_one_connection(self) -> None:
        with SyncClient(
            self._node.socket_path, NAMESPACE, engine=self._engine, timeout_seconds=2.0
        ) as client:
            while not self._is_over:
                if not self._may_run.is_set():
                    self._is_idle.set()
                    self._may_run.wait()
                    self._is_idle.clear()
                    continue
                self._step(client)
                time.sleep(BREATH_SECONDS)

    def _step(self, client: SyncClient) -> None:
        chain = chain_of_node(self._random.randrange(CHAINS), self._place)
        if self._random.random() < 0.6:
            write_chain(client, chain)
        else:
            try:
                read_chain(client, chain, 2.0)
            except AssertionError as error:
                self.wrong.append(str(error))
        self.done += 1


@dataclass
class Served:
    """How the requests fared."""

    requests: int = 0
    elsewhere: int = 0
    """Served by the other router, because the first was down."""
    failed: list[str] = field(default_factory=list)


class RequestLoad:
    """Asks the routers in turn; a request that one cannot take while it is down goes to the next.

    `strike` a router before it is hurt and `heal` it when it serves again: only in between, and
    for requests that were under way then, may it fail.
    """

    def __init__(self, routers: Sequence[RouterProcess], places: int, seed: int) -> None:
        self._routers = routers
        self._urls = [router.endpoint["url"] for router in routers]
        self._strikes = [0] * len(routers)
        self._down: set[int] = set()
        self._places = places
        self._random = random.Random(seed)
        self._is_over = False
        self.served = Served()
        self._thread = threading.Thread(target=self._run, name="load-requests")
        self._thread.start()

    def strike(self, router: RouterProcess) -> None:
        number = self._routers.index(router)
        self._strikes[number] += 1
        self._down.add(number)

    def heal(self, router: RouterProcess) -> None:
        number = self._routers.index(router)
        self._urls[number] = router.endpoint["url"]
        self._down.discard(number)

    def close(self) -> None:
        self._is_over = True
        self._thread.join(JOIN_SECONDS)
        assert not self._thread.is_alive(), "a request does not end"

    def _run(self) -> None:
        turn = 0
        while not self._is_over:
            turn += 1
            prompt = prompt_of(self._random.randrange(CHAINS), self._random.randrange(self._places))
            self._ask([(turn + n) % len(self._routers) for n in range(len(self._routers))], prompt)
            time.sleep(BREATH_SECONDS)

    def _ask(self, order: list[int], prompt: list[int]) -> None:
        self.served.requests += 1
        for tried, number in enumerate(order):
            strikes, was_down = self._strikes[number], number in self._down
            try:
                complete(self._urls[number], prompt)
            except (OSError, http.client.HTTPException) as error:
                if not was_down and self._strikes[number] == strikes:
                    self.served.failed.append(f"{self._routers[number].name} is up: {error!r}")
                    return
            else:
                self.served.elsewhere += tried > 0
                return
        self.served.failed.append("no router took a request")


def complete(url: str, prompt: list[int]) -> None:
    """One completion. Raises OSError or HTTPException unless it was answered with 200."""
    parts = urlsplit(url)
    link = http.client.HTTPConnection(parts.netloc, timeout=REQUEST_SECONDS)
    try:
        body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 1})
        link.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        reply = link.getresponse()
        text = reply.read()
        if reply.status != 200:
            raise http.client.HTTPException(f"{reply.status} {text[:200]!r}")
    finally:
        link.close()
