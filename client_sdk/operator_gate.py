"""Who may give a server orders: processes of its own machine, and whoever has the token."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote

from emberkv_proto.errors import AccessDeniedError, ConfigError, UnauthenticatedError

log = logging.getLogger(__name__)
MIN_TOKEN_BYTES = 16
MAX_TOKEN_BYTES = 1024
SCHEME = "bearer"
FORWARDING_HEADERS = frozenset({"forwarded", "via", "x-forwarded-for", "x-real-ip"})
"""What a proxy adds when it speaks for somebody else."""


class OperatorGate:
    """Lets a call in or says why not. `token` is the secret that callers from elsewhere send.

    `setting` is the key of its file, for messages.
    """

    def __init__(
        self, token: bytes | None = None, setting: str = "daemon.operator_token_file"
    ) -> None:
        self.token = token
        self._setting = setting

    def check(self, peer: str, authorization: str | bytes | None) -> None:
        """Let a caller in, by its address as gRPC writes it and the header that it sent.

        Raises:
            AccessDeniedError: from elsewhere, and there is no token.
            UnauthenticatedError: from elsewhere, without the token.
        """
        if is_loopback(peer):
            return
        if self.token is None:
            raise AccessDeniedError(
                f"operators' calls are answered on loopback only; call from the server's own"
                f" machine, or set {self._setting} there"
            )
        if authorization is None:
            raise UnauthenticatedError(
                "operators' calls from other machines need the server's token; send the one of"
                f" {self._setting} as `authorization: Bearer <token>` (--token-file)"
            )
        sent = authorization.encode() if isinstance(authorization, str) else authorization
        scheme, _, secret = sent.partition(b" ")
        is_right = hmac.compare_digest(secret.strip(), self.token)
        if scheme.lower() != SCHEME.encode() or not is_right:
            raise UnauthenticatedError(
                f"the token is not this server's; send the one of its {self._setting}"
            )


def speaker(peer: str, header_names: Iterable[str]) -> str:
    """Whom a call is from, for `OperatorGate.check`: `peer`, or nobody known behind a proxy.

    A proxy beside the server comes from loopback, whoever called it.
    """
    is_forwarded = any(name.lower() in FORWARDING_HEADERS for name in header_names)
    return "" if is_forwarded else peer


def is_loopback(peer: str) -> bool:
    """Whether gRPC's name of a peer, ipv4:127.0.0.1:80 or ipv6:[::1]:80, is this machine's own."""
    kind, _, rest = unquote(peer).partition(":")
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0]
    if kind not in ("ipv4", "ipv6"):
        return False
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback


def _is_ours_by_group(status: os.stat_result) -> bool:
    """Whether root gave the file to the group of this process, which is not root."""
    return 0 == status.st_uid != os.geteuid() and status.st_gid in (os.getegid(), *os.getgroups())


def read_token(path: Path, setting: str = "daemon.operator_token_file") -> bytes:
    """The secret of a token file: its only line. `setting` is named in messages.

    Raises ConfigError when others than its owner may read it, the owner is another user, or it
    holds no such secret; the message never shows what is in it. A pod's Secret volume is root's
    and readable by the pod's group: that is allowed.
    """
    what = f"{setting} {path}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            content = os.read(fd, MAX_TOKEN_BYTES + 2) if stat.S_ISREG(status.st_mode) else b""
        finally:
            os.close(fd)
    except OSError as error:
        raise ConfigError(f"{what} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{what} is not a file")
    if status.st_mode & (0o037 if _is_ours_by_group(status) else 0o077):
        raise ConfigError(
            f"{what} can be used by others (mode {stat.S_IMODE(status.st_mode):o}); chmod 600"
        )
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"{what} belongs to uid {status.st_uid}, not to uid {os.geteuid()}")
    token = content.strip()
    if not MIN_TOKEN_BYTES <= len(token) <= MAX_TOKEN_BYTES or len(token.split()) != 1:
        raise ConfigError(
            f"{what} must hold one secret of {MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES} bytes without"
            " spaces; make one with: openssl rand -hex 32"
        )
    if any(byte < 0x21 or byte > 0x7E for byte in token):
        raise ConfigError(f"{what} must hold printable ASCII only; openssl rand -hex 32 makes one")
    return token


def open_token(path: Path | None, is_private: bool, setting: str) -> bytes | None:
    """The secret of a setting's file, if it is set; warns unless the network `is_private` by TLS.

    Raises ConfigError as `read_token` does.
    """
    if path is None:
        return None
    if not is_private:
        section = setting.partition(".")[0]
        log.warning(
            "operators send the token of %s in the clear; set %s.tls_cert_file, tls_key_file and"
            " tls_ca_file",
            setting,
            section,
        )
    return read_token(path, setting)
