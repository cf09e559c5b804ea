"""Clients in a closed loop: a few connections, each sending its next request after its answer.

A child of `router`, which needs the standard library only. Plain sockets and one epoll; what a
request costs here stays small beside what a proxy costs.
"""

from __future__ import annotations

import base64
import contextlib
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Any

from benchmarks._workers import serve

READ_BYTES = 1 << 18
END = b"0\r\n\r\n"
LIMIT_SECONDS = 100.0


class _Client:
    __slots__ = ("began", "head_end", "length", "received", "sock", "tail", "unsent")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.began = 0.0
        self.unsent = b""
        self.reset()

    def reset(self) -> None:
        self.received = 0
        self.head_end = -1
        self.length = -1
        self.tail = b""


class Load:
    def __init__(self) -> None:
        self._requests: list[bytes] = []

    def prepare(self, path: str, bodies: Sequence[str], headers: dict[str, str]) -> None:
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._requests = []
        for text in bodies:
            body = base64.b64decode(text)
            head = (
                f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nuser-agent: bench\r\naccept: */*\r\n"
                f"content-type: application/json\r\n{lines}content-length: {len(body)}\r\n\r\n"
            )
            self._requests.append(head.encode() + body)

    def run(self, port: int, connections: int, requests: int) -> dict[str, Any]:
        """Send so many; what came, when, and how long each took."""
        selector = selectors.DefaultSelector()
        clients = []
        for _ in range(connections):
            sock = socket.create_connection(("127.0.0.1", port), 10)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setblocking(False)
            client = _Client(sock)
            selector.register(sock, selectors.EVENT_READ, client)
            clients.append(client)
        sent = done = bad = 0
        times: list[float] = []
        began = time.perf_counter()
        for client in clients:
            if sent < requests:
                self._send(selector, client, sent)
                sent += 1
        while done < requests:
            ready = selector.select(5.0)
            if not ready or time.perf_counter() - began > LIMIT_SECONDS:
                raise TimeoutError(f"{done} of {requests} answered")
            for key, mask in ready:
                client = key.data
                if mask & selectors.EVENT_WRITE:
                    self._flush(selector, client)
                if not mask & selectors.EVENT_READ:
                    continue
                data = client.sock.recv(READ_BYTES)
                if not data:
                    raise ConnectionError("the proxy closed a connection")
                if not self._take(client, data):
                    continue
                times.append(time.perf_counter() - client.began)
                bad += client.length == -2
                done += 1
                client.reset()
                if sent < requests:
                    self._send(selector, client, sent)
                    sent += 1
        seconds = time.perf_counter() - began
        for client in clients:
            client.sock.close()
        selector.close()
        times.sort()
        return {
            "seconds": seconds,
            "bad": bad,
            "p50": times[len(times) // 2],
            "p99": times[int(len(times) * 0.99)],
        }

    def _send(self, selector: selectors.BaseSelector, client: _Client, number: int) -> None:
        client.began = time.perf_counter()
        client.unsent = self._requests[number % len(self._requests)]
        self._flush(selector, client)

    def _flush(self, selector: selectors.BaseSelector, client: _Client) -> None:
        with contextlib.suppress(BlockingIOError):
            client.unsent = client.unsent[client.sock.send(client.unsent) :]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.unsent else 0)
        if selector.get_key(client.sock).events != wanted:
            selector.modify(client.sock, wanted, client)

    def _take(self, client: _Client, data: bytes) -> bool:
        """Whether the answer is complete with it. `length` -1: chunked, -2: no 200."""
        client.received += len(data)
        if client.head_end < 0:
            client.tail += data
            end = client.tail.find(b"\r\n\r\n")
            if end < 0:
                return False
            head = client.tail[:end].lower()
            client.head_end = end + 4
            at = head.find(b"content-length:")
            if at >= 0:
                client.length = int(head[at + 15 :].split(b"\r\n", 1)[0])
            if not head.startswith(b"http/1.1 200"):
                raise ConnectionError(f"answered {client.tail[:200]!r}")
        if client.length >= 0:
            return client.received >= client.head_end + client.length
        client.tail = (client.tail + data)[-len(END) :] if len(data) < len(END) else data[-5:]
        return client.tail == END


def main() -> None:
    load = Load()
    serve({"prepare": load.prepare, "run": load.run})


if __name__ == "__main__":
    main()
