"""Prometheus metrics of one engine, in a registry of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from client_sdk.engine.torch_engine.scheduler import Request
from emberkv_proto.types import Source

if TYPE_CHECKING:
    from client_sdk.engine.torch_engine.engine import TorchEngine

PREFIX = "emberkv_engine_"


class EngineMetrics(Collector):
    """Counters the engine bumps, and gauges read from it when somebody asks."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self._registry = CollectorRegistry()

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, what, labels, registry=self._registry)

        self.finished = counter("requests", "Requests answered to the end")
        self.preemptions = counter("preemptions", "Requests that gave their blocks to others")
        self.loads_given_up = counter("loads_given_up", "Loads not verified by their deadline")
        self.loads_broken = counter("loads_broken", "Loads whose layers did not follow")
        self.prefill_seconds = counter("prefill_seconds", "Seconds in steps with prompt tokens")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of answered requests")
        self.hit_tokens = counter("hit_tokens", "Prompt tokens not computed", "source")
        for source in Source:
            self.hit_tokens.labels(source.name.lower())
        self.ttft = Histogram(
            PREFIX + "ttft_seconds", "Submission to first token", registry=self._registry
        )
        self._registry.register(self)

    def first_token(self, seconds: float, request: Request) -> None:
        self.ttft.observe(seconds)
        self.prompt_tokens.inc(len(request.prompt))
        for source, tokens in request.cached.items():
            self.hit_tokens.labels(source.name.lower()).inc(tokens)

    def collect(self) -> Iterator[Metric]:
        scheduler, store = self._engine.scheduler, self._engine.store
        for name, what, value in (
            ("running_requests", "Requests with blocks", len(scheduler.active)),
            ("waiting_requests", "Requests without blocks", len(scheduler.waiting)),
            ("free_blocks", "Blocks nobody references", scheduler.pool.free_blocks),
            ("cached_blocks", "Blocks that can be found again", scheduler.pool.cached_blocks),
        ):
            yield GaugeMetricFamily(PREFIX + name, what, value=value)
        events = CounterMetricFamily(PREFIX + "store", "Store blocks and faults", labels=["event"])
        for event, count in sorted(store.counts.copy().items() if store else ()):
            events.add_metric([event], count)
        yield events

    def render(self) -> bytes:
        return generate_latest(self._registry)
