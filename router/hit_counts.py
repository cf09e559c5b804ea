"""Counts a finished answer's hits: what was predicted, and what the engine delivered."""

from __future__ import annotations

from router import usage
from router.decision import Decision
from router.metrics import RouterMetrics


def count_hits(
    metrics: RouterMetrics, decision: Decision, delivered: usage.Delivered | None
) -> None:
    """Once for each answer of status 200. `delivered`: by the engine's own word, where it tells."""
    used = decision.chosen.estimate.used
    for source, tokens in (
        ("hbm", used.hbm_tokens),
        ("dram", used.dram_tokens),
        ("ssd", used.ssd_tokens),
        ("peer", used.peer_tokens),
    ):
        if tokens:
            metrics.predicted_tokens.labels(source).inc(tokens)
    metrics.told_hbm_tokens.inc(decision.told_hbm_tokens)
    if delivered is not None:
        metrics.compared_tokens.inc(decision.predicted_hit_tokens)
        metrics.delivered_tokens.labels("all").inc(delivered.cached_tokens)
        for source, tokens in delivered.by_source.items():
            metrics.delivered_tokens.labels(source).inc(tokens)
