"""Request traces as chains of block numbers: Mooncake's format, or conversations from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SHARED = Path(__file__).resolve().parents[2] / "shared" / "traces"
NAMES = ("conversation", "synthetic")


@dataclass(frozen=True, slots=True)
class Request:
    seconds: float
    chain: tuple[int, ...]
    """A number per block; equal numbers mean equal prefixes up to and with that block."""


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    requests: Sequence[Request]


def read_trace(path: Path) -> Trace:
    """A trace in Mooncake's format (FAST'25 release): `timestamp` in ms and `hash_ids`."""
    requests = []
    with path.open() as lines:
        for line in lines:
            row = json.loads(line)
            requests.append(Request(row["timestamp"] / 1000, tuple(row["hash_ids"])))
    name = next((name for name in NAMES if name in path.stem), path.stem)
    return Trace(name, requests)


def traces_beside_checkout() -> list[Trace]:
    """Mooncake's traces, where somebody has put them into ../shared/traces."""
    paths = [SHARED / f"mooncake_fast25_{name}_trace.jsonl" for name in NAMES]
    return [read_trace(path) for path in paths if path.exists()]


def conversations(count: int = 2500, seed: int = 7) -> Trace:
    """Multi-turn chats over a few system prompts; each turn's chain extends the one before."""
    rng = random.Random(seed)
    last = 0

    def fresh(blocks: int) -> tuple[int, ...]:
        nonlocal last
        last += blocks
        return tuple(range(last - blocks + 1, last + 1))

    systems = [fresh(rng.randint(2, 8)) for _ in range(8)]
    requests = []
    arrival = 0.0
    for _ in range(count):
        arrival += rng.expovariate(0.7)
        now, chain = arrival, systems[min(int(rng.expovariate(0.6)), len(systems) - 1)]
        while True:
            chain += fresh(1 + min(int(rng.lognormvariate(2.0, 1.0)), 120))
            requests.append(Request(now, chain))
            if rng.random() < 0.4:
                break
            now += rng.lognormvariate(4.0, 1.0)
    return Trace("generated", sorted(requests, key=lambda request: request.seconds))
