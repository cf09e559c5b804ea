"""Faults by name: makes a named point of a running server pause, fail, drop, delay or exit.

Off unless the environment variable EMBERKV_FAULTS is set when a server starts; then `hit` costs one
look at a global. The text is a comma-separated list of

    point=action[:argument][@hit[+]][%chance][*times]        and at most one seed=number

    segment_write=fail:ENOSPC@3      the third write fails with ENOSPC, the others do not
    segment_read=fail@10+            reads fail (EIO) from the tenth on
    event_publish=drop%0.05*20       each event is lost with 5 % chance, 20 at most
    before_ack=exit@10               the process kills itself (-9) before the tenth answer
    peer_read=delay:0.2              every read from a peer takes 0.2 s longer
    mid_transfer=pause@1             the process stops there (SIGSTOP) until SIGCONT

A point may be named several times; the first entry whose turn it is acts. `emberkv doctor faults`
lists the points.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from emberkv_proto.errors import ConfigError, UnavailableError

log = logging.getLogger(__name__)
VARIABLE = "EMBERKV_FAULTS"
MAX_DELAY_SECONDS = 3600.0


class Action(str, Enum):
    PAUSE = "pause"
    FAIL = "fail"
    DROP = "drop"
    DELAY = "delay"
    EXIT = "exit"


ANYWHERE = frozenset({Action.PAUSE, Action.DELAY, Action.EXIT})
"""What needs no help from the code at the point."""
_FAILS = ANYWHERE | {Action.FAIL}
_DROPS = ANYWHERE | {Action.DROP}
_ALL = _FAILS | {Action.DROP}


@dataclass(frozen=True, slots=True)
class Point:
    """A place in a server's code where a fault can be put."""

    name: str
    sentence: str
    actions: frozenset[Action]
    is_io: bool = True
    """`fail` raises OSError here; where not, UnavailableError."""


POINTS: dict[str, Point] = {}
"""Every point by name, in the order in which a block meets them."""


def _point(name: str, sentence: str, actions: frozenset[Action], is_io: bool = True) -> Point:
    POINTS[name] = Point(name, sentence, actions, is_io)
    return POINTS[name]


BEFORE_COMMIT = _point(
    "before_commit", "A commit has been asked for; nothing is published yet.", _FAILS, is_io=False
)
BEFORE_ACK = _point(
    "before_ack", "Blocks are committed; the client has no answer yet.", _FAILS, is_io=False
)
EVICT = _point("evict", "A victim is chosen; its slots are not free yet.", ANYWHERE)
EVENT_PUBLISH = _point(
    "event_publish",
    "An event is about to get its number; a dropped one leaves no gap, only the digest can tell.",
    _DROPS,
)
WRITEBACK = _point("writeback", "A batch for the SSD has reached the writing thread.", _FAILS)
SEGMENT_CREATE = _point("segment_create", "A new SSD segment is about to be allocated.", _FAILS)
SEGMENT_WRITE = _point(
    "segment_write",
    "Records are about to be written to the SSD; dropped, the drive says yes and writes nothing.",
    _ALL,
)
MID_SEGMENT_WRITE = _point(
    "mid_segment_write",
    "All but the end of the last record is on the SSD; dropped, the drive never writes that end.",
    _ALL,
)
SEGMENT_SYNC = _point("segment_sync", "Written records are about to be made durable.", _ALL)
ROCKS_WRITE = _point(
    "rocks_write",
    "Rows or marks are about to enter the local index, from its start on; dropped, they do not.",
    _ALL,
)
PROMOTE = _point("promote", "A block's move from SSD to DRAM has reached its thread.", _FAILS)
SEGMENT_READ = _point(
    "segment_read",
    "A record is about to be read from the SSD; dropped, the caller's memory stays as it was.",
    _ALL,
)
PEER_LEASE = _point("peer_lease", "A peer is about to be asked for a lease.", _FAILS, is_io=False)
PEER_READ = _point("peer_read", "Bytes are about to be read from a peer.", _FAILS, is_io=False)
PEER_SERVE = _point(
    "peer_serve",
    "A peer may read our bytes; none is sent yet. Dropped, the connection ends there.",
    _DROPS,
)
PEER_WRITE = _point(
    "peer_write",
    "An engine on another host is about to write a batch into staged slots.",
    _FAILS,
    is_io=False,
)
MID_TRANSFER = _point(
    "mid_transfer",
    "Blocks of a peer are in our pool; they are not published.",
    _FAILS,
    is_io=False,
)
POPULATE = _point(
    "populate", "A step of a new pool file is about to be brought into memory.", _FAILS
)
RECOVERED = _point("recovered", "A start has taken over what it found; nobody is served.", ANYWHERE)
INDEX_BATCH = _point(
    "index_batch",
    "The index has received a batch of events; dropped, it sees a gap in the numbers.",
    _DROPS,
)
INDEX_PAGE = _point(
    "index_page", "The index has received a page of a snapshot.", _FAILS, is_io=False
)

_ENTRY = re.compile(
    r"(?P<point>[a-z_]+)=(?P<action>[a-z]+)(?::(?P<argument>[A-Za-z0-9.]+))?"
    r"(?:@(?P<first>[0-9]+)(?P<on>\+)?)?(?:%(?P<chance>[0-9.]+))?(?:\*(?P<times>[0-9]+))?"
)
FORM = "point=action[:argument][@hit[+]][%chance][*times]"


@dataclass(slots=True)
class Fault:
    """One entry: what happens at which hits of its point."""

    point: Point
    action: Action
    error_number: int = errno.EIO
    seconds: float = 0.0
    first: int = 1
    """The hit from which on it acts, counted from 1."""
    last: int | None = None
    chance: float = 1.0
    times: int | None = None
    """How often it acts at most."""
    acted: int = 0

    def is_due(self, hit: int, chance: Callable[[], float]) -> bool:
        """Whether it acts at this hit of its point; counts that it did."""
        is_in = hit >= self.first and (self.last is None or hit <= self.last)
        has_left = self.times is None or self.acted < self.times
        if is_in and has_left and (self.chance >= 1.0 or chance() < self.chance):
            self.acted += 1
            return True
        return False


@dataclass
class Faults:
    """The armed faults of a process. Threads may share it."""

    text: str
    entries: Mapping[str, list[Fault]]
    seed: int
    hits: Counter[str] = field(default_factory=Counter)
    """Times that each armed point was reached, whatever happened there."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)  # noqa: S311 - chance, not secrets
        self._mutex = threading.Lock()

    @classmethod
    def parse(cls, text: str) -> Faults:
        """Raises ConfigError: unknown point or action, or a form that is not ours."""
        entries: dict[str, list[Fault]] = {}
        seed = 0
        for word in filter(None, (word.strip() for word in text.split(","))):
            name, _, value = word.partition("=")
            if name == "seed":
                if not value.isdecimal():
                    raise ConfigError(f"{VARIABLE}: {word!r}: the seed is a number")
                seed = int(value)
                continue
            fault = _parse_entry(word)
            entries.setdefault(fault.point.name, []).append(fault)
        return cls(text, entries, seed)

    @property
    def acted(self) -> dict[str, int]:
        """Times that a fault was made, by point; points where none was are left out."""
        with self._mutex:
            counts = {name: sum(f.acted for f in faults) for name, faults in self.entries.items()}
        return {name: count for name, count in counts.items() if count}

    def hit(self, point: Point) -> bool:
        """What `faults.hit` does when faults are armed."""
        faults = self.entries.get(point.name)
        if faults is None:
            return True
        with self._mutex:
            self.hits[point.name] += 1
            number = self.hits[point.name]
            due = next((f for f in faults if f.is_due(number, self._random.random)), None)
        return due is None or _act(due, number)


_armed: Faults | None = None


def arm(text: str) -> Faults:
    """Make these faults from now on, in this process, and say so loudly. Raises ConfigError."""
    global _armed
    faults = Faults.parse(text)
    _armed = faults
    log.warning("FAULTS ARE MADE ON PURPOSE (%s): %s; never in production", VARIABLE, text)
    return faults


def arm_from(environ: Mapping[str, str]) -> None:
    """What a server does at start: nothing, unless EMBERKV_FAULTS is set. Raises ConfigError."""
    text = environ.get(VARIABLE, "")
    if text.strip():
        arm(text)


def disarm() -> None:
    """Make no faults any more."""
    global _armed
    _armed = None


def hit(point: Point) -> bool:
    """Mark a point: whether to go on. False where a fault says to drop what comes next.

    Raises:
        OSError, UnavailableError: a fault says to fail here; which of them is the point's.
    """
    return _armed is None or _armed.hit(point)


def is_armed(point: Point) -> bool:
    """Whether there is a fault for this point, for code that must prepare for it."""
    return _armed is not None and point.name in _armed.entries


def acted() -> dict[str, int]:
    """Faults made so far, by point."""
    return _armed.acted if _armed is not None else {}


def _act(fault: Fault, number: int) -> bool:
    point, action = fault.point, fault.action
    log.warning("fault: %s=%s at hit %d", point.name, action.value, number)
    if action is Action.DROP:
        return False
    if action is Action.DELAY:
        time.sleep(fault.seconds)
    elif action is Action.PAUSE:
        _signal(signal.SIGSTOP)
    elif action is Action.EXIT:
        _signal(signal.SIGKILL)
    elif point.is_io:
        text = f"{os.strerror(fault.error_number)} (fault {point.name})"
        raise OSError(fault.error_number, text)
    else:
        raise UnavailableError(f"fault {point.name}")
    return True


def _signal(number: signal.Signals) -> None:
    """Stop or end the whole process, by way of this thread: so it is not one step further."""
    signal.pthread_kill(threading.get_ident(), number)


def _parse_entry(word: str) -> Fault:
    match = _ENTRY.fullmatch(word)
    if match is None:
        raise ConfigError(f"{VARIABLE}: {word!r} is not {FORM}")
    point = POINTS.get(match["point"])
    if point is None:
        raise ConfigError(
            f"{VARIABLE}: unknown point {match['point']!r}; known: {', '.join(sorted(POINTS))}"
        )
    allowed = ", ".join(sorted(action.value for action in point.actions))
    if match["action"] not in {action.value for action in point.actions}:
        raise ConfigError(f"{VARIABLE}: {word!r}: at {point.name} can be done: {allowed}")
    fault = Fault(point, Action(match["action"]))
    _take_argument(fault, word, match["argument"])
    try:
        fault.first = int(match["first"] or 1)
        fault.chance = float(match["chance"] or 1.0)
    except ValueError:
        raise ConfigError(f"{VARIABLE}: {word!r}: the chance is a number") from None
    if match["first"] is not None and match["on"] is None:
        fault.last = fault.first
    if match["times"] is not None:
        fault.times = int(match["times"])
    if fault.first < 1 or not 0.0 < fault.chance <= 1.0 or fault.times == 0:
        raise ConfigError(f"{VARIABLE}: {word!r} never happens; hits count from 1")
    return fault


def _take_argument(fault: Fault, word: str, argument: str | None) -> None:
    """Raises ConfigError."""
    if fault.action is Action.DELAY:
        try:
            fault.seconds = float(argument or "")
        except ValueError:
            raise ConfigError(f"{VARIABLE}: {word!r}: say how many seconds, as delay:0.5") from None
        if not 0.0 <= fault.seconds <= MAX_DELAY_SECONDS:
            raise ConfigError(f"{VARIABLE}: {word!r}: 0 to {MAX_DELAY_SECONDS:.0f} seconds")
    elif argument is None:
        return
    elif fault.action is Action.FAIL and fault.point.is_io:
        number = getattr(errno, argument, None)
        if not isinstance(number, int):
            raise ConfigError(f"{VARIABLE}: {word!r}: {argument} is no errno; as in fail:ENOSPC")
        fault.error_number = number
    else:
        raise ConfigError(f"{VARIABLE}: {word!r}: {fault.action.value} takes no argument here")
