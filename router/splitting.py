"""Whether a prompt is prefilled on an engine of its own before its decode engine gets it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from router.scoring import Estimate


class Split(Enum):
    """What was decided; the values are labels of a counter."""

    REMOTE = "remote"
    SHORT = "short"
    """Too little is left to compute for a second engine."""
    SLOW = "slow"
    """Every prefill engine is so busy that the decode engine is quicker."""
    NO_ENGINE = "no_engine"
    """No prefill engine is healthy and has room."""


@dataclass(frozen=True, slots=True)
class SplitRules:
    """`slowest_factor`: a prefill engine may take so many times as long as the decode engine
    would, since it keeps the decode engine's running answers from waiting."""

    least_tokens: int
    slowest_factor: float


def judge(decode: Estimate, prefill: Estimate | None, rules: SplitRules) -> Split:
    """`decode`: if that engine did all itself; `prefill`: of the best prefill engine."""
    if decode.uncached_tokens < rules.least_tokens:
        return Split.SHORT
    if prefill is None:
        return Split.NO_ENGINE
    if prefill.total_seconds > rules.slowest_factor * decode.total_seconds:
        return Split.SLOW
    return Split.REMOTE
