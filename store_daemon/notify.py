"""Tells the service manager how the daemon is: the protocol of sd_notify(3), without a library.

Outside of a service of Type=notify there is no $NOTIFY_SOCKET and every call does nothing. A
manager that cannot be reached is logged and never stops the daemon.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping

log = logging.getLogger(__name__)


class ServiceManager:
    """Sends one datagram for each word. Never blocks, never raises after it was made."""

    def __init__(self, address: str = "", watchdog_seconds: float = 0.0) -> None:
        """An address with a leading @ is an abstract socket's; an empty one is nobody's."""
        self.watchdog_seconds = watchdog_seconds
        """The manager ends a daemon that is silent for so long; 0: it never does."""
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        if address and not address.startswith(("@", "/")):
            log.warning("NOTIFY_SOCKET %s is of a kind that is not known here", address)
        elif address:
            self._socket = socket.socket(
                socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            )

    @classmethod
    def of_environment(cls, environ: Mapping[str, str], pid: int) -> ServiceManager:
        """The manager that started the process `pid` with this environment."""
        seconds = 0.0
        if environ.get("WATCHDOG_PID", str(pid)) == str(pid):
            text = environ.get("WATCHDOG_USEC", "0")
            seconds = int(text) / 1e6 if text.isdecimal() else 0.0
        return cls(environ.get("NOTIFY_SOCKET", ""), seconds)

    def starting(self, doing: str) -> None:
        self._send(f"STATUS=recovering: {doing}")

    def ready(self, status: str) -> None:
        """Serving: at first, and again after `reloading`."""
        self._send(f"READY=1\nSTATUS={status}\nMAINPID={os.getpid()}")

    def reloading(self) -> None:
        microseconds = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send(f"RELOADING=1\nMONOTONIC_USEC={microseconds}\nSTATUS=reloading")

    def stopping(self) -> None:
        self._send("STOPPING=1\nSTATUS=draining")

    async def keep_watchdog(self, is_healthy: Callable[[], bool]) -> None:
        """Show, twice in each watchdog time, that the loop turns and all is well; until cancelled.

        While it is not, nothing is sent, and the manager restarts the daemon.
        """
        if not self.watchdog_seconds:
            return
        while True:
            if is_healthy():
                self._send("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_seconds / 2)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, words: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendto(words.encode(), self._address)
        except OSError as error:
            log.warning("the service manager cannot be told %s: %s", words.split("\n")[0], error)
