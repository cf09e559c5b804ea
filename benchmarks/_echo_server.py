"""A bare echo on uvloop in a process of its own: what no daemon built like ours can be faster than.

`python -m benchmarks._echo_server PATH` listens there and writes a line once it does.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import uvloop

from benchmarks._daemon import START_SECONDS

Echo = Callable[[bytes], None]


class _Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


async def _serve(path: str) -> None:
    server = await asyncio.get_running_loop().create_unix_server(_Echo, path)
    print("listening", flush=True)
    await server.serve_forever()


@contextmanager
def echo_server() -> Iterator[Echo]:
    """Give a function that sends bytes and waits until all of them are back."""
    with tempfile.TemporaryDirectory(prefix="emberkv-bench-") as name:
        path = Path(name) / "echo.sock"
        command = [sys.executable, "-m", "benchmarks._echo_server", str(path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise SystemExit("the echo server did not start")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.connect(str(path))
                yield lambda data: _round_trip(sock, data)
        finally:
            process.terminate()
            process.communicate(timeout=START_SECONDS)


def _round_trip(sock: socket.socket, data: bytes) -> None:
    sock.sendall(data)
    missing = len(data)
    while missing:
        missing -= len(sock.recv(missing))


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1]))
