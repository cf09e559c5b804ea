"""The last decisions, kept for whoever looks. Pure.

On the hot path a decision costs one small object and two appends; everything else is reckoned when
somebody asks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.candidates import Candidate
from router.decision import Decision
from router.scoring import Estimate

WINDOW = 2048
"""Decisions that rates and sums are made of."""
SHOWN = 12
"""Decisions that are kept with what else could have been chosen."""


@dataclass(slots=True, eq=False)
class Routed:
    """One decision, without what it looked at."""

    at: float
    engine: str
    url: str
    node_id: str
    model: str
    prompt_tokens: int
    no_tokens: str
    """Why the prompt's tokens are unknown; empty where they are known."""
    affinity: int | None
    estimate: Estimate
    policy: str


@dataclass(frozen=True, slots=True, eq=False)
class Considered:
    """A decision with all engines that had room then, as they were."""

    routed: Routed
    candidates: Sequence[Candidate]


class RecentDecisions:
    """Bounded. `policy` names the policy in force."""

    def __init__(
        self, policy: Callable[[], str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._window: deque[Routed] = deque(maxlen=WINDOW)
        self._shown: deque[Considered] = deque(maxlen=SHOWN)

    def note(self, decision: Decision) -> None:
        chosen, plan = decision.chosen, decision.plan
        routed = Routed(
            self._clock(),
            chosen.engine.name,
            chosen.engine.url,
            chosen.engine.node_id,
            plan.model,
            plan.prompt_tokens,
            plan.no_tokens.value if plan.no_tokens else "",
            plan.affinity,
            chosen.estimate,
            self._policy(),
        )
        self._window.append(routed)
        self._shown.append(Considered(routed, decision.considered))

    def since(self, at: float) -> list[Routed]:
        """Those of the window that are not older, oldest first."""
        return [routed for routed in self._window if routed.at >= at]

    def shown(self) -> list[Considered]:
        """The last ones, newest first."""
        return list(reversed(self._shown))

    def check_integrity(self) -> None:
        assert len(self._shown) <= len(self._window) or len(self._window) == WINDOW
        times = [routed.at for routed in self._window]
        assert times == sorted(times)
