"""The in-flight ledger: what this router has sent to each engine and not yet seen finished. Pure.

A request is charged before it is dispatched, so that the next decision already counts it, and
released exactly once, by leaving the `with` block by whatever door.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from types import TracebackType

import numpy as np
import numpy.typing as npt

from emberkv_proto.errors import IntegrityError
from router.scoring import Load

SHORTEST_SECONDS = 0.001
COLUMNS = 6
FIRST_ROWS = 64
NEWEST_SHARE = 0.1
"""Weight of the newest request in an engine's mean time."""


class Charge:
    """One request's share of an engine's load. Made by `LoadLedger.charge`."""

    __slots__ = ("_began", "_entry", "_ledger", "_queued_pairs", "_queued_tokens", "_url")

    def __init__(
        self,
        ledger: LoadLedger,
        url: str,
        entry: _Entry,
        queued_tokens: int,
        queued_pairs: int,
        began: float,
    ) -> None:
        self._ledger = ledger
        self._url = url
        self._entry: _Entry | None = entry
        self._queued_tokens = queued_tokens
        self._queued_pairs = queued_pairs
        self._began = began

    def prefilled(self) -> None:
        """The engine has begun to answer: its prefill of this request is over. May be repeated."""
        if self._entry is not None and self._queued_tokens:
            self._entry.queued_tokens -= self._queued_tokens
            self._entry.queued_pairs -= self._queued_pairs
            self._queued_tokens = self._queued_pairs = 0
            if self is next(iter(self._entry.waiting)):
                self._entry.busy_since = self._ledger.now()
            del self._entry.waiting[self]
            self._ledger.show(self._entry)
            self._ledger.freed()

    def finished(self) -> None:
        """The whole answer came: its time tells how quickly this engine finishes requests."""
        self._ledger.note_finished(self._url, self._began)

    def release(self) -> None:
        """Take the request off the engine.

        Raises:
            IntegrityError: it was released before.
        """
        if self._entry is None:
            raise IntegrityError(f"charge on {self._url} released twice")
        if self._queued_tokens:
            self.prefilled()
        entry, self._entry = self._entry, None
        entry.charges.remove(self)
        self._ledger.show(entry)
        if not entry.charges:
            self._ledger.prune(self._url)
        self._ledger.freed()

    def __enter__(self) -> Charge:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    @property
    def queued_tokens(self) -> int:
        return self._queued_tokens

    @property
    def queued_pairs(self) -> int:
        return self._queued_pairs


class _Entry:
    __slots__ = ("busy_since", "charges", "queued_pairs", "queued_tokens", "slot", "waiting")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.charges: set[Charge] = set()
        self.waiting: dict[Charge, None] = {}
        """Those with tokens to prefill, oldest first."""
        self.busy_since = 0.0
        """When the engine may have begun with the first of them."""
        self.queued_tokens = 0
        self.queued_pairs = 0


class LoadLedger:
    """Active requests and uncached prefill tokens per engine. O(1) per call."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._slots: dict[str, int] = {}
        self._free_slots: list[int] = []
        self.numbers = array("d")
        self._make_rows(FIRST_ROWS)
        self._mean_seconds: dict[str, float] = {}
        """Of a finished request's whole time, recent ones counting most."""
        self.on_freed: Callable[[], None] | None = None
        """Told when a request ended or its prefill was over."""

    def charge(self, url: str, prefill_tokens: int, attention_pairs: int = 0) -> Charge:
        """Add a request that will compute `prefill_tokens` on the engine at `url`."""
        entry = self._entries.get(url)
        if entry is None:
            entry = self._entries[url] = _Entry(self.slot(url))
        tokens, pairs, now = max(0, prefill_tokens), max(0, attention_pairs), self._clock()
        charge = Charge(self, url, entry, tokens, pairs, now)
        entry.charges.add(charge)
        if tokens:
            if not entry.waiting:
                entry.busy_since = now
            entry.waiting[charge] = None
        entry.queued_tokens += tokens
        entry.queued_pairs += pairs
        self.show(entry)
        return charge

    def slot(self, url: str) -> int:
        """The engine's row of `rows`; its own until it is forgotten."""
        slot = self._slots.get(url)
        if slot is None:
            if not self._free_slots:
                self._make_rows(2 * len(self.rows))
            slot = self._slots[url] = self._free_slots.pop()
        return slot

    def show(self, entry: _Entry) -> None:
        """Bring an engine's row up to date. Columns as in choice_kernel.py."""
        at, numbers = entry.slot * COLUMNS, self.numbers
        numbers[at] = len(entry.charges)
        numbers[at + 1] = entry.queued_tokens
        if entry.waiting:
            first = next(iter(entry.waiting))
            numbers[at + 2] = entry.queued_pairs
            numbers[at + 3] = first.queued_tokens
            numbers[at + 4] = first.queued_pairs
            numbers[at + 5] = entry.busy_since

    def _make_rows(self, count: int) -> None:
        """Room for so many engines. `rows` is another array then."""
        old = self.numbers
        self.numbers = array("d", bytes(8 * COLUMNS * count))
        self.numbers[: len(old)] = old
        self.rows: npt.NDArray[np.float64] = np.frombuffer(self.numbers).reshape(-1, COLUMNS)
        """Each engine's load as `load` says it, for whoever looks at many at once; the same
        numbers as in `numbers`, one after the other."""
        self._free_slots = [*range(count - 1, len(old) // COLUMNS - 1, -1)]

    def load(self, url: str) -> Load:
        entry = self._entries.get(url)
        if entry is None:
            return Load()
        if not entry.waiting:
            return Load(len(entry.charges))
        first = next(iter(entry.waiting))
        return Load(
            len(entry.charges),
            entry.queued_tokens,
            entry.queued_pairs,
            first.queued_tokens,
            first.queued_pairs,
            self._clock() - entry.busy_since,
        )

    def active_requests(self, url: str) -> int:
        entry = self._entries.get(url)
        return len(entry.charges) if entry else 0

    def has_room(self, url: str, max_requests: int, max_queued_tokens: int) -> bool:
        """Whether the engine has fewer than both."""
        entry = self._entries.get(url)
        return entry is None or (
            len(entry.charges) < max_requests and entry.queued_tokens < max_queued_tokens
        )

    def total_requests(self) -> int:
        return sum(len(entry.charges) for entry in self._entries.values())

    def now(self) -> float:
        return self._clock()

    def releases_per_second(self, url: str) -> float:
        """The pace at which this engine finishes requests now; 0 where none has finished yet."""
        mean = self._mean_seconds.get(url)
        return self.active_requests(url) / mean if mean else 0.0

    def note_finished(self, url: str, began: float) -> None:
        seconds = max(self._clock() - began, SHORTEST_SECONDS)
        mean = self._mean_seconds.get(url, seconds)
        self._mean_seconds[url] = mean + NEWEST_SHARE * (seconds - mean)

    def forget(self, url: str) -> None:
        """The engine is gone for good."""
        self._mean_seconds.pop(url, None)
        if url not in self._entries and url in self._slots:
            self._free_slots.append(self._slots.pop(url))

    def freed(self) -> None:
        if self.on_freed is not None:
            self.on_freed()

    def prune(self, url: str) -> None:
        """Forget an engine without requests."""
        entry = self._entries.get(url)
        if entry is not None and not entry.charges:
            del self._entries[url]

    def check_integrity(self) -> None:
        for url, entry in self._entries.items():
            assert entry.charges, f"{url} is listed without a request"
            queued = sum(charge.queued_tokens for charge in entry.charges)
            assert entry.queued_tokens == queued, f"{url}: {entry.queued_tokens} != {queued}"
            waiting = {charge for charge in entry.charges if charge.queued_tokens}
            assert waiting == entry.waiting.keys(), f"{url}: {len(entry.waiting)} wait"
            pairs = sum(charge.queued_pairs for charge in entry.charges)
            assert entry.queued_pairs == pairs, f"{url}: {entry.queued_pairs} != {pairs}"
            row = self.rows[self._slots[url]].tolist()
            assert row[:2] == [len(entry.charges), entry.queued_tokens], f"{url}: {row}"
        slots = [*self._slots.values(), *self._free_slots]
        assert sorted(slots) == [*range(len(self.rows))], "a row of two engines, or of none"
        for url, slot in self._slots.items():
            assert url in self._entries or not self.rows[slot, :2].any(), f"{url} left a load"
        assert all(mean >= SHORTEST_SECONDS for mean in self._mean_seconds.values())
