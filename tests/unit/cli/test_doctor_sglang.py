"""What `emberkv doctor sglang` says of a server's settings."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from client_sdk.cli.doctor import Verdict
from client_sdk.cli.doctor_sglang import EVENTS_EXAMPLE, EXAMPLE, examine_info
from client_sdk.cli.main import run_with

URL = "http://10.0.0.6:30000"


def info(extra: dict[str, Any] | str | None = None, **changes: Any) -> dict[str, Any]:
    given = {**json.loads(EXAMPLE), "engine_url": URL, "socket_path": "/nowhere/d.sock"}
    if isinstance(extra, dict):
        given = {**given, **extra}
    text = extra if isinstance(extra, str) else json.dumps(given)
    plain = {
        "enable_hierarchical_cache": True,
        "hicache_mem_layout": "page_first",
        "hicache_write_policy": "write_through",
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": text,
        "page_size": 64,
        "kv_events_config": EVENTS_EXAMPLE,
    }
    return {**plain, **changes}


def verdicts(said: dict[str, Any]) -> dict[str, Verdict]:
    return {finding.check: finding.verdict for finding in examine_info(said)}


def test_a_server_that_is_right_has_no_finding_but_its_daemon() -> None:
    found = verdicts(info())
    assert found.pop("store daemon") is Verdict.WARN
    assert set(found.values()) == {Verdict.OK}
    events = next(f for f in examine_info(info()) if f.check == "kv-events-config")
    assert events.seen == "tcp://10.0.0.6:5557, replays tcp://10.0.0.6:5657"


@pytest.mark.parametrize(
    ("said", "check", "verdict"),
    [
        (info(enable_hierarchical_cache=False), "host pool", Verdict.FAIL),
        (info(disable_radix_cache=True), "prefix cache", Verdict.FAIL),
        (info(hicache_write_policy="write_back"), "write policy", Verdict.WARN),
        (info(speculative_algorithm="EAGLE"), "speculative decoding", Verdict.FAIL),
        (info(hicache_storage_backend=None), "storage backend", Verdict.FAIL),
        (info(hicache_storage_backend="file"), "storage backend", Verdict.FAIL),
        (info("{"), "hicache-storage-backend-extra-config", Verdict.FAIL),
        (info("[]"), "hicache-storage-backend-extra-config", Verdict.FAIL),
        (info("@/nowhere.json"), "hicache-storage-backend-extra-config", Verdict.WARN),
        (info({"module_path": "other"}), "module_path", Verdict.FAIL),
        (info({"class_name": "Other"}), "class_name", Verdict.FAIL),
        (info({"interface_v1": 0}), "interface_v1", Verdict.WARN),
        (info({"hicache_storage_pass_prefix_keys": False}), "prefix keys", Verdict.WARN),
        (info({"socket": "x"}), "extra config", Verdict.FAIL),
        (info({"engine_url": ""}), "engine_url", Verdict.WARN),
        (info({"engine_url": ""}), "kv-events-config", Verdict.WARN),
        (info(page_size=1), "page size", Verdict.WARN),
        (info(hicache_mem_layout="layer_first"), "memory layout", Verdict.WARN),
        (info(hicache_mem_layout="page_unified"), "memory layout", Verdict.FAIL),
        (info(kv_events_config=None), "kv-events-config", Verdict.WARN),
        (info(kv_events_config="{"), "kv-events-config", Verdict.FAIL),
        (info(kv_events_config='{"publisher": "null"}'), "kv-events-config", Verdict.WARN),
        (info(kv_events_config='{"publisher": "zmq"}'), "kv-events-config", Verdict.WARN),
    ],
)
def test_what_is_wrong_is_named(said: dict[str, Any], check: str, verdict: Verdict) -> None:
    assert verdicts(said)[check] is verdict
    assert all(f.fix for f in examine_info(said) if f.verdict is not Verdict.OK)


def test_an_extra_config_in_a_file_is_read(tmp_path: Path) -> None:
    for name, text in (("c.json", EXAMPLE), ("c.yaml", EXAMPLE)):
        (tmp_path / name).write_text(text)
        assert verdicts(info(f"@{tmp_path / name}"))["interface_v1"] is Verdict.OK
    assert (
        verdicts(info(f"@{tmp_path / 'c.toml'}"))["hicache-storage-backend-extra-config"]
        is Verdict.WARN
    )


@pytest.fixture
def server() -> Iterator[str]:
    """An SGLang that started without a backend, which was attached at run time."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            started = info(hicache_storage_backend=None)
            attached = {"hicache_storage_backend": "dynamic"}
            is_admin = self.headers.get("authorization") == "Bearer secret"
            said = started if self.path == "/server_info" else attached
            body = json.dumps(said).encode()
            self.send_response(200 if self.path == "/server_info" or is_admin else 401)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answers) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{http.server_address[1]}"
        http.shutdown()
        thread.join()


def test_what_was_attached_at_run_time_needs_the_admins_key(
    server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_with(["doctor", "sglang", server]) == 1
    capsys.readouterr()
    assert run_with(["doctor", "sglang", server, "--admin-key", "secret", "--json"]) == 0
    assert "storage backend" in capsys.readouterr().out
    assert run_with(["doctor", "sglang", server, "--admin-key", "wrong"]) != 0


def test_a_server_that_is_away_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_with(["doctor", "sglang", "http://127.0.0.1:9"]) != 0
    assert "Traceback" not in capsys.readouterr().err
