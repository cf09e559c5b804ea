"""Figures of paged tensors: scattered pages into the store and back, beside plain copies and peers.

A batch is 32 pages of 16 tokens over 32 layers, 2 MiB each, from a tensor a layer to other pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks._figure import Figure, Line, NotAvailable, Options, median_values
from benchmarks._workers import Worker, WorkerFailedError

LAYERS = 32
AT_LEAST_BESIDE_PEERS = 1.5
PLAIN = "as many contiguous bytes copied twice by one thread, no pages, no store"


@dataclass(slots=True)
class PagedPeer:
    """A peer that takes pages, with the client that has them. One that fails is out."""

    name: str
    client: Worker
    out: str = ""

    def round_trip(self) -> float:
        """GB/s of a batch in and out again; NaN of one that is out."""
        if self.out:
            return math.nan
        try:
            return round_trip_rate(self.client)
        except WorkerFailedError as error:
            self.out = str(error)
            return math.nan


def seconds_of(answer: Mapping[str, Any]) -> float:
    return float(answer["ended"] - answer["begun"])


def round_trip_rate(client: Worker) -> float:
    """GB/s of one batch in and out again."""
    stored, loaded = client.ask("paged_store"), client.ask("paged_load")
    moved = stored["byte_count"] + loaded["byte_count"]
    return float(moved / (seconds_of(stored) + seconds_of(loaded)) / 1e9)


def paged(
    client: Worker,
    threads: int,
    peers: Sequence[PagedPeer],
    options: Options,
    layers: int = LAYERS,
) -> Iterator[Line]:
    repeats = options.repeats(15, 7)
    client.ask("paged_prepare", threads=threads, layers=layers)

    def plain() -> float:
        answer = client.ask("paged_plain")
        return float(answer["byte_count"] / seconds_of(answer) / 1e9)

    round_trip_rate(client), plain()
    runs = [lambda: round_trip_rate(client), plain, *(peer.round_trip for peer in peers)]
    own, bare, *others = median_values(runs, repeats)
    client.ask("paged_close")
    name = f"paged_round_trip_{layers}_layers_{threads}_threads"
    yield Figure(name, own, "GB/s in and out, checksums brought along", PLAIN, bare, repeats)
    for peer, rate in zip(peers, others, strict=True):
        beside = f"{name}_beside_{peer.name}"
        if peer.out:
            yield NotAvailable(beside, peer.out)
            continue
        yield Figure(
            beside,
            own,
            "GB/s in and out",
            peer.name,
            rate,
            repeats,
            at_least=AT_LEAST_BESIDE_PEERS,
        )
