"""A prompt that one vLLM engine prefilled and another waits for, without a vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from client_sdk import SyncClient
from client_sdk.engine.vllm_connector.handover import (
    LONGEST_SECONDS,
    POLL_SECONDS,
    Arrival,
    Handover,
    handover_in,
    handover_params,
    is_handed_over,
)
from emberkv_proto.errors import UnavailableError
from emberkv_proto.layout import Group, GroupKind, Namespace
from emberkv_proto.types import BlockHash, NodeId
from emberkv_proto.wire import Method
from tests.helpers.fake_daemon import FakeDaemon

PART_BYTES = 64
NAMESPACE = Namespace(
    model="m",
    weights_id="w",
    kv_dtype="float32",
    layout_fingerprint="l",
    block_tokens=16,
    groups=(Group(GroupKind.FULL, 1, PART_BYTES),),
)
HASHES = [BlockHash(bytes([n]) * 32) for n in range(1, 9)]
ELSEWHERE = Handover(NodeId("prefill-node"), 6)
PATIENCE = 1.0


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path / "d.sock") as fake:
        yield fake


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[SyncClient]:
    with SyncClient(daemon.socket_path, NAMESPACE, timeout_seconds=20.0) as client:
        yield client


def store(client: SyncClient, hashes: list[BlockHash]) -> None:
    with client.stage(hashes) as staged:
        staged.commit()


def test_what_one_engine_answers_the_other_understands() -> None:
    handover = Handover(NodeId("node-a"), 62)
    assert is_handed_over({"do_remote_decode": True, "remote_host": None})
    assert handover_in(handover_params(handover)) == handover
    assert not is_handed_over(handover_params(handover)), "the decode engine hands nothing on"
    # vLLM adds to the answer, and proxies hand it on as it is.
    assert handover_in({**handover_params(handover), "remote_prefill_cached_tokens": 3}) == handover


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"do_remote_prefill": True},  # another connector's
        {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [[1, 2]]},
        *(
            {"do_remote_prefill": True, "remote_node_id": node, "remote_blocks": blocks}
            for node, blocks in (
                ("n", 0),
                ("n", -1),
                ("n", True),
                ("n", 2.0),
                ("n", "2"),
                ("", 2),
                (7, 2),
                ("n" * 254, 2),
            )
        ),
        {"do_remote_prefill": "yes", "remote_node_id": "n", "remote_blocks": 2},
    ],
)
def test_what_clients_make_up_is_no_handover(params: dict[str, Any] | None) -> None:
    assert handover_in(params) is None


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False}, {"do_remote_decode": 1}])
def test_only_who_asks_for_a_handover_gets_one(params: dict[str, Any] | None) -> None:
    assert not is_handed_over(params)


def test_blocks_are_sent_for_once_and_waited_for_until_all_are_there(
    daemon: FakeDaemon, client: SyncClient
) -> None:
    store(client, HASHES[:2])
    arrival = Arrival(client, ELSEWHERE, HASHES, PATIENCE, now=100.0)
    (asked,) = daemon.prefetch_requests
    assert (asked.source_node_id, asked.patience_seconds) == ("prefill-node", PATIENCE)
    assert (asked.hashes, asked.deadline_seconds) == (b"".join(HASHES[:6]), LONGEST_SECONDS)
    assert not arrival.is_over(100.5)
    store(client, HASHES[2:6])
    assert arrival.is_over(100.6)
    assert arrival.is_complete
    arrival.end()
    arrival.end()
    client.heartbeat()
    assert daemon.cancelled == daemon.prefetches


def test_patience_begins_anew_with_each_block(daemon: FakeDaemon, client: SyncClient) -> None:
    arrival = Arrival(client, ELSEWHERE, HASHES, PATIENCE, now=0.0)
    now = 0.0
    for block in range(5):
        now += 0.9
        store(client, HASHES[block : block + 1])
        assert not arrival.is_over(now)
    assert not arrival.is_over(now + 0.9)
    assert arrival.is_over(now + 1.0)
    assert not arrival.is_complete


def test_steady_blocks_are_not_waited_for_for_ever(daemon: FakeDaemon, client: SyncClient) -> None:
    arrival = Arrival(client, ELSEWHERE, HASHES, LONGEST_SECONDS, now=0.0)
    store(client, HASHES[:5])
    assert not arrival.is_over(LONGEST_SECONDS - 0.1)
    assert arrival.is_over(LONGEST_SECONDS)


def test_an_engine_that_asks_thousands_of_times_asks_the_daemon_rarely(
    daemon: FakeDaemon, client: SyncClient
) -> None:
    arrival = Arrival(client, ELSEWHERE, HASHES, PATIENCE, now=0.0)
    before = daemon.seen.count(Method.PROBE)
    for step in range(1000):
        assert not arrival.is_over(step * POLL_SECONDS / 1000)
    assert daemon.seen.count(Method.PROBE) == before


def test_nothing_is_sent_for_that_is_here_or_comes_here_anyway(
    daemon: FakeDaemon, client: SyncClient
) -> None:
    store(client, HASHES[:4])
    assert Arrival(client, Handover(NodeId("other"), 4), HASHES, PATIENCE, now=0.0).is_over(0.0)
    shared = Arrival(client, Handover(client.node_id, 6), HASHES, PATIENCE, now=0.0)
    assert not shared.is_over(0.5), "the prefill engine's saves have not ended"
    store(client, HASHES[4:6])
    assert shared.is_over(0.6)
    assert not daemon.prefetches


def test_a_daemon_that_goes_away_ends_the_wait(daemon: FakeDaemon, client: SyncClient) -> None:
    arrival = Arrival(client, ELSEWHERE, HASHES, PATIENCE, now=0.0)
    daemon.refuse[Method.PROBE] = UnavailableError("gone")
    assert arrival.is_over(0.5)
    assert not arrival.is_complete
    daemon.hang_up()
    arrival.end()
