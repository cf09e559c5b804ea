"""Which nodes are alive, by what was heard of them and when. Pure; the clock is passed in.

    OK ── suspect_seconds of silence ──► SUSPECT ── gone_seconds ──► GONE
     ▲                                      │                          │
     └──────────── any admitted message ◄───┴──────────────────────────┘        REMOVED: by order

Only OK nodes are in answers. SUSPECT keeps its rows, GONE loses its DRAM rows, REMOVED all.
A removed node comes back with a newer incarnation, or when an operator readmits it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from emberkv_proto.types import Incarnation, NodeId

MAX_REMOVED = 4096
"""Fences of removed nodes that are remembered, newest first out of mind last."""


class Liveness(str, Enum):
    OK = "ok"
    SUSPECT = "suspect"
    GONE = "gone"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class Transition:
    """A node's state changed by the passing of time."""

    node_id: NodeId
    now: Liveness


@dataclass(slots=True)
class _Member:
    heard_at: float
    state: Liveness


class Membership:
    """All known nodes. O(1) per message, O(nodes) per tick."""

    def __init__(self, suspect_seconds: float, gone_seconds: float) -> None:
        if not 0 < suspect_seconds < gone_seconds:
            raise ValueError(f"wanted 0 < suspect {suspect_seconds} < gone {gone_seconds} seconds")
        self._suspect_seconds = suspect_seconds
        self._gone_seconds = gone_seconds
        self._members: dict[NodeId, _Member] = {}
        self._removed: OrderedDict[NodeId, Incarnation] = OrderedDict()

    def hear(self, node_id: NodeId, incarnation: Incarnation, now: float) -> bool:
        """A message of a live incarnation came. False: the node was removed and stays so."""
        fence = self._removed.get(node_id)
        if fence is not None:
            if incarnation <= fence:
                return False
            del self._removed[node_id]
        member = self._members.get(node_id)
        if member is None:
            self._members[node_id] = _Member(now, Liveness.OK)
        else:
            member.heard_at, member.state = now, Liveness.OK
        return True

    def tick(self, now: float) -> list[Transition]:
        """Nodes that have become SUSPECT or GONE. One that was silent long enough skips SUSPECT."""
        changed = []
        for node_id, member in self._members.items():
            silent = now - member.heard_at
            if silent >= self._gone_seconds:
                state = Liveness.GONE
            elif silent >= self._suspect_seconds and member.state is Liveness.OK:
                state = Liveness.SUSPECT
            else:
                continue
            if state is not member.state:
                member.state = state
                changed.append(Transition(node_id, state))
        return changed

    def remove(self, node_id: NodeId, fence: Incarnation) -> None:
        """Refuse the node up to incarnation `fence` from now on."""
        self._members.pop(node_id, None)
        self._removed[node_id] = fence
        self._removed.move_to_end(node_id)
        while len(self._removed) > MAX_REMOVED:
            self._removed.popitem(last=False)

    def forget(self, node_id: NodeId) -> None:
        """Drop a member that nobody follows any more; it may come back like a new one."""
        self._members.pop(node_id, None)

    def readmit(self, node_id: NodeId) -> None:
        """Lift the fence of a removed node."""
        self._removed.pop(node_id, None)

    def state(self, node_id: NodeId) -> Liveness | None:
        """None: never heard of."""
        if node_id in self._removed:
            return Liveness.REMOVED
        member = self._members.get(node_id)
        return member.state if member else None

    def silent_seconds(self, node_id: NodeId, now: float) -> float:
        """Time since the last admitted message; infinite for a node that is not known."""
        member = self._members.get(node_id)
        return max(0.0, now - member.heard_at) if member else float("inf")

    def check_integrity(self) -> None:
        assert not self._members.keys() & self._removed.keys(), "a removed node is a member"
        assert len(self._removed) <= MAX_REMOVED
        assert all(member.state is not Liveness.REMOVED for member in self._members.values())
