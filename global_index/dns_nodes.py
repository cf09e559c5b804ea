"""Daemons found by name: a DNS name that stands for all of them is asked again and again.

Meant for a headless Service, whose name has one address for each pod. `NodeNames` decides, `follow`
asks. A lookup that fails changes nothing: what is followed stays followed.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from client_sdk import aio

log = logging.getLogger(__name__)

SCHEME = "dns:///"
LOOKUP_SECONDS = 10.0
MAX_ADDRESSES = 4096
"""Of one name; as many nodes as an index can hold. Those beyond, in order, are left out."""
ABSENT_ANSWERS = 2
"""Answers in a row that must lack an address before it is given up: one may have been cut short."""
_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(\d{1,5})")

Resolve = Callable[[str, int], Awaitable[list[str]]]


@dataclass(frozen=True, slots=True)
class HostPort:
    """Two halves of an address. An IPv6 host has no brackets here."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @staticmethod
    def parse(text: str) -> HostPort:
        """Raises ValueError for what is not host:port."""
        match = _HOST_PORT.fullmatch(text)
        if not match or not 1 <= int(match[2]) <= 65535:
            raise ValueError(f"{text!r} is not host:port, nor {SCHEME} and that")
        return HostPort(match[1].strip("[]"), int(match[2]))


@dataclass(frozen=True, slots=True)
class Changes:
    """Which addresses to follow from now on, and which no longer."""

    added: tuple[str, ...]
    removed: tuple[str, ...]


@dataclass(slots=True)
class NameCounts:
    """How the lookups of one name fare."""

    lookups: int = 0
    failures: int = 0
    addresses: int = 0


class NodeNames:
    """Which addresses the names stand for. Pure. O(addresses) an answer."""

    def __init__(self, names: tuple[HostPort, ...]) -> None:
        self.counts: dict[HostPort, NameCounts] = {name: NameCounts() for name in names}
        self._missed: dict[HostPort, dict[str, int]] = {name: {} for name in names}
        """Of each name, its addresses and how many answers in a row lacked them."""

    def on_answer(self, name: HostPort, addresses: list[str]) -> Changes:
        """A lookup succeeded. An address that another name has too stays when this one drops it."""
        before, missed, counts = self.followed(), self._missed[name], self.counts[name]
        present = sorted(set(addresses))[:MAX_ADDRESSES]
        for address in [*missed]:
            missed[address] += 1
            if missed[address] >= ABSENT_ANSWERS and address not in present:
                del missed[address]
        missed.update(dict.fromkeys(present, 0))
        counts.lookups += 1
        counts.addresses = len(present)
        after = self.followed()
        return Changes(tuple(sorted(after - before)), tuple(sorted(before - after)))

    def on_failure(self, name: HostPort) -> None:
        counts = self.counts[name]
        counts.lookups += 1
        counts.failures += 1

    def followed(self) -> set[str]:
        return {address for missed in self._missed.values() for address in missed}

    def check_integrity(self) -> None:
        assert self._missed.keys() == self.counts.keys()
        for name, missed in self._missed.items():
            assert all(0 <= count < ABSENT_ANSWERS for count in missed.values())
            present = [address for address, count in missed.items() if count == 0]
            assert len(present) == self.counts[name].addresses <= MAX_ADDRESSES
            assert self.counts[name].failures <= self.counts[name].lookups


async def resolve(host: str, port: int) -> list[str]:
    """Every address of a name, as host:port. Raises OSError."""
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(HostPort(str(info[4][0]), port)) for info in infos]


async def follow(
    names: NodeNames,
    apply: Callable[[Changes], Awaitable[None]],
    seconds: float,
    lookup: Resolve = resolve,
) -> None:
    """Ask for every name each `seconds`, for ever; `apply` gets what changed."""
    while True:
        for name in names.counts:
            try:
                async with aio.timeout(LOOKUP_SECONDS):
                    addresses = await lookup(name.host, name.port)
            except (OSError, UnicodeError, asyncio.TimeoutError, TimeoutError) as error:
                names.on_failure(name)
                reason = str(error) or f"no answer in {LOOKUP_SECONDS:g} s"
                log.warning("daemons of %s cannot be looked up: %s", name, reason)
                continue
            changes = names.on_answer(name, addresses)
            if changes.added or changes.removed:
                log.info(
                    "%s: %d new daemons, %d gone, %d in all",
                    name,
                    len(changes.added),
                    len(changes.removed),
                    len(names.followed()),
                )
                await apply(changes)
        await asyncio.sleep(seconds)
