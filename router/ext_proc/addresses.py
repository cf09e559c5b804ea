"""Engines' addresses as Envoy wants them: ip:port. Names are looked up beside the requests."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from client_sdk.aio import timeout
from router.engines import Engine, EngineTable

log = logging.getLogger(__name__)

LOOKUP_SECONDS = 2.0
"""How long one lookup may take."""
FRESH_SECONDS = 30.0
CHECK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class _Found:
    ip: str
    """Empty when the name could not be found; the last address stays while it cannot."""
    at: float


class Addresses:
    """ip:port of every engine in the table. `run` keeps names up to date; reading never waits."""

    def __init__(self, engines: EngineTable, clock: Callable[[], float]) -> None:
        self._engines = engines
        self._clock = clock
        self._found: dict[str, _Found] = {}
        self.failed_lookups = 0

    def of(self, engine: Engine) -> str | None:
        """None while the engine's name is not known to be any address."""
        ip = _literal(engine.host)
        if ip is None:
            found = self._found.get(engine.host)
            ip = found.ip if found else ""
        if not ip:
            return None
        return f"[{ip}]:{engine.port}" if ":" in ip else f"{ip}:{engine.port}"

    async def refresh(self) -> None:
        """Look up the names that are new or were looked up long ago; forget those of nobody."""
        names = {engine.host for engine in self._engines if _literal(engine.host) is None}
        for name in self._found.keys() - names:
            del self._found[name]
        oldest = self._clock() - FRESH_SECONDS
        due = [name for name in names if name not in self._found or self._found[name].at < oldest]
        await asyncio.gather(*map(self._look_up, due))

    async def run(self) -> None:
        while True:
            try:
                await self.refresh()
            except Exception:
                log.exception("looking engines' names up failed; it goes on")
            await asyncio.sleep(CHECK_SECONDS)

    def check_integrity(self) -> None:
        for name, found in self._found.items():
            assert _literal(name) is None, f"{name} needs no lookup"
            assert not found.ip or _literal(found.ip) is not None

    async def _look_up(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        before = self._found.get(name)
        try:
            async with timeout(LOOKUP_SECONDS):
                answers = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            ip = str(answers[0][4][0])
        except (OSError, UnicodeError, TimeoutError, asyncio.TimeoutError) as error:
            self.failed_lookups += 1
            ip = before.ip if before else ""
            log.warning("engine name %s cannot be looked up: %s", name, error)
        self._found[name] = _Found(ip, self._clock())


@lru_cache(maxsize=8192)
def _literal(host: str) -> str | None:
    """The address that `host` spells, if it is one; asked for every engine and request."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return None
