"""Counters and histograms that cost a request next to nothing: plain numbers until a scrape.

They look like prometheus_client's, whose locks and labels cost a request some microseconds: this
router counts on one event loop only, and so needs none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class Count:
    """One number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def inc(self, by: float = 1) -> None:
        self.value += by


class _Registered(Collector):
    """In a registry under its name, as prometheus_client's are."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return self.collect()


class Counter(_Registered):
    """A counter without labels."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self._count = Count()
        self.inc = self._count.inc
        super().__init__(name, text, registry)

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._text, value=self._count.value)


class LabelledCounter(_Registered):
    """A counter for each combination of labels that was seen. Callers bound what they pass."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self._labels = labels
        self._counts: dict[tuple[object, ...], Count] = {}
        super().__init__(name, text, registry)

    def labels(self, *values: object) -> Count:
        count = self._counts.get(values)
        if count is None:
            count = self._counts[values] = Count()
        return count

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        totals: dict[tuple[str, ...], float] = {}
        for values, count in self._counts.items():
            shown = tuple(map(str, values))  # 200 and "200" are one label
            totals[shown] = totals.get(shown, 0) + count.value
        for shown, total in totals.items():
            family.add_metric(shown, total)
        yield family


class Distribution:
    """How often a value was at most each bound."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        total, buckets = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            name = "+Inf" if bound == float("inf") else str(float(bound))
            buckets.append((name, float(total)))
        family.add_metric(labels, buckets, self._sum)


class LabelledHistogram(_Registered):
    """A distribution for each combination of labels that was seen. Callers bound what they pass."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        bounds: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._labels = labels
        self._bounds = bounds
        self._distributions: dict[tuple[str, ...], Distribution] = {}
        super().__init__(name, text, registry)

    def labels(self, *values: str) -> Distribution:
        found = self._distributions.get(values)
        if found is None:
            found = self._distributions[values] = Distribution(self._bounds)
        return found

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, distribution in self._distributions.items():
            distribution.add_to(family, values)
        yield family


class Histogram(LabelledHistogram):
    """One without labels."""

    def __init__(
        self, name: str, text: str, bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        super().__init__(name, text, (), bounds, registry)
        self.observe = self.labels().observe
