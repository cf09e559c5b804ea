"""LMCache's L2 in the node's shared pool: a plugin for LMCache 0.5.6's storage manager.

    {"type": "plugin", "module_path": "client_sdk.engine.lmcache_adapter",
     "class_name": "EmberL2Adapter", "adapter_params": {"socket_path": "/run/emberkv/daemon.sock"}}

An object is one block: its bytes are copied once, between LMCache's memory and the mapped pool. It
is known by everything in its key, and kept apart by its length, each length a namespace of its own.
A lock is a lease. The daemon evicts by itself; LMCache's own eviction of L2 has nothing to do.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import blake3
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from client_sdk import Lease, SyncClient
from emberkv_proto.errors import ConfigError, EmberError, InvalidRequestError
from emberkv_proto.hashing import salt_id
from emberkv_proto.layout import MAX_PART_BYTES, Group, GroupKind, Namespace
from emberkv_proto.types import AcquirePolicy, BlockHash, StageState

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.memory_management import MemoryObj

FAMILY = "lmcache"
BRING_SECONDS = 10.0
"""How long a load waits for an object that comes from SSD or a peer."""
MAX_LENGTHS = 64
"""Different lengths of objects, each with a session of its own."""
_LENGTH = struct.Struct("<I")
_STORED = (StageState.GRANTED, StageState.PRESENT, StageState.IN_PROGRESS)


class EmberL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """Thread-safe. A daemon that is away is a miss, and a store that failed.

    Args:
        params: `socket_path`; `isolation_domain` keeps deployments apart that share a daemon;
            `threads` that copy (4); `timeout_seconds` that one call may take (1).

    Raises ConfigError for parameters that it does not know.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: object = None) -> None:
        super().__init__()
        known = {"socket_path", "isolation_domain", "threads", "timeout_seconds"}
        if not isinstance(params.get("socket_path"), str) or not params.keys() <= known:
            raise ConfigError(
                f"adapter_params wants socket_path, and may have {sorted(known - {'socket_path'})};"
                f" got {sorted(params)}"
            )
        self._socket_path = Path(params["socket_path"])
        self._domain = str(params.get("isolation_domain", ""))
        self._timeout_seconds = float(params.get("timeout_seconds", 1.0))
        self._threads = ThreadPoolExecutor(int(params.get("threads", 4)), "ember-lmcache")
        self._store_fd, self._lookup_fd, self._load_fd = (_event_fd() for _ in range(3))
        self._lock = threading.Lock()
        self._clients: dict[int, SyncClient] = {}
        self._leases: dict[ObjectKey, list[Lease]] = {}
        self._stored: dict[int, L2StoreResult] = {}
        self._found: dict[int, Bitmap] = {}
        self._loaded: dict[int, Bitmap] = {}
        self._last_task = 0
        self._is_closed = False

    def get_store_event_fd(self) -> int:
        return self._store_fd

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookup_fd

    def get_load_event_fd(self) -> int:
        return self._load_fd

    # ---- storing ----

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        def store() -> L2StoreResult:
            sizes = [
                self._store(key, _bytes_of(held)) for key, held in zip(keys, objects, strict=True)
            ]
            self._notify_keys_stored(keys, sizes)
            return L2StoreResult(True, sum(sizes))

        return self._submit(store, self._stored, L2StoreResult(False, 0), self._store_fd)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        with self._lock:
            done, self._stored = self._stored.copy(), self._stored
            self._stored.clear()
        return done

    def _store(self, key: ObjectKey, content: memoryview) -> int:
        """Raises EmberError when there is no room, or no daemon."""
        client = self._client(len(content))
        owner = salt_id(key.cache_salt.encode())
        with client.stage([self._hash(key, len(content))], salt_id=owner) as staged:
            if staged.states[0] not in _STORED:
                raise InvalidRequestError(f"no room for {len(content)} bytes")
            if staged.granted:
                staged.view(0)[:] = content
                staged.commit()
        return len(content)

    # ---- looking up ----

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: Mapping[int, MemoryLayoutDesc]
    ) -> int:
        lengths = {group: _length_of(desc) for group, desc in (group_layout_descs or {}).items()}

        def look_up() -> Bitmap:
            found = Bitmap(len(keys))
            for number, key in enumerate(keys):
                if self._acquire(key, lengths.get(key.object_group_id)):
                    found.set(number)
            return found

        return self._submit(look_up, self._found, Bitmap(len(keys)), self._lookup_fd)

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._found.pop(task_id, None)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        with self._lock:
            ended = [self._leases[key].pop() for key in keys if self._leases.get(key)]
            self._leases = {key: held for key, held in self._leases.items() if held}
        for lease in ended:
            with contextlib.suppress(EmberError):  # the session's end has ended it
                lease.release()

    def _acquire(self, key: ObjectKey, length: int | None) -> bool:
        """Lock one object. Its length is a hint: one never met here may be no length at all."""
        with self._lock:
            lengths = [length] if length in self._clients else [length, *self._clients]
        for candidate in filter(None, lengths):
            with contextlib.suppress(EmberError):  # counted by the client; a miss
                lease = self._lease(key, candidate)
                if lease.usable_blocks:
                    with self._lock:
                        self._leases.setdefault(key, []).append(lease)
                    return True
                lease.release()
        return False

    # ---- loading ----

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        def load() -> Bitmap:
            loaded = Bitmap(len(keys))
            for number, (key, held) in enumerate(zip(keys, objects, strict=True)):
                with contextlib.suppress(EmberError):
                    if self._load(key, _bytes_of(held)):
                        loaded.set(number)
            self._notify_keys_accessed(keys)
            return loaded

        return self._submit(load, self._loaded, Bitmap(len(keys)), self._load_fd)

    def query_load_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._loaded.pop(task_id, None)

    def _load(self, key: ObjectKey, target: memoryview) -> bool:
        with self._lock:
            held = self._leases.get(key)
            lease = held[-1] if held else None
        if lease is not None:
            return _copy(lease, target)
        with self._lease(key, len(target)) as own:  # it may be loaded without a lock
            return _copy(own, target)

    # ---- the rest ----

    def report_status(self) -> dict[str, Any]:
        with self._lock:
            clients = list(self._clients.values())
            locks = sum(map(len, self._leases.values()))
        return {
            "is_healthy": all(client.is_connected for client in clients),
            "socket_path": str(self._socket_path),
            "sessions": len(clients),
            "locked_objects": locks,
            "errors": sum(client.counters.errors for client in clients),
        }

    def close(self) -> None:
        """Idempotent. What is under way is finished first."""
        if self._is_closed:
            return
        self._is_closed = True
        self._threads.shutdown()
        self.submit_unlock([key for key, held in self._leases.items() for _ in held])
        for client in self._clients.values():
            client.close()
        for fd in (self._store_fd, self._lookup_fd, self._load_fd):
            os.close(fd)

    def check_integrity(self) -> None:
        with self._lock:
            assert len(self._clients) <= MAX_LENGTHS
            assert all(self._leases.values()), "a key without a lease is kept"

    # ---- inner steps ----

    def _submit(
        self, work: Callable[[], Any], results: dict[int, Any], failed: Any, event_fd: int
    ) -> int:
        with self._lock:
            self._last_task += 1
            task = self._last_task

        def run() -> None:
            result = failed
            try:
                with contextlib.suppress(EmberError):
                    result = work()
            finally:  # whatever happened, somebody waits for the answer
                with self._lock:
                    results[task] = result
                os.eventfd_write(event_fd, 1)

        self._threads.submit(run)
        return task

    def _client(self, length: int) -> SyncClient:
        with self._lock:
            client = self._clients.get(length)
            if client is None:
                if len(self._clients) >= MAX_LENGTHS:
                    raise InvalidRequestError(f"more than {MAX_LENGTHS} lengths of objects")
                client = self._clients[length] = SyncClient(
                    self._socket_path,
                    _namespace(length, self._domain),
                    client_name="lmcache",
                    timeout_seconds=self._timeout_seconds,
                )
        return client

    def _lease(self, key: ObjectKey, length: int) -> Lease:
        return self._client(length).acquire(
            [self._hash(key, length)],
            policy=AcquirePolicy.WAIT_COMPLETE,
            deadline_seconds=BRING_SECONDS,
        )

    def _hash(self, key: ObjectKey, length: int) -> BlockHash:
        fields = (
            self._domain.encode(),
            key.model_name.encode(),
            key.cache_salt.encode(),
            bytes(key.chunk_hash),
            b"%d %d %d" % (key.kv_rank, key.object_group_id, length),
        )
        hashed = blake3.blake3(b"emberkv lmcache object\0")
        for field in fields:
            hashed.update(_LENGTH.pack(len(field)) + field)
        return BlockHash(hashed.digest())


def _namespace(length: int, domain: str) -> Namespace:
    """Raises InvalidRequestError for a length that no block can have."""
    if not 1 <= length <= MAX_PART_BYTES:
        raise InvalidRequestError(f"an object of {length} bytes")
    return Namespace(
        model=FAMILY,
        weights_id="objects",
        kv_dtype="bytes",
        layout_fingerprint="lmcache-object-1",
        block_tokens=1,
        groups=(Group(GroupKind.FULL, 1, length),),
        engine_family=FAMILY,
        isolation_domain=domain,
    )


def _copy(lease: Lease, target: memoryview) -> bool:
    """Whether the object came, whole and unchanged. Raises EmberError."""
    if not lease.usable_blocks or lease.wait(1, BRING_SECONDS) < 1:
        return False
    view = lease.view(0)
    if len(view) != len(target):
        return False
    target[:] = view
    lease.require_valid()
    return True


def _bytes_of(held: MemoryObj) -> memoryview:
    """An object's own bytes, without what its allocator added."""
    return memoryview(held.byte_array).cast("B")[: held.get_size()]


def _length_of(desc: MemoryLayoutDesc) -> int:
    pairs: Sequence[tuple[Any, Any]] = list(zip(desc.shapes, desc.dtypes, strict=True))
    return sum(int(shape.numel()) * int(dtype.itemsize) for shape, dtype in pairs)


def _event_fd() -> int:
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
