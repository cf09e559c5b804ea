"""Round trips on the local socket: time beside a bare echo, and the CPU time a block costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks._daemon import Serving
from benchmarks._echo_server import Echo, echo_server
from benchmarks._figure import Figure, Options
from client_sdk import SyncClient
from client_sdk.sync_borrowed import Lease, StagedWrite
from emberkv_proto.layout import Namespace
from emberkv_proto.types import AcquirePolicy, BlockHash

FRAME_BYTES = 24
"""About what a request has beside its blocks' hashes."""
WARM_UP = 20
ECHO = "bare AF_UNIX echo of the request's bytes, uvloop in another process"
Chains = Callable[[int], list[BlockHash]]


@dataclass(frozen=True, slots=True)
class Target:
    """For acquires and commits of so many blocks."""

    blocks: int
    p50_us: float
    cpu_us_per_block: float | None
    """Of client and daemon together, the call that goes with it included; None: told only."""


TARGETS = (Target(1, 60.0, None), Target(128, 300.0, 1.5))
JUDGED = ("acquire", "commit")


@dataclass(slots=True)
class _Taken:
    """What each call of one kind took."""

    seconds: list[float] = field(default_factory=list)
    client_cpu_seconds: float = 0.0
    daemon_cpu_seconds: float = 0.0

    @property
    def p50_us(self) -> float:
        return statistics.median(self.seconds) * 1e6


def round_trips(
    serving: Serving, namespace: Namespace, fresh_chain: Chains, options: Options
) -> Iterator[Figure]:
    """Acquire and release, stage and commit, over 1 and 128 blocks."""
    repeats = options.repeats(3000, 400)
    with (
        SyncClient(serving.socket_path, namespace, timeout_seconds=10.0) as client,
        echo_server() as echo,
    ):
        for target in TARGETS:
            blocks = target.blocks
            chains = [fresh_chain(blocks) for _ in range(repeats + WARM_UP)]
            for calls in (
                _reading(client, fresh_chain(blocks)),
                _writing(client, chains, [1] * blocks),
            ):
                taken = _take_turns(serving, calls, echo, FRAME_BYTES + 32 * blocks, repeats)
                yield from _figures(taken, target, repeats)


Calls = dict[str, Callable[[], None]]


def _reading(client: SyncClient, chain: Sequence[BlockHash]) -> Calls:
    with client.stage(chain) as write:
        write.commit()
    held: list[Lease] = []

    def acquire() -> None:
        held.append(client.acquire(chain, policy=AcquirePolicy.BEST_EFFORT))

    return {"acquire": acquire, "release": lambda: held.pop().release()}


def _writing(client: SyncClient, chains: list[list[BlockHash]], sums: Sequence[int]) -> Calls:
    held: list[StagedWrite] = []

    def stage() -> None:
        held.append(client.stage(chains.pop()))

    def commit() -> None:
        held.pop().commit(checksums=sums)

    return {"stage": stage, "commit": commit}


def _take_turns(
    serving: Serving, calls: Calls, echo: Echo, echo_bytes: int, repeats: int
) -> dict[str, _Taken]:
    request = bytes(echo_bytes)
    timed: Calls = {**calls, "echo": lambda: echo(request)}
    for _ in range(WARM_UP):
        for call in timed.values():
            call()
    taken = {name: _Taken() for name in timed}
    for _ in range(repeats):
        for name, call in timed.items():
            note = taken[name]
            daemon_cpu, own_cpu = serving.cpu_seconds(), time.thread_time()
            start = time.perf_counter()
            call()
            note.seconds.append(time.perf_counter() - start)
            note.client_cpu_seconds += time.thread_time() - own_cpu
            note.daemon_cpu_seconds += serving.cpu_seconds() - daemon_cpu
    return taken


def _figures(taken: dict[str, _Taken], target: Target, repeats: int) -> Iterator[Figure]:
    bare = taken.pop("echo")
    per_block = 1e6 / repeats / target.blocks
    for name, note in taken.items():
        yield Figure(
            f"{name}_{target.blocks}_p50",
            note.p50_us,
            "us",
            ECHO,
            bare.p50_us,
            repeats,
            value_at_most=target.p50_us if name in JUDGED else None,
        )
    # A release is not waited for, and eviction follows a stage: only the pair's CPU time is whole.
    client_us, daemon_us = (
        sum(getattr(note, f"{side}_cpu_seconds") for note in taken.values()) * per_block
        for side in ("client", "daemon")
    )
    yield Figure(
        f"{'_and_'.join(taken)}_{target.blocks}_cpu_per_block",
        client_us + daemon_us,
        "us, client and daemon",
        "the client's share",
        client_us,
        repeats,
        value_at_most=target.cpu_us_per_block,
    )
