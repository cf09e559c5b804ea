"""Peers of the benchmarks: never silently left out, never able to end the run of the others."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from benchmarks import _peers, _store_peers
from benchmarks._figure import Figure, NotAvailable, Options
from benchmarks._peer_servers import _running
from benchmarks._peers import Peer, PeerUnavailableError, installed
from benchmarks._store_copies import Contender, copies
from benchmarks._store_paged import PagedPeer, paged
from benchmarks._store_peers import RunningPeer, paged_peers, running_peers
from benchmarks._workers import Worker, WorkerFailedError
from client_sdk.cli.cluster_plan import choose_port

QUICK = Options(quick=True)
NUMPY_FREE = Peer("plain", (), "import json", "none")


class Scripted:
    """Stands in for a child process."""

    def __init__(self, fails_at: str = "") -> None:
        self.fails_at = fails_at
        self.verbs: list[str] = []

    def tell(self, verb: str, **arguments: object) -> None:
        self.verbs.append(verb)

    def answer(self) -> dict[str, float]:
        if self.verbs[-1] == self.fails_at:
            raise WorkerFailedError("no room")
        return {"byte_count": 10, "begun": 1.0, "ended": 2.0}

    def ask(self, verb: str, **arguments: object) -> dict[str, float]:
        self.tell(verb, **arguments)
        return self.answer()


def contender(name: str, fails_at: str = "", is_peer: bool = True) -> Contender:
    return Contender(name, [Scripted(fails_at)], is_peer)  # type: ignore[list-item]


def test_a_peer_that_fails_is_out_with_its_reason_and_the_others_go_on() -> None:
    ours, good, bad = contender("us", is_peer=False), contender("good"), contender("bad", "get")
    lines = list(copies(ours, [good, bad], 0, QUICK, sizes=(1 << 20,)))
    beside = {line.name.rpartition("_")[2]: line for line in lines if "beside" in line.name}
    assert [line.is_ok for line in lines if line.name.startswith("put")]
    assert isinstance(beside["good"], Figure)
    assert isinstance(beside["bad"], NotAvailable)
    assert beside["bad"].why == "get: no room"
    assert isinstance(lines[1], Figure)
    assert math.isnan(bad.rate("put", 1))
    with pytest.raises(WorkerFailedError):
        list(copies(contender("us", "get", is_peer=False), [good], 0, QUICK, sizes=(4096,)))


def test_paged_peers_fail_alone_too() -> None:
    peers = [
        RunningPeer("mooncake_daemon", Worker, True),  # type: ignore[arg-type]
        RunningPeer("lmcache", Worker, True),  # type: ignore[arg-type]
        RunningPeer("redis", Worker, False),  # type: ignore[arg-type]
    ]
    entered = [
        contender("mooncake_daemon", "paged_load"),
        contender("lmcache"),
        contender("redis"),
    ]
    with paged_peers(entered, peers) as pages:
        assert [peer.name for peer in pages] == ["mooncake_daemon", "lmcache"]
        ours = Scripted()
        lines = list(paged(ours, 1, pages, QUICK, layers=2))  # type: ignore[arg-type]
    assert [type(line) for line in lines] == [Figure, NotAvailable, Figure]
    assert entered[1].clients[0].verbs[-1] == "paged_close"  # type: ignore[attr-defined]
    assert math.isnan(PagedPeer("x", ours, "out").round_trip())  # type: ignore[arg-type]


def test_a_venv_is_made_once_and_again_after_an_installation_that_did_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def run(peer: Peer, what: str, command: list[str], timeout_seconds: float) -> None:
        made.append(what)
        assert timeout_seconds > 0
        if what == "install" and len(made) < 3:
            raise PeerUnavailableError("no wheel")
        if what.startswith("make"):
            Path(command[-1]).mkdir()

    monkeypatch.setattr(_peers, "_run", run)
    with pytest.raises(PeerUnavailableError, match="no wheel"):
        installed(NUMPY_FREE, tmp_path)
    first = installed(NUMPY_FREE, tmp_path)
    assert installed(NUMPY_FREE, tmp_path) == first
    assert made == ["make a venv for", "install"] * 2 + ["try"] * 2
    assert first.is_relative_to(tmp_path)


@pytest.mark.parametrize(
    ("program", "seconds", "match"),
    [
        ("raise SystemExit(3)", 30.0, "exit code 3"),
        ("import time; time.sleep(60)", 0.2, "within"),
    ],
)
def test_what_cannot_be_installed_says_why(program: str, seconds: float, match: str) -> None:
    with pytest.raises(PeerUnavailableError, match=match):
        _peers._run(NUMPY_FREE, "try", [sys.executable, "-c", program], seconds)
    with pytest.raises(PeerUnavailableError, match="No such file"):
        _peers._run(NUMPY_FREE, "try", ["/nowhere/python"], 1.0)


def test_a_server_is_waited_for_and_one_that_ends_says_so() -> None:
    port = choose_port()
    listen = f"import socket, time; s = socket.create_server(('127.0.0.1', {port})); time.sleep(60)"
    with _running("listener", [sys.executable, "-c", listen], port):
        pass
    with (
        pytest.raises(PeerUnavailableError, match="code 4"),
        _running("broken", [sys.executable, "-c", "raise SystemExit(4)"], port),
    ):
        pass


def test_every_peer_that_cannot_be_had_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(peer: Peer, directory: Path) -> Path:
        raise PeerUnavailableError(f"no {peer.name} here")

    monkeypatch.setattr(_store_peers, "installed", refuse)
    with running_peers(tmp_path) as (running, missing):
        assert running == []
        assert {line.name: line.why for line in missing} == {
            "mooncake_daemon": "no mooncake here",
            "mooncake_embedded": "no mooncake here",
            "lmcache": "no lmcache here",
            "redis": "no redis here",
        }
    with running_peers(None) as nobody:
        assert nobody == ([], [])
