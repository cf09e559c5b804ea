"""Who may give orders, and which token files are believed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from client_sdk.operator_gate import OperatorGate, is_loopback, read_token, speaker
from emberkv_proto.errors import AccessDeniedError, ConfigError, UnauthenticatedError

TOKEN = b"0123456789abcdef"


@pytest.mark.parametrize(
    "peer",
    [
        "ipv4:127.0.0.1:4711",
        "ipv4:127.9.9.9:1",
        "ipv6:[::1]:80",
        "ipv6:%5B::1%5D:80",
        "ipv6:[::ffff:127.0.0.1]:80",
    ],
)
def test_this_machine_needs_no_token(peer: str) -> None:
    assert is_loopback(peer)
    OperatorGate().check(peer, None)
    OperatorGate(TOKEN).check(peer, None)


@pytest.mark.parametrize(
    "peer",
    [
        "ipv4:10.0.0.1:4711",
        "ipv6:[fe80::1%25eth0]:80",
        "ipv6:[::ffff:10.0.0.1]:80",
        "",
        "x",
        "unix:/tmp/s",
        "unix:127.0.0.1:1",
        "ipv4:127.0.0.1.evil:80",
        "ipv4:",
        "ipv6:[::]:1",
    ],
)
def test_everybody_else_does(peer: str) -> None:
    assert not is_loopback(peer)
    with pytest.raises(AccessDeniedError, match=r"daemon\.operator_token_file"):
        OperatorGate().check(peer, f"Bearer {TOKEN.decode()}")
    gate = OperatorGate(TOKEN)
    with pytest.raises(UnauthenticatedError, match="--token-file"):
        gate.check(peer, None)
    gate.check(peer, f"Bearer {TOKEN.decode()}")
    gate.check(peer, b"bearer  " + TOKEN + b" ")


@pytest.mark.parametrize("name", ["X-Forwarded-For", "forwarded", "Via", "x-real-ip"])
def test_a_proxy_beside_the_server_speaks_for_others(name: str) -> None:
    local = "ipv4:127.0.0.1:4711"
    assert speaker(local, ["host", "authorization"]) == local
    with pytest.raises(AccessDeniedError):
        OperatorGate().check(speaker(local, ["host", name]), None)
    OperatorGate(TOKEN).check(speaker(local, [name]), f"Bearer {TOKEN.decode()}")


@pytest.mark.parametrize("sent", ["", "Bearer", "Bearer ", "Basic 0123456789abcdef", "\xff"])
def test_what_is_not_the_token_is_refused(sent: str) -> None:
    with pytest.raises(UnauthenticatedError, match="not this server's"):
        OperatorGate(TOKEN).check("ipv4:10.0.0.1:1", sent)
    with pytest.raises(UnauthenticatedError):
        OperatorGate(TOKEN).check("ipv4:10.0.0.1:1", f"Bearer {TOKEN.decode()[:-1]}")


def token_file(directory: Path, content: bytes, mode: int = 0o600) -> Path:
    path = directory / "token"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_token_is_the_files_only_line(tmp_path: Path) -> None:
    assert read_token(token_file(tmp_path, TOKEN + b"\n")) == TOKEN
    assert read_token(token_file(tmp_path, TOKEN, 0o400)) == TOKEN


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (TOKEN, 0o640, "chmod 600"),
        (TOKEN, 0o604, "chmod 600"),
        (b"", 0o600, "openssl rand"),
        (b"short", 0o600, "16 to 1024"),
        (b"x" * 1025, 0o600, "16 to 1024"),
        (b"x" * (1 << 20), 0o600, "16 to 1024"),
        (TOKEN + b"\n" + TOKEN, 0o600, "one secret"),
        ("schlüsselschlüssel".encode(), 0o600, "ASCII"),
        (TOKEN + b"\0", 0o600, "ASCII"),
    ],
)
def test_a_token_file_that_is_open_or_odd_is_refused_without_showing_it(
    tmp_path: Path, content: bytes, mode: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read_token(token_file(tmp_path, content, mode))
    assert "0123456789" not in str(caught.value)


@pytest.mark.skipif(os.getuid() != 0, reason="gives files to other users")
@pytest.mark.parametrize(
    ("mode", "group", "is_allowed"),
    [(0o440, 7777, True), (0o440, 7778, False), (0o460, 7777, False), (0o444, 7777, False)],
)
def test_a_pods_secret_may_be_read_by_the_pods_group_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, group: int, is_allowed: bool
) -> None:
    path = token_file(tmp_path, TOKEN, mode)
    os.chown(path, 0, group)
    monkeypatch.setattr(os, "geteuid", lambda: 7776)
    monkeypatch.setattr(os, "getegid", lambda: 7777)
    if is_allowed:
        assert read_token(path) == TOKEN
    else:
        with pytest.raises(ConfigError, match="chmod 600"):
            read_token(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(tmp_path / "none")
    with pytest.raises(ConfigError, match="not a file"):
        read_token(tmp_path)
