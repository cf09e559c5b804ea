"""Operators' commands against a real daemon, as they type them."""

from __future__ import annotations

import asyncio
import io
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from client_sdk.aio import timeout
from client_sdk.cli.main import run_with
from client_sdk.sync_client import SyncClient
from emberkv_proto.types import BlockHash, EngineInfo
from global_index.config import IndexSection
from global_index.embedded import GlobalIndex
from global_index.service import start_server
from tests.helpers.certificates import Authority
from tests.helpers.daemon_process import DaemonProcess
from tests.helpers.store import chain, payload, small_namespace

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]
NAMESPACE = small_namespace()
HASHES = chain(NAMESPACE, 10)
SALT = "5a" * 16
SECONDS = 60.0


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    directory = tmp_path_factory.mktemp("op")
    with DaemonProcess(directory, ssd_bytes=4 << 20) as daemon:
        yield daemon


Emberkv = Callable[..., Any]


@pytest.fixture
def emberkv(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> Emberkv:
    """Run a command against the daemon; what it printed as JSON."""

    def run(*words: str, status: int = 0) -> Any:
        capsys.readouterr()
        address = daemon.endpoints["grpc_address"]
        assert run_with([*words, "--address", address, "--json"]) == status
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture(autouse=True)
def stored(daemon: DaemonProcess, emberkv: Emberkv) -> None:
    """Ten blocks in both tiers, no pins, whatever the test before did."""
    emberkv("unpin", "--all")
    emberkv("clear", "--yes")
    put(daemon, HASHES)
    deadline = time.monotonic() + SECONDS
    while any(t["blocks"] < 10 for t in emberkv("status")["tiers"]):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def put(daemon: DaemonProcess, hashes: list[BlockHash]) -> None:
    with SyncClient(daemon.socket_path, NAMESPACE, timeout_seconds=30.0) as client:
        staged = client.stage(hashes)
        for number in staged.granted:
            staged.view(number)[:] = payload(hashes[number], 0, 5000)
        staged.commit()


def blocks_in(emberkv: Emberkv, tier: str) -> int:
    (found,) = [t["blocks"] for t in emberkv("status")["tiers"] if t["tier"] == tier]
    return int(found)


def hex_of(hashes: list[BlockHash]) -> str:
    return ",".join(block.hex() for block in hashes)


def of(hashes: list[BlockHash]) -> tuple[str, ...]:
    return ("--namespace", NAMESPACE.id.hex(), "--hashes", hex_of(hashes))


def test_pin_clear_unpin_and_status_tell_the_same_story(emberkv: Emberkv) -> None:
    pinned = emberkv("pin", *of(HASHES[:3]))
    assert (pinned["pinned_blocks"], pinned["pinned_bytes"]) == (3, 3 * 8192)
    status = emberkv("status")
    assert status["state"] == "serving"
    assert status["pins"]["hard_blocks"] == 3
    assert status["drives"][0]["state"] == "ok"
    assert emberkv("clear", "--dry-run")["would_clear_of"] == {"dram": 10, "ssd": 10}
    cleared = emberkv("clear", "--yes")
    assert cleared["kept_blocks"] == 6  # three in each tier
    assert blocks_in(emberkv, "dram") == blocks_in(emberkv, "ssd") == 3
    assert emberkv("unpin", *of(HASHES[:1]))["unpinned_blocks"] == 1
    assert emberkv("unpin", "--namespace", NAMESPACE.id.hex())["unpinned_blocks"] == 2
    emberkv("clear", "--tier", "ssd", "--namespace", NAMESPACE.id.hex(), "--yes")
    assert blocks_in(emberkv, "ssd") == 0


def test_blocks_that_are_not_here_are_said_to_be_left_out(
    emberkv: Emberkv, capsys: pytest.CaptureFixture[str]
) -> None:
    pinned = emberkv("pin", *of([*HASHES[:2], *chain(NAMESPACE, 1, 77)]), "--ttl", "60", status=1)
    assert (pinned["asked_blocks"], pinned["pinned_blocks"], pinned["pinned_bytes"]) == (3, 2, 0)
    assert emberkv("status")["pins"]["soft_blocks"] == 2


def test_named_blocks_and_bytes_are_evicted(
    emberkv: Emberkv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(h.hex() for h in HASHES[8:])))
    evicted = emberkv("evict", "--tier", "dram", "--namespace", NAMESPACE.id.hex(), "--hashes", "-")
    assert evicted["evicted_blocks"] == 2
    assert blocks_in(emberkv, "dram") == 8
    assert emberkv("evict", "--tier", "DRAM", "--bytes", "8193")["evicted_blocks"] == 2
    assert blocks_in(emberkv, "ssd") == 10


def test_a_quota_is_set_shown_and_lifted(emberkv: Emberkv) -> None:
    limits = ("--dram-bytes", "1000", "--ssd-bytes", "2000")
    (tenant,) = emberkv("quota", SALT, *limits)["tenants"]
    assert (tenant["dram_limit_bytes"], tenant["ssd_limit_bytes"]) == (1000, 2000)
    assert emberkv("quota")["tenants"] == [tenant]
    emberkv("quota", SALT, "--dram-bytes", "0", "--ssd-bytes", "0")
    assert emberkv("quota", SALT)["tenants"][0]["dram_limit_bytes"] == 0


@pytest.mark.parametrize(
    "words",
    [
        ("evict", "--tier", "dram", "--bytes", str(1 << 64)),
        ("quota", "ab" * 16, "--dram-bytes", str(1 << 64), "--ssd-bytes", "0"),
        ("quota", "ab" * 16, "--dram-bytes", "0", "--ssd-bytes", str((1 << 62) + 1)),
    ],
)
def test_more_bytes_than_any_tier_has_is_a_mistake(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert run_with([*words, "--address", daemon.endpoints["grpc_address"]]) == 2
    assert "should be less" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("pin", "--hashes", "aa"), "--namespace"),
        (("pin", "--namespace", "00", "--hashes", "aa" * 32), "32 hexadecimal digits"),
        (("pin", "--namespace", "00" * 16, "--hashes", "aa"), "64 hexadecimal digits"),
        (("pin", "--namespace", "00" * 16, "--hashes", "aa" * 32), "is not known here"),
        (("pin",), "--prompt-file or --tokens"),
        (("pin", "--tokens", "1", "--hashes", "aa" * 32), "--prompt-file or --tokens"),
        (("pin", "--prompt-file", "/nowhere"), "cannot be read"),
        (("unpin", "--all", "--namespace", "00" * 16), "--all"),
        (("evict", "--tier", "hbm", "--bytes", "1"), "dram or ssd"),
        (("evict", "--tier", "dram"), "name blocks"),
        (("clear",), "--yes"),
        (("quota", "xyz"), "32 hexadecimal digits"),
        (("quota", "--dram-bytes", "1"), "--ssd-bytes"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    daemon: DaemonProcess,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    capsys.readouterr()
    assert run_with([*words, "--address", daemon.endpoints["grpc_address"]]) == 2
    shown = capsys.readouterr().err
    assert says in shown
    assert shown.startswith("emberkv: ")
    assert shown.count("\n") == 1


def test_people_read_sentences_and_tables(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    address = ("--address", daemon.endpoints["grpc_address"])
    capsys.readouterr()
    for words in (
        ("pin", *of(HASHES)),
        ("status",),
        ("quota",),
        ("evict", "--tier", "ssd", "--bytes", "1"),
        ("unpin", "--all"),
        ("clear", "--dry-run"),
    ):
        assert run_with([*words, *address]) == 0
    shown = capsys.readouterr().out
    for words in (
        "pinned 10 of 10 blocks",
        "node-a at",
        "pins: 10 hard",
        "stay (pinned, or being read or written)",
        "unpinned 10 blocks",
        "clear would take all but hard pins",
    ):
        assert words in shown, shown


def test_a_daemon_that_is_away_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_with(["unpin", "--all", "--address", "127.0.0.1:1"]) == 1
    assert "127.0.0.1:1" in capsys.readouterr().err


async def test_a_prompts_blocks_are_named_by_its_tokens(
    daemon: DaemonProcess, emberkv: Emberkv
) -> None:
    engine = EngineInfo("engine-a", "http://127.0.0.1:1", "tiny", NAMESPACE.id, 4)
    section = IndexSection(nodes=(daemon.endpoints["grpc_address"],), backend="python")
    tokens = ",".join(str(number) for number in range(4 * 5 + 3))
    with SyncClient(daemon.socket_path, NAMESPACE, engine=engine, timeout_seconds=30.0) as client:
        await asyncio.to_thread(client.probe, HASHES)
        async with GlobalIndex(section) as index, timeout(SECONDS):
            server, port = await start_server(index, "127.0.0.1", 0, lambda _: None)
            try:
                while not any(node.engines for node in index.nodes()):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
                words = ("pin", "--tokens", tokens, "--index", f"127.0.0.1:{port}")
                pinned = await asyncio.to_thread(emberkv, *words)
            finally:
                await server.stop(None)
    assert (pinned["asked_blocks"], pinned["pinned_blocks"]) == (5, 5)


def test_a_changed_file_is_taken_over_on_a_signal_and_on_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "daemon.yaml"

    def configure(**sections: dict[str, Any]) -> None:
        partial = config.with_suffix(".partial")
        partial.write_text(yaml.safe_dump(sections))
        partial.replace(config)

    def has_logged(words: str) -> None:
        deadline = time.monotonic() + SECONDS
        while words not in daemon.log:
            assert time.monotonic() < deadline, daemon.log
            time.sleep(0.02)

    configure(daemon={"log_format": "json"})
    with DaemonProcess(tmp_path / "d", config=config) as daemon:
        lines = [json.loads(line) for line in daemon.log.splitlines()]
        (serving,) = [line for line in lines if line["message"].startswith("serving")]
        assert serving["node"] == "node-a"
        assert serving["incarnation"] == daemon.endpoints["incarnation"]
        with SyncClient(daemon.socket_path, NAMESPACE, timeout_seconds=30.0) as client:
            client.probe(HASHES)
        lines = [json.loads(line) for line in daemon.log.splitlines()]
        opened = [line for line in lines if "opened" in line["message"]][-1]
        assert opened["pid"] == os.getpid()
        assert opened["session"] > 0
        configure(daemon={"log_format": "text", "log_level": "warning", "event_ring_events": 64})
        daemon.hang_up()
        has_logged("waits for a restart: daemon.event_ring_events: 65536 -> 64")
        configure(daemon={"log_levle": "debug"})
        daemon.hang_up()
        has_logged("nothing has changed: unknown key daemon.log_levle")
        address = ("--address", daemon.endpoints["grpc_address"])
        capsys.readouterr()
        assert run_with(["reload", *address]) == 2
        assert "did you mean 'log_level'" in capsys.readouterr().err
        configure(dram={"high_watermark": 0.5, "low_watermark": 0.4})
        assert run_with(["reload", *address]) == 0
        shown = capsys.readouterr().out.splitlines()
        assert "changed: dram.high_watermark: 0.95 -> 0.5" in shown
        with SyncClient(daemon.socket_path, NAMESPACE, timeout_seconds=30.0) as client:
            assert client.probe(HASHES).hit_blocks == 0
        metrics = daemon.metrics()
        assert metrics["emberkv_store_reloads_total"] == 2
        assert metrics["emberkv_store_failed_reloads_total"] == 2


def test_a_service_is_ready_when_it_serves_and_stops_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(str(path))
        heard.settimeout(SECONDS)
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        monkeypatch.setenv("WATCHDOG_USEC", "200000")
        with DaemonProcess(tmp_path / "d") as daemon:
            words = [heard.recv(4096).decode()]
            while "READY=1" not in words[-1]:
                words.append(heard.recv(4096).decode())
            assert words[0].startswith("STATUS=recovering: ")
            assert f"MAINPID={daemon.pid}" in words[-1]
            assert heard.recv(4096) == b"WATCHDOG=1"
            daemon.hang_up()
            for wanted in ("RELOADING=1\nMONOTONIC_USEC=", "READY=1"):
                while not words[-1].startswith(wanted):
                    words.append(heard.recv(4096).decode())
            address = daemon.endpoints["grpc_address"]
            assert run_with(["drain", "--wait", "20", "--address", address]) == 0
            assert "it has ended" in capsys.readouterr().out
            assert daemon.await_end(SECONDS) == 0
            while "STOPPING=1" not in words[-1]:
                words.append(heard.recv(4096).decode())


def outside_address() -> str | None:
    """An address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            return None
        found = str(probe.getsockname()[0])
    return None if found.startswith("127.") else found


def test_from_elsewhere_the_token_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = outside_address()
    if host is None:
        pytest.skip("this machine has no address but loopback")
    token, wrong = tmp_path / "token", tmp_path / "wrong"
    for path, secret in ((token, "0123456789abcdef\n"), (wrong, "f" * 16)):
        path.write_text(secret)
        path.chmod(0o600)
    settings = {"daemon.grpc_host": host, "daemon.operator_token_file": token}
    with DaemonProcess(tmp_path / "d", settings=settings) as daemon:
        address = ("--address", daemon.endpoints["grpc_address"])
        assert run_with(["status", *address, "--token-file", str(token)]) == 0
        capsys.readouterr()
        for words in (("status", *address), ("clear", "--yes", *address)):
            assert run_with([*words]) == 2
            assert "--token-file" in capsys.readouterr().err
        assert run_with(["status", *address, "--token-file", str(wrong)]) == 2
        shown = capsys.readouterr().err
        assert "not this server's" in shown
        assert "0123456789abcdef" not in shown + daemon.log
    with DaemonProcess(tmp_path / "e", settings={"daemon.grpc_host": host}) as daemon:
        address = ("--address", daemon.endpoints["grpc_address"])
        assert run_with(["status", *address, "--token-file", str(token)]) == 2
        assert "loopback only" in capsys.readouterr().err


def test_with_mutual_tls_a_command_needs_a_certificate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority = Authority(tmp_path)

    def settings_of(name: str) -> dict[str, Path]:
        files = authority.issue(name)
        return {
            "daemon.tls_cert_file": files.cert,
            "daemon.tls_key_file": files.key,
            "daemon.tls_ca_file": files.ca,
        }

    with DaemonProcess(tmp_path / "d", settings=settings_of("daemon")) as daemon:
        address = ("--address", daemon.endpoints["grpc_address"])
        mine = [w for k, v in settings_of("me").items() for w in ("--set", f"{k}={v}")]
        assert run_with(["status", *address, *mine]) == 0
        assert "serving" in capsys.readouterr().out
        assert run_with(["status", *address]) == 1
        assert run_with(["status", *address, *mine[:2]]) == 2
        assert "go together" in capsys.readouterr().err
