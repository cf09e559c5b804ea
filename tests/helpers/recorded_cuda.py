"""Stands for `torch.cuda`: writes down what is asked of it, and registers memory as CUDA would.

Copies between tensors of the host are over at once, so what is proved with it is who waits for
what, and what is registered when; that a GPU copies right is not.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass(eq=False)
class RecordedStream:
    number: int


@dataclass(eq=False)
class RecordedEvent:
    cuda: RecordedCuda
    blocking: bool
    stream: RecordedStream | None = None
    is_recorded: bool = False

    def record(self, stream: RecordedStream | None = None) -> None:
        self.stream = stream if stream is not None else self.cuda.current
        self.is_recorded = True
        self.cuda.note("record", self.stream)

    def synchronize(self) -> None:
        assert self.is_recorded, "an event that nobody recorded is waited for"
        self.cuda.note("wait", self.stream)


@dataclass
class RecordedCuda:
    """One device, number 0."""

    refused: set[int] = field(default_factory=set)
    """Numbers of the registrations that fail."""
    keeps: set[int] = field(default_factory=set)
    """Addresses that are not given back."""
    before_register: Callable[[int], None] = lambda number: None
    """Called with the number of the registration, before it."""
    calls: list[tuple[str, object]] = field(default_factory=list)
    registered: dict[int, int] = field(default_factory=dict)
    """What is registered now: lengths by address."""
    asked: list[tuple[int, int]] = field(default_factory=list)
    """All registrations that were asked for: addresses and lengths."""
    streams: int = 0

    def __post_init__(self) -> None:
        self._local = threading.local()
        self._lock = threading.Lock()

    @property
    def current(self) -> RecordedStream | None:
        """The calling thread's stream; None: the engine's."""
        return getattr(self._local, "stream", None)

    def note(self, what: str, about: object) -> None:
        with self._lock:
            self.calls.append((what, about))

    # ---- as torch.cuda has them ----

    def Stream(self, device: int) -> RecordedStream:  # noqa: N802
        with self._lock:
            self.streams += 1
            return RecordedStream(self.streams)

    def Event(self, blocking: bool) -> RecordedEvent:  # noqa: N802
        return RecordedEvent(self, blocking)

    @contextlib.contextmanager
    def stream(self, stream: RecordedStream) -> Iterator[None]:
        before, self._local.stream = self.current, stream
        try:
            yield
        finally:
            self._local.stream = before

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        self._local.device = index
        try:
            yield
        finally:
            del self._local.device

    def cudart(self) -> RecordedCuda:
        return self

    def cudaHostRegister(self, address: int, length: int, flags: int) -> int:  # noqa: N802
        assert self._local.device == 0 == flags, "registered in some other context"
        with self._lock:
            self.asked.append((address, length))
            number = len(self.asked) - 1
        self.before_register(number)
        with self._lock:
            if number in self.refused:
                return 2
            assert address not in self.registered, "registered twice"
            self.registered[address] = length
            return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        assert self._local.device == 0, "unregistered in some other context"
        with self._lock:
            if address in self.keeps:
                return 1
            del self.registered[address]  # KeyError: it was not registered
            return 0
