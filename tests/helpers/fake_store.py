"""A store daemon's clients without a daemon: a dict of blocks, and faults on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import cast

from client_sdk.sync_client import SyncClient
from emberkv_proto.errors import CorruptionError, UnavailableError
from emberkv_proto.types import AcquirePolicy, BlockHash, EngineInfo, SaltId, Source, StageState


@dataclass
class FakeStore:
    """What all its clients share. Set a fault before the call that is to meet it."""

    part_bytes: int
    blocks: dict[BlockHash, bytes] = field(default_factory=dict)
    parents: dict[BlockHash, BlockHash | None] = field(default_factory=dict)
    source: Source = Source.DRAM
    is_dead: bool = False
    """Every call fails at once."""
    dies_before_heartbeat: bool = False
    """The daemon goes away after the blocks were verified and copied."""
    hang_seconds: float = 0.0
    """How long an acquire takes."""
    corrupt: set[BlockHash] = field(default_factory=set)
    save_gate: threading.Event | None = None
    """While it is there and not set, a stage does not return."""
    announced: list[EngineInfo] = field(default_factory=list)
    salt_ids: list[SaltId | None] = field(default_factory=list)
    """Of each stage."""
    live_leases: int = 0
    live_stages: int = 0

    def connect(self, engine: EngineInfo | None) -> SyncClient:
        return cast(SyncClient, _Client(self, engine))

    def check_integrity(self) -> None:
        assert self.live_leases == 0, "a lease was not released"
        assert self.live_stages == 0, "a stage was not closed"


class _Client:
    def __init__(self, store: FakeStore, engine: EngineInfo | None) -> None:
        self._store = store
        self._engine = engine

    def __enter__(self) -> _Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def connect(self) -> None:
        self._check()
        if self._engine is not None:
            self._store.announced.append(self._engine)

    def close(self) -> None:
        return None

    def heartbeat(self) -> None:
        if self._store.dies_before_heartbeat:
            raise UnavailableError("the daemon died")
        self._check()

    def acquire(
        self, hashes: Sequence[BlockHash], *, policy: AcquirePolicy, deadline_seconds: float
    ) -> _Lease:
        assert policy is AcquirePolicy.TIMEOUT
        assert deadline_seconds > 0
        time.sleep(self._store.hang_seconds)
        self._check()
        return _Lease(self._store, hashes)

    def stage(
        self,
        hashes: Sequence[BlockHash],
        parent: BlockHash | None = None,
        salt_id: SaltId | None = None,
    ) -> _Stage:
        self._store.salt_ids.append(salt_id)
        if self._store.save_gate is not None:
            assert self._store.save_gate.wait(60)
        self._check()
        return _Stage(self._store, hashes, parent)

    def _check(self) -> None:
        if self._store.is_dead:
            raise UnavailableError("no daemon")


class _Lease:
    """All present blocks are ready at once."""

    def __init__(self, store: FakeStore, hashes: Sequence[BlockHash]) -> None:
        self._store = store
        self._hashes: list[BlockHash] = []
        for block_hash in hashes:
            if block_hash not in store.blocks:
                break
            self._hashes.append(block_hash)
        self.usable_blocks = self.ready_blocks = len(self._hashes)
        self.sources = [store.source] * self.usable_blocks

    def __enter__(self) -> _Lease:
        self._store.live_leases += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._store.live_leases -= 1

    def view(self, block: int) -> memoryview:
        data = self._store.blocks[self._hashes[block]]
        if self._hashes[block] in self._store.corrupt:
            data = bytes(byte ^ 0xFF for byte in data)
        return memoryview(data)

    def verify(self, block: int) -> None:
        if self._hashes[block] in self._store.corrupt:
            raise CorruptionError("checksum differs")

    def require_valid(self) -> None:
        return None


class _Stage:
    def __init__(
        self, store: FakeStore, hashes: Sequence[BlockHash], parent: BlockHash | None
    ) -> None:
        self._store = store
        self._hashes = hashes
        self._parent = parent
        self.states = [
            StageState.PRESENT if block_hash in store.blocks else StageState.GRANTED
            for block_hash in hashes
        ]
        self._slots = [bytearray(store.part_bytes) for _ in hashes]

    def __enter__(self) -> _Stage:
        self._store.live_stages += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._store.live_stages -= 1

    def view(self, block: int) -> memoryview:
        return memoryview(self._slots[block])

    def commit(self, indices: Sequence[int]) -> int:
        for block in indices:
            block_hash = self._hashes[block]
            self._store.blocks[block_hash] = bytes(self._slots[block])
            self._store.parents[block_hash] = self._hashes[block - 1] if block else self._parent
        return len(indices)
