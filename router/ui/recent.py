"""The last decisions, kept for whoever looks. Pure.

On the hot path a decision costs a tuple and two appends (half a microsecond); everything else is
reckoned when somebody asks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.candidates import Candidate
from router.decision import Decision, Scored
from router.scoring import Estimate
from router.tokenize import NoTokens

WINDOW = 2048
"""Decisions that rates and sums are made of."""
SHOWN = 12
"""Decisions that are kept with what else could have been chosen."""


@dataclass(frozen=True, slots=True, eq=False)
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


_Noted = tuple[float, Scored, str, int, NoTokens | None, int | None, str]
"""When, who; of the plan: model, prompt, why no tokens, affinity; which policy."""


class RecentDecisions:
    """Bounded. `policy` names the policy in force."""

    def __init__(
        self, policy: Callable[[], str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._window: deque[_Noted] = deque(maxlen=WINDOW)
        self._shown: deque[tuple[_Noted, Sequence[Candidate]]] = deque(maxlen=SHOWN)

    def note(self, decision: Decision) -> None:
        plan = decision.plan
        noted = (
            self._clock(),
            decision.chosen,
            plan.model,
            plan.prompt_tokens,
            plan.no_tokens,
            plan.affinity,
            self._policy(),
        )
        self._window.append(noted)
        self._shown.append((noted, decision.considered))

    def since(self, at: float) -> list[Routed]:
        """Those of the window that are not older, oldest first."""
        return [_routed(noted) for noted in self._window if noted[0] >= at]

    def shown(self) -> list[Considered]:
        """The last ones, newest first."""
        return [
            Considered(_routed(noted), candidates) for noted, candidates in reversed(self._shown)
        ]

    def check_integrity(self) -> None:
        assert len(self._shown) == min(len(self._window), SHOWN)
        times = [noted[0] for noted in self._window]
        assert times == sorted(times)


def _routed(noted: _Noted) -> Routed:
    at, chosen, model, prompt_tokens, no_tokens, affinity, policy = noted
    engine = chosen.engine
    why = no_tokens.value if no_tokens else ""
    return Routed(
        at,
        engine.name,
        engine.url,
        engine.node_id,
        model,
        prompt_tokens,
        why,
        affinity,
        chosen.estimate,
        policy,
    )
