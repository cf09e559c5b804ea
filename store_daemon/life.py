"""Where the daemon is between its start and its end, for whoever is asked before it serves."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from emberkv_proto.types import NodeId

State = Literal["recovering", "serving", "draining"]
STATES: tuple[State, ...] = ("recovering", "serving", "draining")


@dataclass(slots=True)
class Life:
    """One life of the daemon. Changed by its wiring only."""

    node_id: NodeId
    state: State = "recovering"
    doing: str = "starting"
    """What a daemon that recovers is busy with."""
    started: float = field(default_factory=time.monotonic)

    @property
    def uptime_seconds(self) -> float:
        return time.monotonic() - self.started
