"""What the router would do and why, as JSON: /route/explain and /workers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from router.decision import Decision, Plan, Scored
from router.engines import Engine
from router.load import LoadLedger
from router.speeds import SampleCounts, SpeedBook


def explain(
    plan: Plan,
    decision: Decision | None,
    problem: str,
    scored: list[Scored],
    speeds: SpeedBook,
) -> Any:
    """One object per healthy engine, terms of t(i) in seconds. `problem`: why none is chosen."""
    return {
        "model": plan.model,
        "prompt_tokens": plan.prompt_tokens,
        "tokens_known": plan.no_tokens is None,
        "no_tokens_reason": plan.no_tokens.value if plan.no_tokens else None,
        "chosen": decision.chosen.engine.name if decision else None,
        "chosen_url": decision.chosen.engine.url if decision else None,
        "problem": problem or None,
        "chains": [
            {
                "namespace_id": kind.namespace_id.hex(),
                "block_tokens": kind.block_tokens,
                "blocks": len(chain.keys),
                "hits": [asdict(hit) for hit in chain.found.nodes],
                "engine_hits": [asdict(hit) for hit in chain.found.engines],
            }
            for kind, chain in plan.chains.items()
        ],
        "engines": [_terms(item, speeds.counts(item.engine.url)) for item in scored],
    }


def _terms(item: Scored, samples: SampleCounts) -> dict[str, Any]:
    terms = item.estimate
    return {
        "engine": item.engine.name,
        "url": item.engine.url,
        "node_id": item.engine.node_id or None,
        "total_seconds": terms.total_seconds,
        "queue_seconds": terms.queue_seconds,
        "fetch_seconds": terms.fetch_seconds,
        "prefill_seconds": terms.prefill_seconds,
        "uncached_tokens": terms.uncached_tokens,
        "holding": asdict(item.candidate.holding),
        "used": asdict(terms.used),
        "load": asdict(item.candidate.load),
        "speeds": {**asdict(item.candidate.speeds), "samples": asdict(samples)},
    }


def worker(engine: Engine, ledger: LoadLedger) -> dict[str, Any]:
    """One engine as /workers shows it."""
    return {
        "engine": engine.name,
        "url": engine.url,
        "node_id": engine.node_id or None,
        "models": sorted(engine.models),
        "role": engine.role,
        "state": engine.health.state.value,
        "is_static": engine.is_static,
        "is_announced": engine.is_announced,
        "namespace_id": engine.namespace_id.hex() if engine.namespace_id else None,
        "block_tokens": engine.block_tokens,
        "load": asdict(ledger.load(engine.url)),
    }
