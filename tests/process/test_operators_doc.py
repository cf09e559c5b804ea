"""Every command that docs/operators.md shows is run, in its order, against a real daemon."""

from __future__ import annotations

import json
import re
import shlex
import time
from pathlib import Path
from string import Template

import pytest

from client_sdk.cli.main import run_with
from client_sdk.cli.operator_app import COMMANDS
from client_sdk.sync_client import SyncClient
from tests.helpers.daemon_process import ROOT, DaemonProcess
from tests.helpers.store import chain, payload, small_namespace

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]
DOC = ROOT / "docs" / "operators.md"
NAMESPACE = small_namespace()
HASHES = chain(NAMESPACE, 4)
SECONDS = 60.0


def commands() -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```$", DOC.read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


def test_the_commands_do_as_they_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with DaemonProcess(tmp_path, ssd_bytes=4 << 20) as daemon:
        with SyncClient(daemon.socket_path, NAMESPACE, timeout_seconds=30.0) as client:
            staged = client.stage(HASHES)
            for number in staged.granted:
                staged.view(number)[:] = payload(HASHES[number], 0, 5000)
            staged.commit()
        address = daemon.endpoints["grpc_address"]
        monkeypatch.setenv("EMBERKV_DAEMON__GRPC_PORT", address.rpartition(":")[2])
        names = {
            "ADDRESS": address,
            "NAMESPACE": NAMESPACE.id.hex(),
            "HASHES": ",".join(block.hex() for block in HASHES),
        }
        await_written(address, capsys)
        shown = commands()
        assert len(shown) >= 15
        for line in shown:
            words = shlex.split(Template(line).substitute(names))
            assert words[0] == "emberkv"
            assert run_with(words[1:]) == 0, f"{line}\n{capsys.readouterr().err}"
        assert daemon.await_end(SECONDS) == 0, "the last command is the drain"


def await_written(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    deadline = time.monotonic() + SECONDS
    while True:
        capsys.readouterr()
        assert run_with(["status", "--address", address, "--json"]) == 0
        tiers = json.loads(capsys.readouterr().out)["tiers"]
        if all(tier["blocks"] == len(HASHES) for tier in tiers):
            return
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_document_shows_every_operators_command() -> None:
    shown = " ".join(commands())
    for command in COMMANDS:
        assert f"emberkv {command.__name__}" in shown
