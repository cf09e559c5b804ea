"""Where routers are told that a vLLM engine publishes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from client_sdk.engine.event_endpoints import NOWHERE, EventEndpoints
from client_sdk.engine.vllm_connector.kv_events import event_endpoints
from global_index.hbm.endpoints import check_endpoint

URL = "http://10.0.0.5:8000"


def config(endpoint: str = "tcp://*:5557", replay: str | None = None, **more: Any) -> Any:
    values = {"enable_kv_cache_events": True, "publisher": "zmq", **more}
    return SimpleNamespace(endpoint=endpoint, replay_endpoint=replay, **values)


def test_wildcards_become_the_engines_host_and_ports_go_up_by_rank() -> None:
    both = config(replay="tcp://0.0.0.0:5657")
    assert event_endpoints(both, URL, 0) == EventEndpoints(
        "tcp://10.0.0.5:5557", "tcp://10.0.0.5:5657"
    )
    assert event_endpoints(both, URL, 3) == EventEndpoints(
        "tcp://10.0.0.5:5560", "tcp://10.0.0.5:5660"
    )
    six = event_endpoints(config("tcp://[::]:5557"), "http://[fd00::7]:8000", 0)
    assert six == EventEndpoints("tcp://[fd00::7]:5557", "")
    named = event_endpoints(config("tcp://[fd00::8]:1"), URL, 0)
    assert named.events == "tcp://[fd00::8]:1"


def test_what_is_told_is_what_the_index_connects_to() -> None:
    for endpoint in ("tcp://*:5557", "tcp://[::]:5557", "tcp://[fd00::8]:1"):
        check_endpoint(event_endpoints(config(endpoint), URL, 1).events)


@pytest.mark.parametrize(
    "published",
    [
        None,
        config(enable_kv_cache_events=False),
        config(publisher="null"),
        config("tcp://collector:5557"),
        config("tcp://*:0"),
        config("ipc:///tmp/*"),
    ],
)
def test_an_engine_that_cannot_be_heard_is_not_announced_as_one(published: Any) -> None:
    assert event_endpoints(published, URL, 0) == NOWHERE
