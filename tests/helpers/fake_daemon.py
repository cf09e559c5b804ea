"""A small store daemon for the client's tests: right by default, wrong on demand.

It keeps blocks in a pool file that it hands over as the real one does. `faults` maps a method to a
function that gets the right answer and returns what is sent instead (None: silence).
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from google.protobuf.message import Message

from emberkv_proto.errors import EmberError, UnknownLeaseError, UnknownStageError
from emberkv_proto.layout import Namespace
from emberkv_proto.types import Source, StageState, Tier
from emberkv_proto.v1 import common_pb2, store_pb2
from emberkv_proto.wire import HEADER, METHODS, Method, pack_frame, unpack_header

Fault = Callable[[bytes], bytes | None]
SLOT_BYTES = 4096


@dataclass
class _Slot:
    offset: int
    checksum: int


@dataclass
class FakeDaemon:
    """Start with `with`; every thread and descriptor is gone at its end."""

    socket_path: Path
    slots: int = 64
    incarnation: int = 1
    lease_seconds: float = 10.0
    heartbeat_seconds: float = 0.1
    ready_at_once: int | None = None
    """How many leased blocks are ready in ACQUIRE; the others come with WAITs. None: all."""
    brings: int = 1
    """How many blocks a WAIT brings."""
    needed_from: int = 0
    """What ACQUIRE says of it."""
    late_source: Source = Source.DRAM
    """Where ACQUIRE says that the others are."""
    faults: dict[Method, Fault] = field(default_factory=dict)
    hello: Callable[[store_pb2.HelloResponse], None] = lambda _: None
    send_descriptor: bool = True
    refuse: dict[Method, EmberError] = field(default_factory=dict)
    seen: list[Method] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    prefetches: list[int] = field(default_factory=list)
    prefetch_requests: list[store_pb2.PrefetchRequest] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    acquired: list[store_pb2.AcquireRequest] = field(default_factory=list)
    salt_ids: list[bytes] = field(default_factory=list)
    """Of each stage."""

    def __enter__(self) -> FakeDaemon:
        self._pool = tempfile.TemporaryFile()
        self._pool.truncate(self.slots * SLOT_BYTES)
        self._blocks: dict[bytes, _Slot] = {}
        self._stages: dict[int, dict[bytes, int]] = {}
        self._leases: dict[int, list[bytes]] = {}
        self._free = [i * SLOT_BYTES for i in range(self.slots)]
        self._last_id = 0
        self._connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(os.fspath(self.socket_path))
        self._listener.listen(8)
        self._start(self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()
        for thread in self._threads:
            thread.join(30)
        self._pool.close()
        self.socket_path.unlink()

    def hang_up(self) -> None:
        """Drop all connections; new ones are welcome."""
        old, self._connections = self._connections, []  # the client may be back meanwhile
        for connection in old:
            with contextlib.suppress(OSError):  # closed by the client already
                connection.shutdown(socket.SHUT_RDWR)

    def flip_byte(self, block_hash: bytes) -> None:
        slot = self._blocks[block_hash]
        old = os.pread(self._pool.fileno(), 1, slot.offset)
        os.pwrite(self._pool.fileno(), bytes([old[0] ^ 1]), slot.offset)

    def _start(self, run: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=run, args=args, name="fake-daemon")
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            stages: list[int] = []
            while raw := _receive(connection, HEADER.size):
                header = unpack_header(raw)
                request = METHODS[header.method][0].FromString(
                    _receive(connection, header.payload_bytes)
                )
                self.seen.append(header.method)
                try:
                    if header.method in self.refuse:
                        raise self.refuse[header.method]
                    answer = self._answer(header.method, request, stages)
                    frame = pack_frame(header.method, header.request_id, answer.SerializeToString())
                except EmberError as error:
                    detail = common_pb2.ErrorDetail(
                        code=error.code, type=type(error).__name__, message=str(error)
                    )
                    frame = pack_frame(
                        header.method, header.request_id, detail.SerializeToString(), error.code
                    )
                fault = self.faults.get(header.method)
                sent = fault(frame) if fault else frame
                if sent is None:
                    continue
                try:
                    if header.method is Method.HELLO and self.send_descriptor:
                        socket.send_fds(connection, [sent], [self._pool.fileno()])
                    else:
                        connection.sendall(sent)
                except OSError:
                    break
            for stage in stages:
                self._free += self._stages.pop(stage, {}).values()

    def _answer(self, method: Method, request: Message, stages: list[int]) -> Message:
        match request:
            case store_pb2.HelloRequest():
                return self._open(request)
            case store_pb2.ProbeRequest():
                held = [h in self._blocks for h in _split(request.hashes)]
                return store_pb2.ProbeResponse(
                    hit_blocks=_run(held), tiers=bytes((1 << Tier.DRAM) * h for h in held)
                )
            case store_pb2.AcquireRequest():
                self.acquired.append(request)
                return self._acquire(request)
            case store_pb2.WaitRequest():
                return self._wait(request)
            case store_pb2.ReleaseRequest():
                for lease in request.lease_ids:
                    if self._leases.pop(lease, None) is None:
                        raise UnknownLeaseError(f"lease {lease}")
                    self.released.append(lease)
            case store_pb2.StageRequest():
                return self._stage(request, stages)
            case store_pb2.CommitRequest():
                return self._commit(request)
            case store_pb2.AbortRequest():
                self.aborted.append(request.stage_id)
                self._free += self._stages.pop(request.stage_id, {}).values()
            case store_pb2.PrefetchRequest():
                self._last_id += 1
                self.prefetches.append(self._last_id)
                self.prefetch_requests.append(request)
                return store_pb2.PrefetchResponse(
                    scheduled_blocks=len(_split(request.hashes)), prefetch_id=self._last_id
                )
            case store_pb2.CancelPrefetchRequest():
                self.cancelled.append(request.prefetch_id)
            case store_pb2.StatusRequest():
                return store_pb2.StatusResponse(
                    node_id="fake", state="serving", counters={"hits": 2.0}
                )
            case store_pb2.CheckRequest():
                return store_pb2.CheckResponse(problems=["one"])
        return METHODS[method][1]()

    def _open(self, request: store_pb2.HelloRequest) -> store_pb2.HelloResponse:
        hello = store_pb2.HelloResponse(
            node_id="fake",
            incarnation=self.incarnation,
            session_id=1,
            heartbeat_seconds=self.heartbeat_seconds,
            lease_seconds=self.lease_seconds,
            version="0",
        )
        if request.namespace_json:
            namespace = Namespace.from_json(request.namespace_json)
            hello.namespace_id = namespace.id
            hello.pool_bytes = self.slots * SLOT_BYTES
            hello.part_bytes = namespace.part_bytes(request.part)
        self.hello(hello)
        return hello

    def _acquire(self, request: store_pb2.AcquireRequest) -> store_pb2.AcquireResponse:
        hashes = _split(request.hashes)
        usable = _run([h in self._blocks for h in hashes])
        if not usable:
            return store_pb2.AcquireResponse()
        self._last_id += 1
        self._leases[self._last_id] = hashes[:usable]
        ready = usable if self.ready_at_once is None else min(usable, self.ready_at_once)
        return store_pb2.AcquireResponse(
            lease_id=self._last_id,
            expires_in_seconds=self.lease_seconds,
            usable_blocks=usable,
            ready_blocks=ready,
            offsets=self._column(hashes[:ready], "offset"),
            checksums=self._column(hashes[:ready], "checksum"),
            sources=bytes([Source.DRAM] * ready + [self.late_source] * (usable - ready)),
            needed_from=self.needed_from,
        )

    def _wait(self, request: store_pb2.WaitRequest) -> store_pb2.WaitResponse:
        hashes = self._leases[request.lease_id]
        first = request.from_block
        ready = min(first + self.brings, len(hashes))
        return store_pb2.WaitResponse(
            usable_blocks=len(hashes),
            ready_blocks=ready,
            offsets=self._column(hashes[first:ready], "offset"),
            checksums=self._column(hashes[first:ready], "checksum"),
            sources=bytes([3] * (ready - first)),
        )

    def _stage(self, request: store_pb2.StageRequest, stages: list[int]) -> store_pb2.StageResponse:
        self.salt_ids.append(request.salt_id)
        granted: dict[bytes, int] = {}
        states, offsets = bytearray(), []
        for block_hash in _split(request.hashes):
            offset = 0
            if block_hash in self._blocks:
                states.append(StageState.PRESENT)
            elif any(block_hash in stage for stage in self._stages.values()):
                states.append(StageState.IN_PROGRESS)
            elif not self._free:
                states.append(StageState.NO_SPACE)
            else:
                offset = granted[block_hash] = self._free.pop()
                states.append(StageState.GRANTED)
            offsets.append(offset)
        stage_id = 0
        if granted:
            self._last_id += 1
            stage_id = self._last_id
            self._stages[stage_id] = granted
            stages.append(stage_id)
        return store_pb2.StageResponse(
            stage_id=stage_id,
            states=bytes(states),
            offsets=struct.pack(f"<{len(offsets)}Q", *offsets),
        )

    def _commit(self, request: store_pb2.CommitRequest) -> store_pb2.CommitResponse:
        staged = self._stages.get(request.stage_id)
        if staged is None:
            raise UnknownStageError(f"stage {request.stage_id}")
        hashes = _split(request.hashes)
        sums = struct.unpack(f"<{len(hashes)}Q", request.checksums or bytes(8 * len(hashes)))
        for block_hash, value in zip(hashes, sums, strict=True):
            self._blocks[block_hash] = _Slot(staged.pop(block_hash), value)
        return store_pb2.CommitResponse(committed_blocks=len(hashes))

    def _column(self, hashes: list[bytes], name: str) -> bytes:
        values = [getattr(self._blocks[h], name) for h in hashes]
        return struct.pack(f"<{len(values)}Q", *values)


def _receive(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        try:
            chunk = connection.recv(count - len(received))
        except OSError:
            return b""
        if not chunk:
            return b""
        received += chunk
    return received


def _split(packed: bytes) -> list[bytes]:
    return [packed[i : i + 32] for i in range(0, len(packed), 32)]


def _run(held: list[bool]) -> int:
    return held.index(False) if False in held else len(held)
