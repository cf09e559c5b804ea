"""What a user sees of the command line, above all when something is wrong."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from client_sdk.cli import app, main
from client_sdk.cli.main import run_with
from emberkv_proto import __version__

EXAMPLE = Path(__file__).parents[3] / "deploy" / "example.yaml"


def test_version_and_help_succeed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_with(["--version"]) == 0
    assert capsys.readouterr().out == f"emberkv {__version__}\n"
    assert run_with(["--help"]) == 0
    shown = capsys.readouterr().out
    for command in ("up", "daemon", "index", "router", "engine", "demo", "status", "where"):
        assert command in shown


def test_help_imports_no_server_and_no_torch() -> None:
    program = (
        "import sys\n"
        "from client_sdk.cli.main import run_with\n"
        "run_with(['--help'])\n"
        "heavy = {'torch', 'grpc', 'numba', 'router', 'store_daemon', 'global_index', 'aiohttp'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=90, check=False
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["config", "show", "--set", "engin.layers=1"], "did you mean 'engine'"),
        (["config", "show", "--config", "/nowhere.yaml"], "/nowhere.yaml cannot be read"),
        (["up", "--set", "cluster.nodse=3"], "did you mean 'nodes'"),
        (["up", "--set", "cluster.nodes=0"], "cluster.nodes"),
        (["demo", "--trace", "/nowhere.jsonl"], "/nowhere.jsonl cannot be read"),
        (["demo", "--json", "/nowhere/at/all.json"], "no such directory"),
        (["demo", "--quick", "--base-dir", "/proc/nowhere"], "set cluster.base_dir"),
        (["where"], "give a prompt"),
        (["where", "--tokens", "1,two"], "token ids must be numbers"),
    ],
)
def test_a_users_mistake_is_one_line_and_status_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_with(arguments) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("emberkv: ")
    assert says in shown
    assert shown.count("\n") == 1


def test_an_unknown_option_is_status_2_without_a_stack_trace(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_with(["up", "--confg", "x"]) == 2
    shown = capsys.readouterr().err
    assert "--confg" in shown
    assert "Traceback" not in shown


def test_an_absent_cluster_is_status_1_with_its_address(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_with(["status", "--index", "127.0.0.1:1"]) == 1
    shown = capsys.readouterr().err
    assert "127.0.0.1:1" in shown
    assert "emberkv up" in shown


def test_a_taken_port_is_refused_with_its_key_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ports = [f"cluster.router_port={port}", "cluster.index_port=0"]
        assert run_with(["up", "--set", ports[0], "--set", ports[1]]) == 2
    shown = capsys.readouterr()
    assert f"127.0.0.1:{port}" in shown.err
    assert "set cluster.router_port" in shown.err
    assert "starting" not in shown.out


def test_a_piped_table_cuts_no_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_with(["config", "show"]) == 0
    assert "router.decode_request_seconds " in capsys.readouterr().out


@pytest.mark.parametrize("command", ["daemon", "up", "demo"])
def test_a_missing_extra_is_named(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = app.importlib.util.find_spec
    monkeypatch.setattr(
        app.importlib.util, "find_spec", lambda name: None if name == "rocksdict" else found(name)
    )
    assert main.run_with([command]) == 2
    assert capsys.readouterr().err == (
        "emberkv: rocksdict is not installed; install emberkv[daemon]\n"
    )


def test_config_show_as_json_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_with(["config", "show", "--json", "--config", str(EXAMPLE)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["cluster"]["router_port"] == {"value": 8000, "origin": f"file {EXAMPLE}"}
