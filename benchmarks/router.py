"""CPU that a router costs: per request of 1 kB and 32 kB, and per chunk of a stream.

Engines answer at once, clients wait for nothing, all on this machine, one connection each. What is
compared is CPU time of the proxy's processes, which a loaded machine distorts less than seconds;
requests a second and latencies are printed too, and say most about the machine.

The prompts are of 64 conversations, and each has come before: our router remembers their tokens, so
that making them (the engine's /tokenize, or a local tokenizer) is left out, as the others make
none. Fresh prompts, of token ids with a new end each, show what hashing and the rest then cost.
"""

from __future__ import annotations

import base64
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks._figure import Figure, Line, NotAvailable, Options, main
from benchmarks._router_backend import MODEL, rendered
from benchmarks._router_proxies import Engines, Proxy, every_proxy
from benchmarks._workers import Worker, WorkerFailedError

ENGINES = 8
CONVERSATIONS = 64
CONNECTIONS = 32
STREAMS = 64
CHUNKS = 200
PACE_SECONDS = 0.02
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
REFERENCE = "sglang-router"
TARGET = 1 / 3


@dataclass(frozen=True, slots=True)
class Scene:
    """One kind of load. `per_request`: what is counted in each (chunks), or 1."""

    name: str
    path: str
    bodies: Sequence[bytes]
    connections: int
    requests: int
    per_request: int = 1
    pause_seconds: float = 0.0
    is_judged: bool = True


@dataclass(frozen=True, slots=True)
class Seen:
    """One run of a scene through one proxy."""

    cpu_microseconds: float
    per_second: float
    p50_seconds: float
    p99_seconds: float


def conversation(number: int, byte_count: int, *, is_stream: bool) -> bytes:
    """A chat of this size: a system prompt that all share, then its own turns."""
    shared = "You answer shortly, and say so when you do not know. " * (byte_count // 200)
    turns: list[dict[str, str]] = [{"role": "system", "content": shared}]
    body = {"model": MODEL, "messages": turns, "stream": is_stream, "max_tokens": 200}
    room = byte_count - len(json.dumps(body)) - 60
    own = f"Conversation {number}: what did the report of day {number * 7} say? "
    turns.append({"role": "user", "content": (own * (room // len(own) + 1))[:room]})
    return json.dumps(body).encode()


def fresh(number: int, tokens: int) -> bytes:
    """Token ids that share all but their end with others of the same conversation."""
    first = number % CONVERSATIONS * 1000
    ids = [*range(first, first + tokens - 2), number, number + 1]
    return json.dumps({"model": MODEL, "prompt": ids, "max_tokens": 200}).encode()


def scenes(options: Options) -> list[Scene]:
    count = 1 if options.quick else 4
    few = range(CONVERSATIONS)
    small, large = ([conversation(n, size, is_stream=False) for n in few] for size in (1024, 32768))
    streams = [conversation(n, 1024, is_stream=True) for n in few]
    return [
        Scene("request_1kB", CHAT, small, CONNECTIONS, 2000 * count),
        Scene("request_32kB", CHAT, large, CONNECTIONS, 1000 * count),
        Scene("chunk", CHAT, streams, STREAMS, STREAMS * count, CHUNKS),
        Scene(
            "chunk_paced",
            CHAT,
            streams,
            STREAMS,
            STREAMS,
            CHUNKS,
            PACE_SECONDS,
            is_judged=False,
        ),
        Scene(
            "request_fresh_2048_ids",
            COMPLETION,
            [fresh(number, 2048) for number in range(1000)],
            CONNECTIONS,
            1000,
            is_judged=False,
        ),
    ]


def seen(proxy: Proxy, load: Worker, scene: Scene) -> Seen:
    before = proxy.cpu_seconds()
    answer = load.ask(
        "run", port=proxy.port, connections=scene.connections, requests=scene.requests
    )
    spent = proxy.cpu_seconds() - before
    things = scene.requests * scene.per_request
    return Seen(spent / things * 1e6, things / answer["seconds"], answer["p50"], answer["p99"])


def measure(options: Options) -> Iterator[Line]:
    backend = [sys.executable, "-m", "benchmarks._router_backend"]
    client = [sys.executable, "-m", "benchmarks._router_load"]
    with Worker(backend) as engines, Worker(client) as load:
        ports = engines.ask("listen", count=ENGINES)
        endpoints = engines.ask("announce", count=ENGINES)
        with every_proxy(Engines(ports, endpoints), options.peers_dir) as (proxies, missing):
            for why in missing:
                yield NotAvailable(why.split()[0], why)
            for scene in scenes(options):
                yield from _scene(scene, proxies, engines, load, options)
    if options.peers_dir is None:
        print(f"without --peers nothing is judged: the target is {REFERENCE}'s", file=sys.stderr)


def _scene(
    scene: Scene, proxies: Sequence[Proxy], engines: Worker, load: Worker, options: Options
) -> Iterator[Line]:
    bodies = [base64.b64encode(body).decode() for body in scene.bodies]
    load.ask("prepare", path=scene.path, bodies=bodies, headers={})
    engines.ask("stream", chunks=CHUNKS, pause_seconds=scene.pause_seconds)
    _store(scene, engines)
    repeats = options.repeats(5, 2) if scene.is_judged else options.repeats(3, 1)
    runs: dict[str, list[Seen]] = {}
    for turn in range(repeats + 1):
        for proxy in proxies:
            if proxy.name in runs and not runs[proxy.name]:
                continue
            try:
                found = seen(proxy, load, scene)
            except WorkerFailedError as error:
                print(f"{proxy.name} at {scene.name}: {error}", file=sys.stderr)
                runs[proxy.name] = []
                continue
            if turn:  # the first one is for warmth
                runs.setdefault(proxy.name, []).append(found)
    yield from _figures(scene, runs)


def _store(scene: Scene, engines: Worker) -> None:
    """Conversation n is in the HBM of engine n modulo 8, with what all share."""
    asked: list[dict[str, Any]] = [json.loads(body) for body in scene.bodies[:CONVERSATIONS]]
    texts = [rendered(body["messages"]) for body in asked if "messages" in body]
    for engine in range(ENGINES):
        if texts:
            engines.ask("store", engine=engine, texts=texts[engine::ENGINES])


def _figures(scene: Scene, runs: dict[str, list[Seen]]) -> Iterator[Line]:
    medians = {
        name: Seen(
            *(
                statistics.median(getattr(item, field) for item in found)
                for field in ("cpu_microseconds", "per_second", "p50_seconds", "p99_seconds")
            )
        )
        for name, found in runs.items()
        if found
    }
    reference = REFERENCE if REFERENCE in medians else "aiohttp"
    beside = medians.get(reference)
    for name, item in medians.items():
        if beside is None:
            yield NotAvailable(f"{scene.name}_{name}", f"{reference} did not get through")
            continue
        is_judged = scene.is_judged and name == "emberkv" and reference == REFERENCE
        count = len(runs[name])
        yield Figure(
            f"cpu_per_{scene.name}_{name}",
            round(item.cpu_microseconds, 2),
            "us",
            reference,
            round(beside.cpu_microseconds, 2),
            count,
            at_most=TARGET if is_judged else None,
        )
        yield Figure(
            f"rate_{scene.name}_{name}",
            round(item.per_second, 1),
            "1/s",
            reference,
            round(beside.per_second, 1),
            count,
        )
        for field in ("p50", "p99"):
            yield Figure(
                f"{field}_{scene.name}_{name}",
                round(getattr(item, f"{field}_seconds") * 1e3, 3),
                "ms",
                reference,
                round(getattr(beside, f"{field}_seconds") * 1e3, 3),
                count,
            )


if __name__ == "__main__":
    main("router", measure)
