"""Engines that answer at once: one process, one epoll, several ports. A child of `router`.

Plain sockets, since each chunk of a stream must leave in a send of its own, as an engine's tokens
do; without a pause a stream sends as many in a row as its socket takes. What the engines hold is
told on a ZMQ port in vLLM's form, so that a router has hits to weigh.
"""

from __future__ import annotations

import json
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from benchmarks._workers import serve

MODEL = "m"
TOKEN_BYTES = 4
BLOCK_TOKENS = 16
"""Of the engines' own blocks."""
READ_BYTES = 1 << 18


def tokens_of(text: str) -> list[int]:
    """A tokenizer of this benchmark's own: four bytes are a token."""
    raw = text.encode()
    return [
        int.from_bytes(raw[at : at + TOKEN_BYTES], "little") >> 8
        for at in range(0, len(raw), TOKEN_BYTES)
    ]


def rendered(messages: Sequence[Any]) -> str:
    return "".join(f"<|{item['role']}|>{item['content']}" for item in messages)


def _response(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


ANSWER = _response(
    json.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": MODEL,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "A reply of some length. " * 3},
                    "text": "A reply",
                    "finish_reason": "stop",
                }
            ],
            "usage": {"prompt_tokens": 10, "completion_tokens": 20, "total_tokens": 30},
        }
    ).encode()
)
MODELS = _response(
    json.dumps(
        {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 131072}]}
    ).encode()
)
STATUS = _response(
    json.dumps(
        {
            "status": "ok",
            "model_path": MODEL,
            "served_model_name": MODEL,
            "tokenizer_path": "",
            "is_generation": True,
            "tp_size": 1,
            "dp_size": 1,
            "version": "0.5",
        }
    ).encode()
)
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)
STREAM_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def _event(number: int) -> bytes:
    event = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "delta": {"content": f" tok{number}"}, "finish_reason": None}],
    }
    data = b"data: " + json.dumps(event).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


class _Connection:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.pending = b""
        self.left = 0
        self.due = 0.0
        self.unsent = b""


class Engines:
    """All ports, on one thread. `chunks` and `pause_seconds` are of the next streams."""

    def __init__(self) -> None:
        self.chunks = 200
        self.pause_seconds = 0.0
        self._selector = selectors.DefaultSelector()
        self._streams: set[_Connection] = set()
        self._events = [_event(number) for number in range(1000)]

    def listen(self, count: int) -> list[int]:
        ports = []
        for _ in range(count):
            sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ, None)
            ports.append(sock.getsockname()[1])
        return ports

    def run(self) -> None:
        while True:
            for key, mask in self._selector.select(self._wait_seconds()):
                if key.data is None:
                    self._accept(key.fileobj)  # type: ignore[arg-type]
                elif mask & selectors.EVENT_READ:
                    self._read(key.data)
            now = time.monotonic()
            for connection in tuple(self._streams):
                self._step(connection, now)

    def _wait_seconds(self) -> float | None:
        if not self._streams:
            return None
        earliest = min(connection.due for connection in self._streams)
        return max(0.0, earliest - time.monotonic())

    def _accept(self, listener: socket.socket) -> None:
        sock, _ = listener.accept()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(sock, selectors.EVENT_READ, _Connection(sock))

    def _drop(self, connection: _Connection) -> None:
        self._streams.discard(connection)
        self._selector.unregister(connection.sock)
        connection.sock.close()

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        connection.pending += data
        try:
            self._answer(connection)
        except OSError:
            self._drop(connection)

    def _answer(self, connection: _Connection) -> None:
        while (end := connection.pending.find(b"\r\n\r\n")) >= 0:
            head = connection.pending[:end].lower()
            body_at = end + 4
            at = head.find(b"content-length:")
            if at >= 0:
                length = int(head[at + 15 :].split(b"\r\n", 1)[0])
                total = body_at + length
            elif b"transfer-encoding: chunked" in head:
                last = connection.pending.find(b"0\r\n\r\n", body_at)
                if last < 0:
                    return
                total = last + 5
            else:
                total = body_at
            if len(connection.pending) < total:
                return
            body = connection.pending[body_at:total]
            connection.pending = connection.pending[total:]
            self._respond(connection, head, body)

    def _respond(self, connection: _Connection, head: bytes, body: bytes) -> None:
        if not head.startswith(b"post"):
            self._send(connection, MODELS if b"/v1/models" in head[:40] else STATUS)
        elif head.startswith(b"post /tokenize"):
            asked = json.loads(body)
            text = rendered(asked["messages"]) if "messages" in asked else asked["prompt"]
            self._send(connection, _response(json.dumps({"tokens": tokens_of(text)}).encode()))
        elif b'"stream": true' in body or b'"stream":true' in body:
            self._send(connection, STREAM_HEAD)
            connection.left = self.chunks
            connection.due = time.monotonic()
            self._streams.add(connection)
        else:
            self._send(connection, ANSWER)

    def _send(self, connection: _Connection, data: bytes) -> None:
        try:
            sent = connection.sock.send(data)
        except BlockingIOError:
            sent = 0
        connection.unsent = data[sent:]

    def _step(self, connection: _Connection, now: float) -> None:
        try:
            if connection.unsent:
                self._send(connection, connection.unsent)
            while connection.left and connection.due <= now and not connection.unsent:
                self._send(connection, self._events[connection.left])
                connection.left -= 1
                connection.due += self.pause_seconds
            if not connection.left and not connection.unsent:
                self._send(connection, STREAM_END)
                self._streams.discard(connection)
        except OSError:
            self._drop(connection)


class Announcer:
    """Publishes what the engines hold, and replays it to a follower that came late."""

    def __init__(self) -> None:
        import msgspec
        import zmq

        self._encode = msgspec.msgpack.Encoder().encode
        self._context = zmq.Context()
        self._zmq = zmq
        self._ports: list[tuple[Any, Any]] = []
        self._kept: list[list[bytes]] = []

    def open(self, count: int) -> list[list[str]]:
        """A pair of endpoints an engine: events, replay."""
        endpoints = []
        for _ in range(count):
            pair = []
            for kind in (self._zmq.PUB, self._zmq.ROUTER):
                sock = self._context.socket(kind)
                sock.setsockopt(self._zmq.LINGER, 0)
                port = sock.bind_to_random_port("tcp://127.0.0.1")
                pair.append((sock, f"tcp://127.0.0.1:{port}"))
            self._ports.append((pair[0][0], pair[1][0]))
            self._kept.append([])
            endpoints.append([pair[0][1], pair[1][1]])
            threading.Thread(target=self._replay, args=(len(self._kept) - 1,), daemon=True).start()
        return endpoints

    def store(self, engine: int, texts: Sequence[str]) -> None:
        """This engine has the whole blocks of these prompts in its HBM."""
        for number, text in enumerate(texts):
            ids = tokens_of(text)
            blocks = len(ids) // BLOCK_TOKENS
            event = {
                "type": "BlockStored",
                "block_hashes": [(number << 20 | block) + 1 for block in range(blocks)],
                "parent_block_hash": None,
                "token_ids": ids[: blocks * BLOCK_TOKENS],
                "block_size": BLOCK_TOKENS,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
            }
            payload = self._encode([time.time(), [event], 0])
            kept = self._kept[engine]
            kept.append(payload)
            seq = (len(kept) - 1).to_bytes(8, "big")
            self._ports[engine][0].send_multipart([b"", seq, payload])

    def _replay(self, engine: int) -> None:
        sock = self._ports[engine][1]
        while True:
            frames = sock.recv_multipart()
            client, first = frames[0], int.from_bytes(frames[-1], "big")
            kept = self._kept[engine]
            for seq in range(first, len(kept)):
                sock.send_multipart([client, b"", b"", seq.to_bytes(8, "big"), kept[seq]])
            sock.send_multipart([client, b"", b"", b"\xff" * 8, b""])


def main() -> None:
    engines = Engines()

    def listen(count: int) -> list[int]:
        ports = engines.listen(count)
        threading.Thread(target=engines.run, daemon=True).start()
        return ports

    def stream(chunks: int, pause_seconds: float) -> None:
        engines.chunks, engines.pause_seconds = chunks, pause_seconds

    announcer = Announcer()
    serve(
        {
            "listen": listen,
            "stream": stream,
            "announce": announcer.open,
            "store": announcer.store,
        }
    )


if __name__ == "__main__":
    main()
