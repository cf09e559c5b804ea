"""Counts a finished answer's hits: what was predicted, and what the engine delivered."""

from __future__ import annotations

from router import usage
from router.decision import Decision
from router.metrics import RouterMetrics
from router.scoring import attention_pairs


def count_hits(
    metrics: RouterMetrics, decision: Decision, delivered: usage.Delivered | None
) -> None:
    """Once for each answer of status 200. `delivered`: by the engine's own word, where it tells."""
    used, predicted = decision.chosen.estimate.used, metrics.predicted_tokens.labels
    if used.hbm_tokens:
        predicted("hbm").inc(used.hbm_tokens)
    if used.dram_tokens:
        predicted("dram").inc(used.dram_tokens)
    if used.ssd_tokens:
        predicted("ssd").inc(used.ssd_tokens)
    if used.peer_tokens:
        predicted("peer").inc(used.peer_tokens)
    metrics.told_hbm_tokens.inc(decision.told_hbm_tokens)
    metrics.saved_seconds.inc(saved_seconds(decision, delivered))
    if delivered is not None:
        metrics.compared_tokens.inc(decision.predicted_hit_tokens)
        metrics.delivered_tokens.labels("all").inc(delivered.cached_tokens)
        for source, tokens in delivered.by_source.items():
            metrics.delivered_tokens.labels(source).inc(tokens)


def saved_seconds(decision: Decision, delivered: usage.Delivered | None) -> float:
    """Prefill that the engine was spared, less what fetching took; by the speeds of the choice."""
    prompt = decision.plan.prompt_tokens
    cached = delivered.cached_tokens if delivered is not None else decision.predicted_hit_tokens
    rest = max(1, prompt - cached)
    if rest >= prompt:
        return 0.0
    chosen = decision.chosen
    speeds = chosen.candidate.speeds
    seconds = (prompt - rest) / speeds.prefill_tokens_per_second
    if speeds.prefill_quadratic_seconds:
        pairs = attention_pairs(prompt, prompt) - attention_pairs(rest, prompt)
        seconds += pairs * speeds.prefill_quadratic_seconds
    return max(0.0, seconds - chosen.estimate.fetch_seconds)
