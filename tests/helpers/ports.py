"""TCP ports of loopback for tests: for servers that must know theirs beforehand, and with nobody.

The kernel gives none of these away while a test holds it, or to whoever asks for any port.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from client_sdk.cli.cluster_plan import LOOPBACK, choose_port

TRIES = 100


def free_port() -> int:
    """A port that nobody listens on, no client gets, and no other call returned."""
    return choose_port()


def free_pair(apart: int = 1) -> int:
    """A port that is free as `free_port` gives it, and so is the one so far above it."""
    for _ in range(TRIES):
        port = choose_port()
        if port - apart >= 10_000:
            port -= apart  # so that both lie below the range of clients
        with socket.socket() as one, socket.socket() as two:
            try:
                one.bind((LOOPBACK, port))
                two.bind((LOOPBACK, port + apart))
            except OSError:
                continue
        return port
    raise AssertionError(f"no two free ports that are {apart} apart")


@contextmanager
def refusing_port() -> Iterator[int]:
    """A port that refuses connections, and that nobody else can get, inside the block."""
    with socket.socket() as held:
        held.bind((LOOPBACK, 0))
        yield int(held.getsockname()[1])
