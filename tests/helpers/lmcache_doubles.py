"""As much of LMCache 0.5.6 as its L2 plugins see: what the adapter inherits, takes and answers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any


class Bitmap:
    """One bit for each key of a task."""

    def __init__(self, size: int) -> None:
        self.bits = [False] * size

    def set(self, number: int) -> None:
        self.bits[number] = True


class L2StoreResult(int):
    """Bytes that were stored; -1 for a failure."""

    def __new__(cls, success: bool, bytes_transferred: int) -> L2StoreResult:
        return super().__new__(cls, bytes_transferred if success else -1)


class L2AdapterInterface:
    """Keeps what the adapter tells its listeners."""

    def __init__(self, max_capacity_bytes: int = 0) -> None:
        self.told: list[tuple[str, int]] = []

    def _notify_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        self.told.append(("stored", sum(sizes)))

    def _notify_keys_accessed(self, keys: list[Any]) -> None:
        self.told.append(("accessed", len(keys)))


@dataclass(frozen=True)
class ObjectKey:
    chunk_hash: bytes
    model_name: str = "m"
    kv_rank: int = 0
    object_group_id: int = 0
    cache_salt: str = ""


class MemoryObj:
    """Bytes, with some of its allocator's behind them."""

    def __init__(self, content: bytes) -> None:
        self.byte_array = bytearray(content + b"\xff" * 100)
        self._size = len(content)

    def get_size(self) -> int:
        return self._size

    @property
    def content(self) -> bytes:
        assert self.byte_array[self._size :] == b"\xff" * 100, "written beyond the object"
        return bytes(self.byte_array[: self._size])


@contextmanager
def lmcache_doubles() -> Iterator[None]:
    """`import lmcache...` finds these inside the block."""
    contents: dict[str, dict[str, Any]] = {
        "lmcache": {},
        "lmcache.lmcache_native": {"Bitmap": Bitmap},
        "lmcache.v1": {},
        "lmcache.v1.distributed": {},
        "lmcache.v1.distributed.internal_api": {"L2StoreResult": L2StoreResult},
        "lmcache.v1.distributed.l2_adapters": {},
        "lmcache.v1.distributed.l2_adapters.base": {"L2AdapterInterface": L2AdapterInterface},
    }
    before = set(sys.modules)
    for name, members in contents.items():
        module = ModuleType(name)
        vars(module).update(members)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in contents:
            del sys.modules[name]
        if "client_sdk.engine.lmcache_adapter" not in before:
            sys.modules.pop("client_sdk.engine.lmcache_adapter", None)
