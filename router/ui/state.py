"""What the page shows, as one JSON object of bounded size. Reads what the router already knows."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from emberkv_proto import __version__
from router.admission import Admission
from router.engines import Engine, EngineTable
from router.load import LoadLedger
from router.metrics import RouterMetrics
from router.scoring import Holding, queue_seconds
from router.speeds import SpeedBook
from router.ui.reasons import best_rival, reason_of
from router.ui.recent import Considered, RecentDecisions, Routed
from router.view import IndexView, NodeView
from router.waiting import Priority

WINDOW_SECONDS = 300.0
MOST_ROWS = 256
"""Nodes and engines shown; the whole counts are told beside."""
MOST_PREFIXES = 10
MOST_TEXT = 160
"""Characters of a name or a reason."""
SOURCES = ("hbm", "dram", "ssd", "peer")


class UiState:
    """Reckons the page's state from the router's parts. On the event loop."""

    def __init__(
        self,
        engines: EngineTable,
        ledger: LoadLedger,
        speeds: SpeedBook,
        index: IndexView,
        admission: Admission,
        metrics: RouterMetrics,
        recent: RecentDecisions,
        policy: Callable[[], str],
        clock: Callable[[], float],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._engines = engines
        self._ledger = ledger
        self._speeds = speeds
        self._index = index
        self._admission = admission
        self._metrics = metrics
        self._recent = recent
        self._policy = policy
        self._clock = clock
        self._wall = wall
        self._began = clock()

    def read(self) -> dict[str, Any]:
        now = self._clock()
        routed = self._recent.since(now - WINDOW_SECONDS)
        nodes, engines = list(self._index.nodes()), list(self._engines)
        names = {engine.url: engine.name for engine in engines}
        return {
            "version": __version__,
            "unix_seconds": self._wall(),
            "uptime_seconds": now - self._began,
            "policy": self._policy(),
            "is_ready": self._engines.has_healthy,
            "inflight_requests": self._ledger.total_requests(),
            "waiting_requests": {
                priority.name.lower(): self._admission.waiting(priority) for priority in Priority
            },
            "window": _window(routed, now),
            "totals": self._totals(),
            "index": _index(nodes),
            "nodes": _nodes(nodes, engines, routed),
            "node_count": len(nodes),
            "engines": self._engine_rows(engines, routed, now),
            "engine_count": len(engines),
            "decisions": [_decision(item, names, now) for item in self._recent.shown()],
            "prefixes": _prefixes(routed, names),
        }

    def _totals(self) -> dict[str, Any]:
        """Since the router started."""
        metrics = self._metrics
        by_status: Counter[str] = Counter()
        for labels, value in _samples(metrics.requests):
            by_status[labels["status"]] += int(value)
        return {
            "answers": sum(by_status.values()),
            "answers_by_status": dict(sorted(by_status.items())[:32]),
            "refused": _sum(metrics.refused),
            "retries": _sum(metrics.retries),
            "aborts": _sum(metrics.aborts),
            "prompt_tokens": _sum(metrics.prompt_tokens),
            "predicted_hit_tokens": _sum(metrics.predicted_tokens),
            "compared_hit_tokens": _sum(metrics.compared_tokens),
            "delivered_hit_tokens": _sum(metrics.delivered_tokens, source="all"),
            "delivered_by_source": {
                source: _sum(metrics.delivered_tokens, source=source) for source in SOURCES
            },
            "saved_prefill_seconds": _sum(metrics.saved_seconds),
        }

    def _engine_rows(
        self, engines: Sequence[Engine], routed: Sequence[Routed], now: float
    ) -> list[dict[str, Any]]:
        by_url: defaultdict[str, list[Routed]] = defaultdict(list)
        for item in routed:
            by_url[item.url].append(item)
        return [self._engine(engine, by_url[engine.url], now) for engine in engines[:MOST_ROWS]]

    def _engine(self, engine: Engine, routed: Sequence[Routed], now: float) -> dict[str, Any]:
        load, speeds = self._ledger.load(engine.url), self._speeds.of(engine.url)
        return {
            "engine": _text(engine.name),
            "url": _text(engine.url),
            "node_id": _text(engine.node_id),
            "models": [_text(model) for model in sorted(engine.models)[:8]],
            "role": engine.role,
            "state": engine.health.state.value,
            "state_seconds": max(0.0, now - engine.health.since),
            "is_announced": engine.is_announced,
            "is_static": engine.is_static,
            "inflight_requests": load.active_requests,
            "queued_prefill_tokens": load.queued_prefill_tokens,
            "queue_seconds": queue_seconds(load, speeds),
            "prefill_tokens_per_second": speeds.prefill_tokens_per_second,
            "fetch_tokens_per_second": {
                "dram": speeds.dram_tokens_per_second,
                "ssd": speeds.ssd_tokens_per_second,
                "peer": speeds.peer_tokens_per_second,
            },
            "samples": asdict(self._speeds.counts(engine.url)),
            "requests": len(routed),
            "mean": _mean_terms(routed),
            **_hits(routed),
        }


def _window(routed: Sequence[Routed], now: float) -> dict[str, Any]:
    seconds = max(1.0, now - routed[0].at) if routed else WINDOW_SECONDS
    return {
        "seconds": seconds,
        "requests": len(routed),
        "requests_per_second": len(routed) / seconds,
        "without_tokens": sum(1 for item in routed if item.no_tokens),
        **_hits(routed),
    }


def _hits(routed: Iterable[Routed]) -> dict[str, Any]:
    """Tokens asked for and, by where they should come from, not computed."""
    prompt, found = 0, Counter[str]()
    for item in routed:
        if item.no_tokens:
            continue
        prompt += item.prompt_tokens
        for source, tokens in _by_source(item.estimate.used).items():
            found[source] += tokens
    return {"prompt_tokens": prompt, "hit_tokens": {source: found[source] for source in SOURCES}}


def _by_source(used: Holding) -> dict[str, int]:
    return {
        "hbm": used.hbm_tokens,
        "dram": used.dram_tokens,
        "ssd": used.ssd_tokens,
        "peer": used.peer_tokens,
    }


def _mean_terms(routed: Sequence[Routed]) -> dict[str, float] | None:
    """The parts of t(i), as they were when this engine was chosen."""
    if not routed:
        return None
    count = len(routed)
    return {
        "queue_seconds": sum(item.estimate.queue_seconds for item in routed) / count,
        "fetch_seconds": sum(item.estimate.fetch_seconds for item in routed) / count,
        "prefill_seconds": sum(item.estimate.prefill_seconds for item in routed) / count,
    }


def _index(nodes: Sequence[NodeView]) -> dict[str, Any]:
    living = [node for node in nodes if node.liveness == "ok"]
    return {
        "nodes_ok": len(living),
        "nodes_exact": sum(1 for node in living if node.exactness == "exact"),
        "blocks": sum(tier.blocks for node in nodes for tier in node.tiers),
        "worst_lag_seconds": max(
            (lag for node in living if (lag := _finite(node.lag_seconds)) is not None), default=None
        ),
        "dropped_rows": sum(node.dropped for node in nodes),
    }


def _nodes(
    nodes: Sequence[NodeView], engines: Sequence[Engine], routed: Sequence[Routed]
) -> list[dict[str, Any]]:
    by_node: defaultdict[str, list[Routed]] = defaultdict(list)
    for item in routed:
        by_node[item.node_id].append(item)
    engine_counts = Counter(engine.node_id for engine in engines)
    return [
        {
            "node_id": _text(node.node_id),
            "liveness": str(getattr(node.liveness, "value", node.liveness)),
            "exactness": str(getattr(node.exactness, "value", node.exactness)),
            "state": _text(node.reported_state),
            "lag_seconds": _finite(node.lag_seconds),
            "dropped_rows": node.dropped,
            "engines": engine_counts[node.node_id],
            "requests": len(by_node[node.node_id]),
            "tiers": [
                {
                    "tier": tier.tier.name,
                    "blocks": tier.blocks,
                    "used_bytes": tier.used_bytes,
                    "capacity_bytes": tier.capacity_bytes,
                }
                for tier in node.tiers
            ],
            **_hits(by_node[node.node_id]),
        }
        for node in nodes[:MOST_ROWS]
    ]


def _decision(item: Considered, names: dict[str, str], now: float) -> dict[str, Any]:
    routed, rival = item.routed, best_rival(item)
    terms = routed.estimate
    return {
        "seconds_ago": max(0.0, now - routed.at),
        "engine": _text(routed.engine),
        "node_id": _text(routed.node_id),
        "model": _text(routed.model),
        "prompt_tokens": routed.prompt_tokens,
        "tokens_known": not routed.no_tokens,
        "hit_tokens": _by_source(terms.used),
        "queue_seconds": terms.queue_seconds,
        "fetch_seconds": terms.fetch_seconds,
        "prefill_seconds": terms.prefill_seconds,
        "reason": _text(reason_of(item, rival)),
        "candidates": len(item.candidates),
        "rival": rival
        and {
            "engine": _text(names.get(rival.url, rival.url)),
            "total_seconds": rival.estimate.total_seconds,
            "hit_tokens": rival.hit_tokens,
        },
    }


def _prefixes(routed: Sequence[Routed], names: dict[str, str]) -> list[dict[str, Any]]:
    """The beginnings that most prompts share. Told by hash: no text is known here."""
    groups: defaultdict[int, list[Routed]] = defaultdict(list)
    for item in routed:
        if item.affinity is not None:
            groups[item.affinity].append(item)
    ranked = sorted(groups.items(), key=lambda group: -len(group[1]))[:MOST_PREFIXES]
    return [
        {
            "prefix": f"{affinity & (1 << 64) - 1:016x}",
            "model": _text(items[-1].model),
            "requests": len(items),
            "engines": [
                _text(names.get(url, url))
                for url, _ in Counter(item.url for item in items).most_common(3)
            ],
            "engine_count": len({item.url for item in items}),
            **_hits(items),
        }
        for affinity, items in ranked
        if len(items) > 1
    ]


def _samples(counter: Any) -> Iterable[tuple[dict[str, str], float]]:
    for family in counter.collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                yield sample.labels, sample.value


def _sum(counter: Any, **wanted: str) -> float:
    return sum(
        value
        for labels, value in _samples(counter)
        if all(labels.get(name) == text for name, text in wanted.items())
    )


def _finite(seconds: float) -> float | None:
    """None for a node that was never heard of: JSON has no infinity."""
    return seconds if math.isfinite(seconds) else None


def _text(text: str) -> str:
    return text if len(text) <= MOST_TEXT else text[: MOST_TEXT - 1] + "…"
