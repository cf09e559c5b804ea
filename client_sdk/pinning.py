"""Pools registered with a GPU's driver, so that copies to and from it need no bounce buffer.

Registering takes seconds for each 10 GiB, so a thread of its own does it, chunk by chunk; until it
is through, and where the driver refuses, copies work as they are, only slower.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from client_sdk.attached_pool import AttachedPool, PoolMapping

log = logging.getLogger("emberkv.pinning")
PIN_CHUNK_BYTES = 64 << 30
"""The most that is registered by one call."""
CLOSE_SECONDS = 60.0
"""How long the chunk under way, and copies, are waited for at the end."""


class HostRegistry(Protocol):
    """A driver that pins memory of the host. A call may take seconds, and raises when it fails."""

    def register(self, address: int, length: int) -> None: ...

    def unregister(self, address: int) -> None: ...


@dataclass(eq=False, slots=True)
class _Pinned:
    """One pool, and what is registered of it."""

    mapping: PoolMapping
    """Keeps the memory mapped for as long as the driver knows it."""
    pools: set[weakref.ref[AttachedPool]] = field(default_factory=set)
    """Of the sessions that used it and are not over."""
    addresses: list[int] = field(default_factory=list)
    users: int = 0
    is_begun: bool = False
    """Whether registering it was tried."""


class PoolPinning:
    """Keeps the pool that was used last registered. Any thread may call it.

    Nothing here raises: a failure is logged once, told to `failed`, and copies go on unpinned. What
    the driver took before it refused a chunk stays registered, since copies may run on it. A pool
    is given back when its last user has left and another one is used, or no session has it: its
    memory would stay taken beside that of a daemon that was started again.
    """

    def __init__(self, registry: HostRegistry | None, failed: Callable[[], None]) -> None:
        """Without a registry nothing needs to be pinned, and every call does nothing.

        Args:
            failed: called from the pinning thread for each pool that cannot be pinned, or of
                which a chunk cannot be given back.
        """
        self._registry = registry
        self._failed = failed
        self._changed = threading.Condition()
        self._current: _Pinned | None = None
        self._retired: list[_Pinned] = []
        """Of daemons before; copies may still run on them."""
        self._is_closing = False
        self._has_warned = False
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def use(self, pool: AttachedPool) -> Iterator[None]:
        """While copies to or from this pool run. Begins to pin it, and waits for nothing."""
        if self._registry is None:
            yield
            return
        with self._changed:
            pinned = self._pinned(pool.mapping)
            pinned.pools.add(weakref.ref(pool, self._left))
            pinned.users += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                pinned.users -= 1
                self._changed.notify_all()

    def is_split(self, pool: AttachedPool, offset: int) -> bool:
        """Whether a part lies in two chunks: the driver copies within one only."""
        if self._registry is None:
            return False
        return offset // PIN_CHUNK_BYTES != (offset + pool.part_bytes - 1) // PIN_CHUNK_BYTES

    def close(self) -> None:
        """Give back all that was registered, once the chunk under way and all copies are over.

        Waits for CLOSE_SECONDS at most. Idempotent; later users copy unpinned.
        """
        with self._changed:
            self._is_closing = True
            thread, self._thread = self._thread, None
            self._changed.notify_all()
        if thread is not None:
            thread.join(CLOSE_SECONDS)
            if thread.is_alive():
                log.warning("EmberKV: the pool stays pinned: copies or the driver did not end")

    @property
    def pinned_bytes(self) -> int:
        """Of the pool used last, what is registered now."""
        with self._changed:
            current = self._current
            if current is None:
                return 0
            return min(len(current.addresses) * PIN_CHUNK_BYTES, current.mapping.length)

    def check_integrity(self) -> None:
        """Assert that chunks are registered once, and that a pool without users is not retired."""
        with self._changed:
            known = [*self._retired, *([self._current] if self._current else [])]
            addresses = [address for pinned in known for address in pinned.addresses]
            assert len(addresses) == len(set(addresses)), "a chunk is registered twice"
            assert all(pinned.users >= 0 for pinned in known)
            assert not (known and self._registry is None)

    # ---- inside, with the lock ----

    def _pinned(self, mapping: PoolMapping) -> _Pinned:
        for pinned in (self._current, *self._retired):
            if pinned is not None and pinned.mapping is mapping:
                return pinned
        pinned = _Pinned(mapping)
        if self._is_closing:
            return pinned
        if self._current is not None:
            self._retired.append(self._current)
        self._current = pinned
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="emberkv-pin", daemon=True)
            self._thread.start()
        return pinned

    def _next(self) -> Callable[[], None] | None:
        """What the thread has to do now."""
        if self._current is not None and (self._is_closing or not self._current.pools):
            self._retired.append(self._current)
            self._current = None
        for pinned in self._retired:
            if not pinned.users:
                self._retired.remove(pinned)
                return lambda: self._give_back(pinned)
        current = self._current
        if current is not None and not current.is_begun:
            current.is_begun = True
            return lambda: self._pin(current)
        return None

    def _left(self, pool: weakref.ref[AttachedPool]) -> None:
        """A session is over. The collector may call this in any thread."""
        with self._changed:
            for pinned in (self._current, *self._retired):
                if pinned is not None:
                    pinned.pools.discard(pool)
            self._changed.notify_all()

    # ---- the pinning thread ----

    def _run(self) -> None:
        end: float | None = None
        while True:
            with self._changed:
                while (job := self._next()) is None:
                    if self._is_closing:
                        end = end or time.monotonic() + CLOSE_SECONDS
                        if not self._retired or time.monotonic() >= end:
                            return
                        self._changed.wait(end - time.monotonic())
                    else:
                        self._changed.wait()
            job()

    def _pin(self, pinned: _Pinned) -> None:
        assert self._registry is not None
        mapping = pinned.mapping
        for start in range(0, mapping.length, PIN_CHUNK_BYTES):
            with self._changed:
                if self._is_closing or pinned is not self._current or not pinned.pools:
                    return  # what is registered of it is given back as it retires
            length = min(PIN_CHUNK_BYTES, mapping.length - start)
            try:
                self._registry.register(mapping.address + start, length)
            except Exception as error:
                self._warn(f"only {start} bytes of the pool are pinned: {error}")
                return
            with self._changed:
                pinned.addresses.append(mapping.address + start)
        log.info("EmberKV: %d bytes of the pool are pinned", mapping.length)

    def _give_back(self, pinned: _Pinned) -> None:
        assert self._registry is not None
        while pinned.addresses:
            with self._changed:
                address = pinned.addresses.pop()
            try:
                self._registry.unregister(address)
            except Exception as error:
                self._warn(f"a chunk of the pool cannot be given back: {error}")

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            log.warning("EmberKV: %s; copies go on without", text)
        self._has_warned = True
        self._failed()
