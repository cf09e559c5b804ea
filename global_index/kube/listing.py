"""One collection of the Kubernetes API, kept equal to the server's by list and watch. Pure.

    LIST page by page ──last page──► WATCH from its version ──ended, lost──► WATCH from the newest
         ▲                               │
         └── 410 Gone, ERROR, refused ───┘   a new list replaces all: a missed DELETED ends there

Versions are opaque: never compared, only handed back. A list without a version is read through
etcd's quorum, so it is never older than what was seen before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from emberkv_proto.errors import InvalidRequestError

GONE = 410
MAX_OBJECTS = 16_384
"""Of one collection; those beyond are left out and counted."""
MAX_TOKEN_CHARS = 65_536
WATCH_REFUSALS = 3
"""In a row, after which the version itself is doubted and the collection listed anew."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, order=True)
class ObjectName:
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class ListPage:
    """Ask for a page; `token` is the server's `continue`, empty for the first."""

    token: str = ""


@dataclass(frozen=True, slots=True)
class Watch:
    """Ask for what came after this version."""

    version: str


@dataclass(slots=True)
class ListingCounts:
    """What one collection went through; never goes down."""

    lists: int = 0
    watches: int = 0
    events: int = 0
    bookmarks: int = 0
    expired: int = 0
    """Times that the server no longer had our version (410 Gone)."""
    losses: int = 0
    """Connections that failed, refusals, and messages that made no sense."""
    unreadable: int = 0
    """Objects that were left out because they could not be understood."""
    left_out: int = 0
    """Objects beyond MAX_OBJECTS."""


class Listing(Generic[T]):
    """What the server has, as `parse` reads each object. O(1) an event, O(objects) a list.

    `parse` raises InvalidRequestError for an object that it cannot read; such a one is absent.
    """

    def __init__(
        self, parse: Callable[[Mapping[str, Any]], T], max_objects: int = MAX_OBJECTS
    ) -> None:
        self.counts = ListingCounts()
        self.objects: dict[ObjectName, T] = {}
        self.is_complete = False
        """A whole list was taken over: what is not in `objects` does not exist."""
        self._parse = parse
        self._max_objects = max_objects
        self._version = ""
        """Of the newest event or list; empty while a list is wanted."""
        self._token = ""
        self._pages: dict[ObjectName, T] = {}
        self._refusals = 0

    @property
    def is_listing(self) -> bool:
        return not self._version

    def ask(self) -> ListPage | Watch:
        """What to ask the server for next."""
        return Watch(self._version) if self._version else ListPage(self._token)

    def on_page(self, body: Mapping[str, Any]) -> bool:
        """A page came; the last one replaces all objects. Whether they are others now.

        Raises InvalidRequestError for what is no list.
        """
        meta, items = body.get("metadata"), body.get("items") or []
        if not isinstance(meta, dict) or not isinstance(items, list):
            raise InvalidRequestError("the answer is not a list of objects")
        token = meta.get("continue") or ""
        version = _text(meta, "resourceVersion")
        if not isinstance(token, str) or len(token) > MAX_TOKEN_CHARS:
            raise InvalidRequestError("the list's continue token is not a text")
        if not self._token:
            self._pages = {}
        for item in items:
            self._put(self._pages, _name_of(item), item)
        self._token = token
        if token:
            return False
        is_changed = not self.is_complete or self._pages != self.objects
        self.objects, self._pages = self._pages, {}
        self._version, self.is_complete = version, True
        self._refusals = 0
        self.counts.lists += 1
        return is_changed

    def on_watching(self) -> None:
        """The server took the watch; events follow."""
        self.counts.watches += 1

    def on_event(self, event: Mapping[str, Any]) -> bool:
        """A line of the watch. Whether objects are others now.

        After one that makes `ask` want a list, the rest of the watch is void.
        Raises InvalidRequestError for what is no event.
        """
        kind, item = event.get("type"), event.get("object")
        if not isinstance(item, dict):
            raise InvalidRequestError(f"watch event {str(kind)[:40]!r} has no object")
        if kind == "ERROR":
            self._refused(item.get("code"))
            return False
        meta = item.get("metadata")
        if not isinstance(meta, dict):
            raise InvalidRequestError("an object of the watch has no metadata")
        version = _text(meta, "resourceVersion")
        before: object
        if kind == "BOOKMARK":
            self.counts.bookmarks += 1
            is_changed = False
        elif kind in ("ADDED", "MODIFIED"):
            name = _name_of(item)
            before = self.objects.get(name)
            self._put(self.objects, name, item)
            is_changed = self.objects.get(name) != before
        elif kind == "DELETED":
            is_changed = self.objects.pop(_name_of(item), None) is not None
        else:
            raise InvalidRequestError(f"watch event of kind {str(kind)[:40]!r} is unknown")
        self.counts.events += kind != "BOOKMARK"
        self._version, self._refusals = version, 0
        return is_changed

    def on_refused(self, status: int) -> None:
        """The server answered with an error. The same is asked again, or a list."""
        if self.is_listing:
            self.counts.expired += status == GONE
            self.counts.losses += status != GONE
            self._token = ""  # a token that the server no longer takes would never work
            return
        self._refusals += 1
        if status in (401, 403, 429) and self._refusals < WATCH_REFUSALS:
            self.counts.losses += 1  # says nothing of the version
        else:
            self._refused(status)

    def on_lost(self) -> None:
        """The connection failed, or nothing came in time. A watch goes on where it was."""
        self.counts.losses += 1
        self._token = ""

    def on_nonsense(self) -> None:
        """A message broke the protocol: what is known is doubted."""
        self.counts.losses += 1
        self.relist()

    def relist(self) -> None:
        """Ask for a whole list next. Objects stay until it is here."""
        self._version = self._token = ""
        self._refusals = 0

    def check_integrity(self) -> None:
        assert len(self.objects) <= self._max_objects
        assert len(self._pages) <= self._max_objects
        assert self.is_listing or (self.is_complete and not self._token)
        assert 0 <= self._refusals < WATCH_REFUSALS
        assert self.is_complete == bool(self.counts.lists)

    def _refused(self, code: object) -> None:
        self.counts.expired += code == GONE
        self.counts.losses += code != GONE
        self.relist()

    def _put(self, objects: dict[ObjectName, T], name: ObjectName, item: Mapping[str, Any]) -> None:
        try:
            value = self._parse(item)
        except InvalidRequestError:
            self.counts.unreadable += 1
            objects.pop(name, None)
            return
        if name not in objects and len(objects) >= self._max_objects:
            self.counts.left_out += 1
            return
        objects[name] = value


def _name_of(item: object) -> ObjectName:
    meta = item.get("metadata") if isinstance(item, dict) else None
    if not isinstance(meta, dict):
        raise InvalidRequestError("an object has no metadata")
    return ObjectName(str(meta.get("namespace") or ""), _text(meta, "name"))


def _text(meta: Mapping[str, Any], key: str) -> str:
    value = meta.get(key)
    if not isinstance(value, str) or not value or len(value) > MAX_TOKEN_CHARS:
        raise InvalidRequestError(f"metadata.{key} is missing")
    return value
