"""Figures of contiguous blocks: put and get beside plain memcpy and beside peers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks._figure import (
    MIB,
    Figure,
    Line,
    NotAvailable,
    Options,
    median_values,
    size_name,
)
from benchmarks._store_client import BATCH, ROUND_BYTES
from benchmarks._workers import Worker, WorkerFailedError, at_once, gigabytes_per_second

SIZES = (64 * 1024, 256 * 1024, MIB, 4 * MIB)
JUDGED_FROM = 256 * 1024
SUMMED_BYTES = MIB
AT_LEAST = 0.95
KEPT_CHAINS = 2
"""Chains that are got in turn. With what is staged they must fit in the pool."""
UNITS = {
    "put": f"GB/s, one put of {ROUND_BYTES // MIB} MiB in one chain, checksums brought along",
    "get": f"GB/s, one get of {ROUND_BYTES // MIB} MiB",
}
MEMCPY = "the same copies in plain memory like the pool's, in as many processes at once"


@dataclass(slots=True)
class Contender:
    """A store, and the processes that are its clients. A peer that fails is out, and says why."""

    name: str
    clients: Sequence[Worker]
    is_peer: bool = False
    out: str = ""

    def order(self, verb: str, **arguments: object) -> list[Any]:
        """What all clients answered; nothing of a peer that is out."""
        if self.out:
            return []
        try:
            return at_once(self.clients, verb, **arguments)
        except WorkerFailedError as error:
            if not self.is_peer:
                raise
            self.out = f"{verb}: {error}"
            return []

    def rate(self, verb: str, batches: int) -> float:
        """GB/s of all clients together; NaN of a peer that is out."""
        answers = self.order(verb, batches=batches)
        return gigabytes_per_second(answers) if answers else math.nan


@dataclass(frozen=True, slots=True)
class Shape:
    """What one client does with blocks of a size."""

    block_bytes: int

    @property
    def batches(self) -> int:
        """Batches of one round."""
        return max(1, ROUND_BYTES // (BATCH * self.block_bytes))


def copies(
    ours: Contender,
    peers: Sequence[Contender],
    region_bytes: int,
    options: Options,
    sizes: Sequence[int] = SIZES,
) -> Iterator[Line]:
    """Every size. `region_bytes`: plain memory that each client compares with."""
    repeats = options.repeats(11, 5)
    for block_bytes in sizes:
        shape = Shape(block_bytes)
        for contender in (ours, *peers):
            contender.order(
                "prepare",
                block_bytes=block_bytes,
                kept_chains=KEPT_CHAINS,
                region_bytes=region_bytes if contender is ours else 0,
            )
            contender.rate("put", shape.batches)
        yield from _operation("put", "copy_in", ours, peers, shape, repeats)
        if block_bytes == SUMMED_BYTES:
            yield from _with_checksums(ours, shape, max(3, repeats // 2))
        for contender in (ours, *peers):
            contender.order("keep")
            contender.rate("get", shape.batches)
            contender.order("check")
        yield from _operation("get", "copy_out", ours, peers, shape, repeats)
        for contender in (ours, *peers):
            contender.order("check")
            contender.order("close")


def _operation(
    verb: str,
    bare_verb: str,
    ours: Contender,
    peers: Sequence[Contender],
    shape: Shape,
    repeats: int,
) -> Iterator[Line]:
    def run(contender: Contender, said: str) -> Callable[[], float]:
        return lambda: contender.rate(said, shape.batches)

    runs = [run(ours, verb), run(ours, bare_verb), *(run(peer, verb) for peer in peers)]
    own, bare, *others = median_values(runs, repeats)
    name = _name(verb, ours, shape)
    is_judged = shape.block_bytes >= JUDGED_FROM
    yield Figure(
        name,
        own,
        UNITS[verb],
        MEMCPY,
        bare,
        repeats,
        at_least=AT_LEAST if is_judged else None,
    )
    for peer, rate in zip(peers, others, strict=True):
        beside = f"{name}_beside_{peer.name}"
        if peer.out:
            yield NotAvailable(beside, peer.out)
        else:
            yield Figure(
                beside,
                own,
                f"GB/s; the peer: {BATCH} blocks a call",
                peer.name,
                rate,
                repeats,
                at_least=1.0,
            )


def _with_checksums(ours: Contender, shape: Shape, repeats: int) -> Iterator[Figure]:
    """What a put costs that leaves the checksums to the daemon or the SDK: told, not judged."""
    verbs = ("put_unsummed", "put_and_sum", "copy_in")
    *rates, bare = median_values(
        [lambda verb=verb: ours.rate(verb, shape.batches) for verb in verbs],  # type: ignore[misc]
        repeats,
    )
    for verb, rate, who in zip(verbs, rates, ("the daemon", "the SDK"), strict=False):
        unit = f"GB/s, as put, checksums computed by {who}"
        yield Figure(_name(verb, ours, shape), rate, unit, MEMCPY, bare, repeats)


def _name(verb: str, contender: Contender, shape: Shape) -> str:
    return f"{verb}_{BATCH}x{size_name(shape.block_bytes)}_{len(contender.clients)}_clients"
