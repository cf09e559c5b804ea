"""`emberkv router-key`: a key is made, listed, used and revoked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from client_sdk.cli.main import run_with
from router.keys import KeyRing, read_keys


def test_a_key_lives_from_create_to_revoke(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.json"
    limits = ("--requests-per-minute", "60", "--model", "m", "--model", "n")
    create = ["router-key", "create", "--file", str(file), "--tenant", "acme", *limits]
    assert run_with(create) == 0
    printed = capsys.readouterr()
    key = printed.out.strip()
    assert key not in printed.err
    ring = KeyRing(read_keys(file))
    assert ring.tenant_of(key.encode()) == "acme"
    assert ring.limits_of("acme").models == ("m", "n")

    assert run_with(["router-key", "list", "--file", str(file), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["keys"]
    assert (row["tenant"], row["revoked"]) == ("acme", None)
    assert row["limits"]["requests_per_minute"] == 60
    assert run_with(["router-key", "list", "--file", str(file)]) == 0
    table = capsys.readouterr().out
    assert row["key_id"] in table
    assert key.rsplit("-", 1)[1] not in table

    assert run_with(["router-key", "revoke", row["key_id"], "--file", str(file)]) == 0
    assert KeyRing(read_keys(file)).tenant_of(key.encode()) is None
    assert run_with(["router-key", "revoke", row["key_id"], "--file", str(file)]) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["create", "--tenant", "a/b", "--file", "keys.json"], "tenant 'a/b'"),
        (["create", "--tenant", "a", "--file", "none/keys.json"], "none cannot be used"),
        (["create", "--tenant", "a"], "no key file"),
        (["create", "--tenant", "a", "--file", "k", "--highest-priority", "x"], "high, normal"),
        (["list", "--file", "none.json"], "cannot be read"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_with(["router-key", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert list(tmp_path.iterdir()) == []
