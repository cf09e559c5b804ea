"""Why an engine was chosen, in a sentence. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from router.candidates import estimate_of
from router.scoring import Estimate
from router.ui.recent import Considered

CLOSE_SECONDS = 0.001
"""Estimates closer than this are told as equal."""


@dataclass(frozen=True, slots=True)
class Rival:
    """The other engine with the least estimate."""

    url: str
    estimate: Estimate

    @property
    def hit_tokens(self) -> int:
        return _hit(self.estimate)


def best_rival(considered: Considered) -> Rival | None:
    """None where nobody else had room."""
    routed = considered.routed
    others = [
        Rival(candidate.url, estimate_of(candidate, routed.prompt_tokens))
        for candidate in considered.candidates
        if candidate.url != routed.url
    ]
    return min(others, key=lambda rival: rival.estimate.total_seconds, default=None)


def reason_of(considered: Considered, rival: Rival | None) -> str:
    """By what the chosen engine is ahead of its rival; of policies but `cost`, which it was."""
    routed = considered.routed
    if routed.policy != "cost":
        return f"policy {routed.policy}"
    if rival is None:
        return "only engine with room"
    if routed.no_tokens:
        return f"tokens unknown ({routed.no_tokens.replace('_', ' ')}): by load alone"
    told = _ahead_by(routed.estimate, rival)
    if routed.estimate.used.peer_tokens:
        return f"{told}; pulls from a peer"
    if not (rival.hit_tokens or _hit(routed.estimate)):
        return f"no hit anywhere: {told}"
    return told


def _ahead_by(own: Estimate, rival: Rival) -> str:
    other = rival.estimate
    if other.used.peer_tokens and own.total_seconds - other.total_seconds > CLOSE_SECONDS:
        return "later than the next, but needs no second copy"
    if other.total_seconds - own.total_seconds <= CLOSE_SECONDS:
        if own.uncached_tokens < other.uncached_tokens:
            return "as quick as the next, computes less"
        return "as quick as the next, fewest requests or chance"
    gains = {
        "queue": other.queue_seconds - own.queue_seconds,
        "fetch": other.fetch_seconds - own.fetch_seconds,
        "prefill": other.prefill_seconds - own.prefill_seconds,
    }
    most = max(gains, key=lambda term: gains[term])
    if most == "prefill":
        return "longest hit" if _hit(own) > rival.hit_tokens else "computes faster"
    if most == "fetch":
        return "hit lies nearer"
    return (
        "sooner free, though the hit is shorter" if rival.hit_tokens > _hit(own) else "sooner free"
    )


def _hit(estimate: Estimate) -> int:
    return estimate.used.node_tokens + estimate.used.peer_tokens
