"""Which of an engine's messages are new, known, missing, or of another life. Pure.

Sequence numbers start at 0 with each life of an engine and nothing else tells lives apart, so the
digests of recent payloads are kept: a number that is taken by other bytes is another life's. (A
payload begins with its time, so two lives do not send the same bytes.)
"""

from __future__ import annotations

from array import array
from enum import Enum

import xxhash

REMEMBERED = 10_240
"""Messages; a little more than engines keep for replay by default."""


class Verdict(Enum):
    NEXT = "next"
    """In order; it is taken over."""
    KNOWN = "known"
    """Had already."""
    GAP = "gap"
    """Others are missing before it."""
    RESTART = "restart"
    """Of another life: `begin` again."""


class EventSequence:
    """Where one engine's stream stands."""

    def __init__(self) -> None:
        self._next = 0
        self._first = 0
        """The oldest number whose digest is remembered, unless the window has passed it."""
        self._digests = array("Q")

    @property
    def next(self) -> int:
        """The number wanted."""
        return self._next

    @property
    def replay_from(self) -> int:
        """Where to ask from: the newest one we have, as proof that it is the same life."""
        return max(self._next - 1, self._first)

    @property
    def has_proof(self) -> bool:
        """Whether a replay is to begin with a message that we know."""
        return self._next > self._first

    def offer(self, seq: int, payload: bytes) -> Verdict:
        """Judge a message; one that is NEXT counts as taken over."""
        digest = xxhash.xxh3_64_intdigest(payload)
        if seq == self._next:
            place = seq % REMEMBERED
            if place < len(self._digests):
                self._digests[place] = digest
            else:
                self._digests.extend([0] * (place - len(self._digests)))
                self._digests.append(digest)
            self._next += 1
            return Verdict.NEXT
        if seq > self._next:
            return Verdict.GAP
        is_remembered = seq >= max(self._first, self._next - REMEMBERED)
        if is_remembered and self._digests[seq % REMEMBERED] == digest:
            return Verdict.KNOWN
        return Verdict.RESTART

    def skip_to(self, seq: int) -> None:
        """What is before `seq` will not come any more."""
        self._next = self._first = seq

    def begin(self) -> None:
        """Another life: expect 0."""
        self._next = self._first = 0

    def check_integrity(self) -> None:
        assert 0 <= self._first <= self._next
        assert len(self._digests) <= REMEMBERED
