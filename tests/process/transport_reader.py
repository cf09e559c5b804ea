"""Runs as a process of its own: reads from a peer as fast as it can, and watches its own pool.

    python -m tests.process.transport_reader KIND POOL_DESCRIPTOR SEED SOURCE_BYTES

Each line on stdin is a command, each answer a line of JSON:

    peer TRANSPORT ADDRESS INCARNATION   read from there from now on
    read SECONDS SEED                    read for so long; a `Tally`

Slots lie between guard bytes. One that no read owns holds REUSED, as if it were somebody else's by
now: whatever else is found in it was written too late.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from client_sdk.transport.base import (
    Cancellation,
    Peer,
    Segment,
    TransportAddress,
)
from emberkv_proto.errors import EmberError
from emberkv_proto.types import Incarnation
from store_daemon.transport.base import Transport
from tests.helpers.anonymous_pool import AnonymousPool
from tests.helpers.serve_region import LEASE, make_transport, pack_ranges, seeded_bytes

KIB = 1 << 10
SLOT_BYTES, GUARD_BYTES, SLOTS = 192 * KIB, 4 * KIB, 48
POOL_BYTES = SLOTS * (SLOT_BYTES + GUARD_BYTES) + GUARD_BYTES
GUARD, REUSED = 0x5A, 0x55
THREADS = 3
MOST_SLOTS_A_READ = 12
DEADLINE_SECONDS = 1.5
PROGRESS_SECONDS = 0.75
_GUARDS, _REUSED = bytes([GUARD]) * GUARD_BYTES, bytes([REUSED]) * SLOT_BYTES


@dataclass
class Tally:
    """What became of some time of reading."""

    good: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    wrong_bytes: int = 0
    late_writes: int = 0
    broken_guards: int = 0
    longest_overrun: float = -DEADLINE_SECONDS
    """Seconds that a read took beyond its deadline."""
    descriptors: int = 0
    threads: int = 0
    quarantined_bytes: int = 0
    moved: dict[str, int] = field(default_factory=dict)
    """The transport's own counts."""


def slot_offset(number: int) -> int:
    return GUARD_BYTES + number * (SLOT_BYTES + GUARD_BYTES)


def fill_pool(view: memoryview) -> None:
    view[:] = bytes([GUARD]) * POOL_BYTES
    for number in range(SLOTS):
        view[slot_offset(number) : slot_offset(number) + SLOT_BYTES] = _REUSED


def late_writes(view: memoryview) -> int:
    """Slots that hold something else than REUSED."""
    starts = [slot_offset(number) for number in range(SLOTS)]
    return sum(view[start : start + SLOT_BYTES] != _REUSED for start in starts)


def broken_guards(view: memoryview) -> int:
    starts = [slot_offset(number) - GUARD_BYTES for number in range(SLOTS + 1)]
    return sum(view[start : start + GUARD_BYTES] != _GUARDS for start in starts)


class Reader:
    """Threads that read batches into slots of their own choice."""

    def __init__(self, transport: Transport, view: memoryview, source: bytes) -> None:
        self._transport = transport
        self._view = view
        self._source = source
        self._lock = threading.Lock()
        self._free = set(range(SLOTS))
        self._tally = Tally()
        self._peer: Peer | None = None
        self._address: TransportAddress | None = None

    def turn_to(self, address: TransportAddress) -> None:
        if self._peer is not None:
            self._transport.close(self._peer)
        self._address, self._peer = address, self._transport.connect(address)

    def read(self, seconds: float, seed: int) -> Tally:
        self._tally = Tally()
        until = time.monotonic() + seconds
        threads = [
            threading.Thread(target=self._work, args=(random.Random(seed * THREADS + n), until))
            for n in range(THREADS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        report = self._transport.report()
        tally = self._tally
        tally.broken_guards = broken_guards(self._view)
        tally.late_writes += late_writes(self._view)
        tally.descriptors = len(os.listdir("/proc/self/fd"))
        tally.threads = threading.active_count()
        tally.quarantined_bytes = report.quarantined_bytes
        tally.moved = dict(report.counts)
        self._transport.check_integrity()  # type: ignore[attr-defined]
        return tally

    def _work(self, choice: random.Random, until: float) -> None:
        while time.monotonic() < until:
            with self._lock:
                slots = choice.sample(sorted(self._free), choice.randint(1, MOST_SLOTS_A_READ))
                self._free.difference_update(slots)
            try:
                self._read_into(slots, choice)
            finally:
                with self._lock:
                    self._free.update(slots)

    def _read_into(self, slots: list[int], choice: random.Random) -> None:
        segments = [self._segment(number, choice) for number in slots]
        late = sum(bool(self._slot(number) != _REUSED) for number in slots)
        assert self._peer is not None
        assert self._address is not None
        # Some begin with a handshake, so that blows land there too.
        is_fresh = choice.random() < 0.25
        peer = self._transport.connect(self._address) if is_fresh else self._peer
        # Some ask for a lease first, and some of these take what comes right behind it.
        asks_lease = choice.random() < 0.5
        begun = time.monotonic()
        error: EmberError | None = None
        try:
            self._read(peer, segments, asks_lease)
        except EmberError as raised:
            error = raised
        overrun = time.monotonic() - begun - DEADLINE_SECONDS
        wrong = 0
        if error is None:
            wrong = sum(not self._is_right(segment) for segment in segments)
        for number in slots:
            start = slot_offset(number)
            self._view[start : start + SLOT_BYTES] = _REUSED
        if is_fresh:
            self._transport.close(peer)
        with self._lock:
            tally = self._tally
            tally.late_writes += late
            tally.wrong_bytes += wrong
            tally.longest_overrun = max(tally.longest_overrun, overrun)
            if error is None:
                tally.good += 1
            else:
                tally.failed[type(error).__name__] += 1

    def _read(self, peer: Peer, segments: list[Segment], asks_lease: bool) -> None:
        until = time.monotonic() + DEADLINE_SECONDS
        if asks_lease:
            request, first_blocks = pack_ranges(segments), len(segments)
            reply = self._transport.ask_lease(
                peer, request, first_blocks, DEADLINE_SECONDS, Cancellation()
            )
            if reply.answer != request:
                raise AssertionError("the owner answered another request")
            if reply.first is not None:
                left = max(0.0, until - time.monotonic())
                reply.first.take(segments, left, Cancellation())
                return
        left = until - time.monotonic()
        self._transport.read(peer, LEASE, segments, left, Cancellation())

    def _segment(self, slot: int, choice: random.Random) -> Segment:
        """Not the whole slot: bytes beside the range are watched like those of other slots."""
        length = choice.choice((SLOT_BYTES, SLOT_BYTES - 4096, 4096, 1))
        lead = choice.randint(0, SLOT_BYTES - length)
        remote = choice.randint(0, len(self._source) - length)
        return Segment(slot_offset(slot) + lead, remote, length)

    def _slot(self, number: int) -> memoryview:
        return self._view[slot_offset(number) : slot_offset(number) + SLOT_BYTES]

    def _is_right(self, segment: Segment) -> bool:
        here, there = segment.local_offset, segment.remote_offset
        wanted = self._source[there : there + segment.length]
        return bool(self._view[here : here + segment.length] == wanted)


def main() -> None:
    kind, descriptor, seed, source_bytes = sys.argv[1:]
    pool = AnonymousPool(POOL_BYTES, int(descriptor))
    transport = make_transport(kind, Incarnation(9), pool, PROGRESS_SECONDS)
    reader = Reader(transport, pool.view, seeded_bytes(int(seed), int(source_bytes)))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        match line.split():
            case ["peer", name, address, incarnation]:
                reader.turn_to(TransportAddress(name, address, Incarnation(int(incarnation))))
            case ["read", seconds, run]:
                print(json.dumps(vars(reader.read(float(seconds), int(run)))), flush=True)
    transport.shutdown()


if __name__ == "__main__":
    main()
