"""What the router counts, in a registry of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.counts import Counter, Histogram, LabelledCounter, LabelledHistogram
from router.engines import EngineTable
from router.load import LoadLedger
from router.scoring import queue_seconds
from router.speeds import SpeedBook
from router.waiting import Priority

PREFIX = "emberkv_router_"
_WAIT_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_DECISION_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0)


class RouterMetrics:
    """Counters of one router."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._included: list[CollectorRegistry] = []

        def counter(name: str, text: str) -> Counter:
            return Counter(PREFIX + name, text, self.registry)

        def labelled(name: str, text: str, labels: tuple[str, ...]) -> LabelledCounter:
            return LabelledCounter(PREFIX + name, text, labels, self.registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(PREFIX + name, text, _WAIT_BUCKETS, self.registry)

        self.requests = labelled(
            "requests",
            "Answers, by engine (empty: none) and status",
            ("engine", "status"),
        )
        self.prompt_tokens = counter("prompt_tokens", "Tokens of routed prompts, where known")
        self.predicted_tokens = labelled(
            "predicted_hit_tokens", "Tokens the chosen engine should not compute", ("source",)
        )
        self.told_hbm_tokens = counter(
            "told_hbm_tokens", "Tokens in the chosen engine's HBM, as its own events say"
        )
        self.delivered_tokens = labelled(
            "delivered_hit_tokens",
            "Tokens engines said they did not compute (source all: the whole, whatever the source)",
            ("source",),
        )
        self.saved_seconds = counter(
            "saved_prefill_seconds",
            "Prefill that engines were spared, less the time of fetching, estimated",
        )
        self.compared_tokens = counter(
            "compared_hit_tokens", "Predicted hit tokens of requests whose engine reported its hit"
        )
        self.decision_seconds = Histogram(
            PREFIX + "decision_seconds",
            "From a whole request to a chosen engine, tokenization included",
            _DECISION_BUCKETS,
            self.registry,
        )
        self.no_tokens = labelled("no_token_requests", "Requests routed by load alone", ("why",))
        self.local_tokens = labelled(
            "local_tokens",
            "Prompts for the tokenizers of router.tokenizers: made, left_to_engine; of those put to"
            " the engine too: equal, different",
            ("what",),
        )
        self.retries = labelled("retries", "Requests sent on to another engine", ("why",))
        self.retries_denied = counter(
            "retries_denied", "Failures told to clients because too many retries were made"
        )
        self.aborts = counter("aborts", "Requests whose client went away")
        self.upstream_errors = labelled("upstream_errors", "Engine failures", ("engine", "kind"))
        self.refused = labelled("refused_requests", "Requests that no engine got", ("why",))
        self.waited_seconds = Histogram(
            PREFIX + "waited_seconds",
            "Time in line of requests that found every engine full, however it ended",
            _WAIT_BUCKETS,
            self.registry,
        )
        self.hints = labelled(
            "hints", "Chains that daemons were asked to bring, by what became of it", ("outcome",)
        )
        self.splits = labelled(
            "splits",
            "Requests to decode engines, by where they are prefilled (short, slow and no_engine:"
            " there)",
            ("decided",),
        )
        self.remote_prefills = labelled(
            "remote_prefills",
            "Prefills elsewhere (cut: the blocks could not reach the decode engine's node)",
            ("outcome",),
        )
        self.handover_blocks = labelled(
            "handover_blocks",
            "Blocks at the decode node when the prefill was over, and after waiting for the rest",
            ("when",),
        )
        self.remote_prefill_seconds = histogram(
            "remote_prefill_seconds", "From the choice of engines to the decode engine's turn"
        )
        self.handover_seconds = histogram(
            "handover_seconds", "From the end of a prefill until its last block is there"
        )
        self.first_byte_seconds = LabelledHistogram(
            PREFIX + "first_byte_seconds",
            "From the first choice of an engine to the first byte of the answer's body",
            ("prefill",),
            _WAIT_BUCKETS,
            self.registry,
        )
        self.explored = counter("explored", "Requests sent elsewhere than to the longest hit")
        self.index_errors = counter("index_errors", "Index queries that failed")
        self.ext_proc_errors = labelled(
            "ext_proc_errors", "Streams of Envoys that ended by a fault, by kind", ("kind",)
        )
        self.models_unread = counter("models_unread", "Engines whose /v1/models could not be read")

    def watch(self, engines: EngineTable, ledger: LoadLedger, speeds: SpeedBook) -> None:
        """Show the state of these at each scrape."""
        self.registry.register(_LoadCollector(engines, ledger, speeds))

    def watch_line(self, waiting: Callable[[Priority], int]) -> None:
        """Show how many requests of each class wait, at each scrape."""
        gauge = Gauge(
            PREFIX + "waiting_requests",
            "Requests in line for an engine with room",
            ("priority",),
            registry=self.registry,
        )
        for priority in Priority:
            gauge.labels(priority.name.lower()).set_function(partial(waiting, priority))

    def watch_streams(self, streams: Callable[[], int]) -> None:
        """Show how many requests Envoys have on their way, at each scrape."""
        gauge = Gauge(
            PREFIX + "ext_proc_streams",
            "Requests that Envoys have on their way",
            registry=self.registry,
        )
        gauge.set_function(streams)

    def include(self, registry: CollectorRegistry) -> None:
        """Show another part's counters in the same exposition; its names must differ."""
        self._included.append(registry)

    def render(self) -> bytes:
        """The exposition text."""
        return b"".join(generate_latest(part) for part in (self.registry, *self._included))


class _LoadCollector(Collector):
    def __init__(self, engines: EngineTable, ledger: LoadLedger, speeds: SpeedBook) -> None:
        self._engines = engines
        self._ledger = ledger
        self._speeds = speeds

    def collect(self) -> Iterator[Metric]:
        inflight = GaugeMetricFamily(
            PREFIX + "inflight_requests", "Charged and not released", labels=["engine"]
        )
        queue = GaugeMetricFamily(
            PREFIX + "queue_seconds", "Estimated work ahead of a new request", labels=["engine"]
        )
        healthy = GaugeMetricFamily(
            PREFIX + "engine_healthy", "1 when the engine may get requests", labels=["engine"]
        )
        prefill = GaugeMetricFamily(
            PREFIX + "prefill_tokens_per_second",
            "Speed that choices count with: learned, or the first guess",
            labels=["engine"],
        )
        quadratic = GaugeMetricFamily(
            PREFIX + "prefill_quadratic_seconds",
            "Seconds per computed token and token of its context",
            labels=["engine"],
        )
        fetch = GaugeMetricFamily(
            PREFIX + "fetch_tokens_per_second",
            "Speed of bringing tokens' KV from a tier into the engine",
            labels=["engine", "tier"],
        )
        samples = GaugeMetricFamily(
            PREFIX + "speed_samples",
            "Measurements kept of an engine's speeds",
            labels=["engine", "kind"],
        )
        measured = CounterMetricFamily(
            PREFIX + "measured_stretches", "Measurements, by what became of them", labels=["why"]
        )
        for why, count in (
            ("taken", self._speeds.taken),
            ("absurd", self._speeds.absurd),
            ("unclear", self._speeds.unclear),
        ):
            measured.add_metric([why], count)
        for engine in self._engines:
            load = self._ledger.load(engine.url)
            speeds = self._speeds.of(engine.url)
            counts = self._speeds.counts(engine.url)
            prefill.add_metric([engine.name], speeds.prefill_tokens_per_second)
            quadratic.add_metric([engine.name], speeds.prefill_quadratic_seconds)
            samples.add_metric([engine.name, "prefill"], counts.prefill)
            for tier, speed, count in (
                ("dram", speeds.dram_tokens_per_second, counts.dram),
                ("ssd", speeds.ssd_tokens_per_second, counts.ssd),
                ("peer", speeds.peer_tokens_per_second, counts.peer),
            ):
                fetch.add_metric([engine.name, tier], speed)
                samples.add_metric([engine.name, tier], count)
            inflight.add_metric([engine.name], load.active_requests)
            queue.add_metric([engine.name], queue_seconds(load, speeds))
            healthy.add_metric([engine.name], float(engine.health.is_healthy))
        yield inflight
        yield queue
        yield healthy
        yield from (prefill, quadratic, fetch, samples, measured)
