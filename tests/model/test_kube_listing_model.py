"""Whatever lists, watches, expiries and lost messages come, a listing ends as the API's state."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from emberkv_proto.errors import InvalidRequestError
from global_index.kube.listing import Listing, ListPage, Watch
from global_index.kube.pods import Pod, parse_pod
from tests.helpers.naive_kube_api import ExpiredError, NaiveKubeApi, pod

NAMES = st.sampled_from(["a", "b", "c", "d", "e"])
PAGE = 2


class ListingMachine(RuleBasedStateMachine):
    """Plays the server and the connection between it and a listing."""

    def __init__(self) -> None:
        super().__init__()
        self.api = NaiveKubeApi()
        self.listing: Listing[Pod] = Listing(parse_pod)
        self.sent: str | None = None
        """Version up to which the running watch has told; None: no watch runs."""
        self.is_deceived = False
        """A change was swallowed without any sign."""

    @rule(name=NAMES, last=st.integers(1, 4), ready=st.booleans())
    def change(self, name: str, last: int, ready: bool) -> None:
        self.api.put(pod(name, ip=f"10.0.0.{last}", ready=ready))

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        if name in self.api.objects:
            self.api.delete(name)

    @rule()
    def compact(self) -> None:
        self.api.compact()

    @precondition(lambda self: self.sent is None)
    @rule()
    def ask(self) -> None:
        match self.listing.ask():
            case ListPage(token):
                try:
                    page = self.api.page(token, PAGE)
                except ExpiredError:
                    self.listing.on_refused(410)
                    return
                was_whole = self.listing.counts.lists
                self.listing.on_page(page)
                if self.listing.counts.lists > was_whole and not token:
                    self.is_deceived = False
            case Watch(version):
                try:
                    self.api.since(version)
                except ExpiredError:
                    self.listing.on_refused(410)
                    return
                self.sent = version
                self.listing.on_watching()

    @precondition(lambda self: self.sent is not None)
    @rule(count=st.integers(1, 5))
    def deliver(self, count: int) -> None:
        for event in self._events()[:count]:
            self._send(event)

    @precondition(lambda self: self.sent is not None and not self._events())
    @rule()
    def bookmark(self) -> None:
        self._send(self.api.bookmark())

    @precondition(lambda self: self.sent is not None and self._events())
    @rule()
    def swallow(self) -> None:
        event = self._events()[0]
        self.sent = event["object"]["metadata"]["resourceVersion"]
        self.is_deceived = True

    @precondition(lambda self: self.sent is not None)
    @rule(how=st.sampled_from(["end", "lost", "gone", "error", "nonsense", "unnamed"]))
    def cut(self, how: str) -> None:
        self.sent = None
        match how:
            case "lost":
                self.listing.on_lost()
            case "gone" | "error":
                status = {"kind": "Status", "code": 410 if how == "gone" else 500}
                assert not self.listing.on_event({"type": "ERROR", "object": status})
                assert self.listing.is_listing
            case "nonsense" | "unnamed":
                broken: dict[str, Any] = {"type": "ADDED", "object": {"metadata": {}}}
                with pytest.raises(InvalidRequestError):
                    self.listing.on_event(broken if how == "unnamed" else {"type": "ADDED"})
                self.listing.on_nonsense()

    @precondition(lambda self: self.sent is None)
    @rule(status=st.sampled_from([401, 403, 404, 410, 429, 500, 504]))
    def refuse(self, status: int) -> None:
        self.listing.on_refused(status)

    @precondition(lambda self: self.sent is None)
    @rule()
    def relist(self) -> None:
        self.listing.relist()

    @invariant()
    def is_sound(self) -> None:
        self.listing.check_integrity()

    def teardown(self) -> None:
        """The connection holds from now on: all that is to be told is told."""
        self.sent = None
        if self.is_deceived:
            self.listing.relist()  # as the clock does
        for _ in range(40):
            if self.sent is None:
                self.ask()
            elif events := self._events():
                self._send(events[0])
        assert self.listing.is_complete
        expected = {name: parse_pod(raw) for name, raw in self.api.objects.items()}
        assert {name.name: value for name, value in self.listing.objects.items()} == expected
        self.listing.check_integrity()

    def _events(self) -> list[dict[str, Any]]:
        """What the running watch has still to tell; one that began may outlive a compaction."""
        assert self.sent is not None
        try:
            return self.api.since(self.sent)
        except ExpiredError:
            self.sent = None
            self.listing.on_event({"type": "ERROR", "object": {"code": 410}})
            return []

    def _send(self, event: dict[str, Any]) -> None:
        self.listing.on_event(event)
        self.sent = event["object"]["metadata"]["resourceVersion"]


TestListing = ListingMachine.TestCase
