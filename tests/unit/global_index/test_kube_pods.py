"""What pods and leases come to: daemons, engines, who shares a node, who is silent."""

from __future__ import annotations

from typing import Any

import pytest

from client_sdk.settings import load_settings
from emberkv_proto.errors import ConfigError, InvalidRequestError
from global_index.config import IndexSettings
from global_index.kube.listing import Listing, ListPage, Watch
from global_index.kube.pods import (
    Heartbeats,
    Lease,
    Pod,
    discovered,
    parse_lease,
    parse_pod,
)
from tests.helpers.naive_kube_api import pod


def read(name: str, node: str = "node-1", ip: str = "10.0.0.1", **more: Any) -> Pod:
    return parse_pod(pod(name, node, ip, **more))


def test_an_engine_is_paired_with_the_daemon_of_its_node() -> None:
    daemons = [read("d1", "node-1", "10.0.0.1"), read("d2", "node-2", "10.0.0.2")]
    engines = [
        read("e1", "node-2", "10.0.1.1", notes={"model": "m"}),
        read("e2", "node-3", "10.0.1.2"),
    ]
    found = discovered(daemons, engines)
    assert [(d.address, d.node_id, d.is_ready) for d in found.daemons] == [
        ("10.0.0.1:7100", "node-1", True),
        ("10.0.0.2:7100", "node-2", True),
    ]
    first, second = found.engines
    assert (first.node_id, first.info.url, first.info.model) == (
        "node-2",
        "http://10.0.1.1:8000",
        "m",
    )
    assert second.node_id == ""  # it has no store
    assert second.info.block_tokens == 0
    assert found.faults == ()


def test_a_node_id_of_its_own_is_what_engines_are_paired_by() -> None:
    found = discovered([read("d", notes={"node-id": "rack-7"})], [read("e", ip="10.0.1.1")])
    assert found.daemons[0].node_id == found.engines[0].node_id == "rack-7"


def test_annotations_tell_of_model_namespace_events_and_ranks() -> None:
    notes = {
        "model": "m",
        "role": "decode",
        "engine-id": "e-7",
        "port": "8123",
        "events-port": "5557",
        "replay-port": "5657",
        "namespace-id": "ab" * 16,
        "block-tokens": "128",
        "data-parallel-ranks": "2",
    }
    ranks = discovered([], [read("e", ip="fd00::7", notes=notes)]).engines
    assert [rank.info.dp_rank for rank in ranks] == [0, 1]
    info = ranks[1].info
    assert (info.engine_id, info.url, info.role) == ("e-7", "http://[fd00::7]:8123", "decode")
    assert info.namespace_id == bytes.fromhex("ab" * 16)
    assert info.block_tokens == 128
    assert info.events_endpoint == "tcp://[fd00::7]:5558"
    assert info.replay_endpoint == "tcp://[fd00::7]:5658"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("port", "no"),
        ("port", "70000"),
        ("role", "boss"),
        ("namespace-id", "xyz"),
        ("events-port", "0"),
        ("block-tokens", "-1"),
    ],
)
def test_a_wrong_annotation_is_named_and_costs_that_pod_alone(key: str, value: str) -> None:
    notes = {"events-port": "5557", key: value}
    engines = [read("bad", notes=notes), read("good", ip="10.0.1.2")]
    found = discovered([], engines)
    assert [engine.name.name for engine in found.engines] == ["good"]
    (fault,) = found.faults
    assert "ns/bad" in fault
    assert f"emberkv.dev/{key}" in fault


def test_a_daemon_without_its_port_is_a_fault() -> None:
    raw = pod("d")
    raw["spec"]["containers"][0]["ports"] = []
    found = discovered([parse_pod(raw)], [])
    assert found.daemons == ()
    assert "emberkv.dev/grpc-port" in found.faults[0]


def test_a_daemon_that_is_not_ready_is_followed_and_an_ended_one_is_not() -> None:
    daemons = [
        read("unready", "n1", "10.0.0.1", ready=False),
        read("leaving", "n2", "10.0.0.2", leaving=True),
        read("done", "n3", "10.0.0.3", phase="Succeeded"),
        read("unborn", "n4", ""),
        read("unbound", "", "10.0.0.5"),
    ]
    found = discovered(daemons, [])
    assert [(d.name.name, d.is_ready) for d in found.daemons] == [
        ("leaving", False),
        ("unready", False),
    ]


def test_pods_of_a_silent_node_are_not_ready() -> None:
    found = discovered([read("d")], [read("e", ip="10.0.1.1")], frozenset({"node-1"}))
    assert [found.daemons[0].is_ready, found.engines[0].is_ready] == [False, False]


def test_a_node_is_silent_when_its_lease_has_not_changed_for_as_long_as_it_lasts() -> None:
    beats = Heartbeats()
    beats.on_leases([Lease("n1", "t0", 40), Lease("n2", "t0", 40)], now=0.0)
    beats.on_leases([Lease("n1", "t1", 40), Lease("n2", "t0", 40)], now=30.0)
    assert beats.silent(39.0) == frozenset()
    assert beats.silent(41.0) == {"n2"}
    beats.on_leases([Lease("n1", "t1", 40), Lease("n2", "t2", 40)], now=41.0)
    assert beats.silent(42.0) == frozenset()
    beats.check_integrity()


def test_time_without_an_api_server_is_nobody_s_silence() -> None:
    beats = Heartbeats()
    beats.on_leases([Lease("n1", "t0", 40)], now=0.0)
    beats.on_blind(500.0)
    assert beats.silent(539.0) == frozenset()
    assert beats.silent(541.0) == {"n1"}
    beats.on_leases([], now=542.0)  # the node is gone, and its lease with it
    assert beats.silent(542.0) == frozenset()
    beats.check_integrity()


def test_a_lease_without_a_duration_lasts_as_long_as_kubelet_s() -> None:
    spec = {"holderIdentity": "n1", "renewTime": "t"}
    assert parse_lease({"spec": spec}) == Lease("n1", "t", 40)
    assert parse_lease({"spec": {**spec, "leaseDurationSeconds": 7}}).seconds == 7


@pytest.mark.parametrize(
    "raw",
    [
        {"metadata": 3},
        {"metadata": {"name": "a", "namespace": "b"}, "spec": {"containers": {}}},
        {"metadata": {"name": "a" * 2000}},
        {"metadata": {"name": "a\n"}},
        {"metadata": {"annotations": {"emberkv.dev/model": "x" * 2000}}},
    ],
)
def test_what_is_no_pod_is_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        parse_pod(raw)


def page_of(*names: str, more: str = "", version: str = "7") -> dict[str, Any]:
    meta = {"resourceVersion": version, "continue": more}
    return {"metadata": meta, "items": [pod(name) for name in names]}


def test_no_half_of_a_list_is_shown() -> None:
    listing: Listing[Pod] = Listing(parse_pod)
    assert listing.on_page(page_of("a", more="next")) is False
    assert (listing.objects, listing.is_complete) == ({}, False)
    assert listing.ask() == ListPage("next")
    assert listing.on_page(page_of("b")) is True
    assert sorted(name.name for name in listing.objects) == ["a", "b"]
    assert listing.ask() == Watch("7")
    listing.relist()
    assert listing.on_page(page_of("a", "b", version="9")) is False  # nothing is new
    listing.check_integrity()


def test_what_is_beyond_the_limit_or_unreadable_is_left_out_and_counted() -> None:
    listing: Listing[Pod] = Listing(parse_pod, max_objects=2)
    page = page_of("a", "b", "c")
    page["items"].append({"metadata": {"name": "odd", "namespace": "ns"}, "spec": []})
    listing.on_page(page)
    assert sorted(name.name for name in listing.objects) == ["a", "b"]
    assert (listing.counts.left_out, listing.counts.unreadable) == (1, 1)
    listing.check_integrity()


def test_a_refusal_that_says_nothing_of_the_version_is_asked_again_a_few_times() -> None:
    listing: Listing[Pod] = Listing(parse_pod)
    listing.on_page(page_of("a"))
    for _ in range(2):
        listing.on_refused(403)
        assert listing.ask() == Watch("7")
    listing.on_refused(403)
    assert listing.ask() == ListPage()
    assert listing.objects, "what was known stays known"


def test_settings_want_a_selector_and_know_their_words() -> None:
    with pytest.raises(ConfigError, match="daemons or engines"):
        load_settings(IndexSettings, None, ["index.kubernetes={}"], {})
    with pytest.raises(ConfigError, match="label selector"):
        load_settings(IndexSettings, None, ["index.kubernetes={daemons: 'a&b'}"], {})
    wrong = "index.kubernetes={daemons: 'a=b', api_url: 'here'}"
    with pytest.raises(ConfigError, match="api_url"):
        load_settings(IndexSettings, None, [wrong], {})
    text = "index.kubernetes={daemons: 'a in (b, c),d!=e', engine_namespaces: [x, y]}"
    section = load_settings(IndexSettings, None, [text], {}).index.kubernetes
    assert section is not None
    assert section.engine_namespaces == ("x", "y")
