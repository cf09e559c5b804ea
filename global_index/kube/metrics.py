"""What discovery through the Kubernetes API found, and how it fares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from global_index.kube.discovery import KubernetesDiscovery

_COUNTERS = {
    "lists": "Lists taken over.",
    "watches": "Watches that the server took.",
    "events": "Events of watches.",
    "bookmarks": "Bookmarks of watches.",
    "expired": "Times that the server had forgotten our version (410).",
    "losses": "Connections that failed, refusals, messages without sense.",
    "unreadable": "Objects that could not be understood.",
    "left_out": "Objects beyond the limit.",
}


def kube_metrics(discovery: KubernetesDiscovery) -> Iterable[Metric]:
    current = GaugeMetricFamily(
        "emberkv_index_kube_current", "1: a watch runs.", labels=["collection"]
    )
    objects = GaugeMetricFamily(
        "emberkv_index_kube_objects", "Objects that the API has.", labels=["collection"]
    )
    counters = {
        name: CounterMetricFamily(f"emberkv_index_kube_{name}", text, labels=["collection"])
        for name, text in _COUNTERS.items()
    }
    for collection in discovery.collections:
        labels = [collection.label]
        current.add_metric(labels, float(collection.is_current))
        objects.add_metric(labels, len(collection.listing.objects))
        for name, family in counters.items():
            family.add_metric(labels, getattr(collection.listing.counts, name))
    pods = GaugeMetricFamily(
        "emberkv_index_kube_pods", "Pods that are followed.", labels=["kind", "ready"]
    )
    found = discovery.found
    daemons = Counter(daemon.is_ready for daemon in found.daemons)
    engines = Counter(pod.is_ready for pod in {pod.name: pod for pod in found.engines}.values())
    for kind, counted in (("daemon", daemons), ("engine", engines)):
        for is_ready in (True, False):
            pods.add_metric([kind, str(is_ready).lower()], counted[is_ready])
    yield from (current, objects, *counters.values(), pods)
    yield GaugeMetricFamily(
        "emberkv_index_kube_faulty_pods",
        "Pods whose annotations or ports are wrong.",
        len(found.faults),
    )
    yield GaugeMetricFamily(
        "emberkv_index_kube_silent_nodes",
        "Nodes whose heartbeat has run out.",
        len(discovery.silent_nodes),
    )
