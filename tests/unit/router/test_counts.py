"""Counters of the router say what prometheus_client's would."""

from __future__ import annotations

import prometheus_client as reference
from prometheus_client import CollectorRegistry, generate_latest

from router.counts import Counter, Histogram, LabelledCounter, LabelledHistogram

BOUNDS = (0.1, 1.0, 10.0)
VALUES = (0.05, 0.1, 0.5, 10.0, 11.0)


def test_the_exposition_is_that_of_prometheus_client() -> None:
    own, theirs = CollectorRegistry(), CollectorRegistry()
    Counter("a", "text", own).inc(3)
    reference.Counter("a", "text", registry=theirs).inc(3)
    labelled = LabelledCounter("b", "text", ("x", "y"), own)
    labelled_there = reference.Counter("b", "text", ("x", "y"), registry=theirs)
    histogram = Histogram("c", "text", BOUNDS, own)
    histogram_there = reference.Histogram("c", "text", buckets=BOUNDS, registry=theirs)
    by_label = LabelledHistogram("d", "text", ("x",), BOUNDS, own)
    by_label_there = reference.Histogram("d", "text", ("x",), buckets=BOUNDS, registry=theirs)
    for value in VALUES:
        labelled.labels("p", 'q"\n').inc(value)
        labelled_there.labels("p", 'q"\n').inc(value)
        histogram.observe(value)
        histogram_there.observe(value)
        by_label.labels("z").observe(value)
        by_label_there.labels("z").observe(value)
    assert samples(own) == samples(theirs)
    assert b'b_total{x="p",y="q\\"\\n"}' in generate_latest(own)


def samples(registry: CollectorRegistry) -> dict[str, float]:
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_a_number_and_its_text_are_one_label() -> None:
    registry = CollectorRegistry()
    counter = LabelledCounter("a", "text", ("status",), registry)
    counter.labels(200).inc()
    counter.labels("200").inc(2)
    assert registry.get_sample_value("a_total", {"status": "200"}) == 3
