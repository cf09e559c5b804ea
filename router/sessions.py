"""Which engine a session's last request went to, for requests whose tokens are not known. Pure.

What that engine has seen of the session counts as held by it, so that going back there is worth as
much as not computing it again, and no more: a busy engine is left all the same.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import xxhash

from router.http_message import Request
from router.request_body import RequestBody

SESSION_HEADERS = (b"x-session-id", b"x-session-token")
SESSION_FIELDS = ("prompt_cache_key", "session_id", "previous_response_id", "user")
BEGINNING_FIELDS = ("system", "instructions", "messages", "input")
BEGINNING_BYTES = 512
MOST_SESSIONS = 65_536
IDLE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Session:
    """One request's session."""

    key: bytes


@dataclass(slots=True)
class _Seen:
    url: str
    tokens: int
    at: float


def session_of(request: Request, body: RequestBody) -> Session | None:
    """By header, by field, or else by how the conversation begins. Salts keep tenants apart."""
    parts = [body.raw("cache_salt") or b"", body.raw("model") or b""]
    named = next(filter(None, map(request.header, SESSION_HEADERS)), None)
    if named is None:
        named = next(filter(None, map(body.raw, SESSION_FIELDS)), None)
    if named is not None:
        parts += (b"named", named)
    else:
        beginning = [(body.raw(name) or b"")[:BEGINNING_BYTES] for name in BEGINNING_FIELDS]
        if not any(beginning):
            return None
        parts += (b"begins", *beginning)
    return Session(xxhash.xxh3_128_digest(b"\0".join(parts)))


class Sessions:
    """The most recent sessions. Time is passed in, monotonic seconds."""

    def __init__(self, most: int = MOST_SESSIONS, idle_seconds: float = IDLE_SECONDS) -> None:
        self._most = most
        self._idle_seconds = idle_seconds
        self._seen: OrderedDict[bytes, _Seen] = OrderedDict()

    def note(self, session: Session, url: str, tokens: int, now: float) -> None:
        """A request of the session, with about so many tokens, goes to this engine."""
        self._seen[session.key] = _Seen(url, tokens, now)
        self._seen.move_to_end(session.key)
        while self._seen and (
            len(self._seen) > self._most
            or next(iter(self._seen.values())).at < now - self._idle_seconds
        ):
            self._seen.popitem(last=False)

    def held_tokens(self, session: Session, url: str, now: float) -> int:
        """About how many tokens of the session this engine has seen."""
        seen = self._seen.get(session.key)
        is_it = seen is not None and seen.url == url and seen.at >= now - self._idle_seconds
        return seen.tokens if seen is not None and is_it else 0

    def engine_of(self, session: Session, now: float) -> str:
        """Its URL; empty where there is none."""
        seen = self._seen.get(session.key)
        return seen.url if seen is not None and seen.at >= now - self._idle_seconds else ""

    def forget(self, url: str) -> None:
        """The engine was restarted: nothing is there any more."""
        for key in [key for key, seen in self._seen.items() if seen.url == url]:
            del self._seen[key]

    def check_integrity(self) -> None:
        assert len(self._seen) <= self._most
        times = [seen.at for seen in self._seen.values()]
        assert times == sorted(times), "sessions out of order"
