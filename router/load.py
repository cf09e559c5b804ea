"""The in-flight ledger: what this router has sent to each engine and not yet seen finished. Pure.

A request is charged before it is dispatched, so that the next decision already counts it, and
released exactly once, by leaving the `with` block by whatever door.
"""

from __future__ import annotations

from types import TracebackType

from emberkv_proto.errors import IntegrityError
from router.scoring import Load


class Charge:
    """One request's share of an engine's load. Made by `LoadLedger.charge`."""

    __slots__ = ("_entry", "_ledger", "_queued_tokens", "_url")

    def __init__(self, ledger: LoadLedger, url: str, entry: _Entry, queued_tokens: int) -> None:
        self._ledger = ledger
        self._url = url
        self._entry: _Entry | None = entry
        self._queued_tokens = queued_tokens

    def prefilled(self) -> None:
        """The engine has begun to answer: its prefill of this request is over. May be repeated."""
        if self._entry is not None:
            self._entry.queued_tokens -= self._queued_tokens
            self._queued_tokens = 0

    def release(self) -> None:
        """Take the request off the engine.

        Raises:
            IntegrityError: it was released before.
        """
        if self._entry is None:
            raise IntegrityError(f"charge on {self._url} released twice")
        self.prefilled()
        self._entry.charges.remove(self)
        self._entry = None
        self._ledger.prune(self._url)

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


class _Entry:
    __slots__ = ("charges", "queued_tokens")

    def __init__(self) -> None:
        self.charges: set[Charge] = set()
        self.queued_tokens = 0


class LoadLedger:
    """Active requests and uncached prefill tokens per engine. O(1) per call."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def charge(self, url: str, prefill_tokens: int) -> Charge:
        """Add a request that will compute `prefill_tokens` on the engine at `url`."""
        entry = self._entries.setdefault(url, _Entry())
        charge = Charge(self, url, entry, max(0, prefill_tokens))
        entry.charges.add(charge)
        entry.queued_tokens += charge.queued_tokens
        return charge

    def load(self, url: str) -> Load:
        entry = self._entries.get(url)
        if entry is None:
            return Load()
        return Load(len(entry.charges), entry.queued_tokens)

    def active_requests(self, url: str) -> int:
        entry = self._entries.get(url)
        return len(entry.charges) if entry else 0

    def total_requests(self) -> int:
        return sum(len(entry.charges) for entry in self._entries.values())

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
