"""Who a kubeconfig's current context is: server, CA, token or client certificate."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from emberkv_proto.errors import ConfigError
from global_index.kube.api import Access

PROXY = "run `kubectl proxy` and give its address: --api http://127.0.0.1:8001"


def read_kubeconfig(path: Path, scratch: Path) -> Access:
    """What it says; certificates and tokens that stand in it go to files in `scratch`.

    Raises ConfigError, also for logins by program and servers that are not to be verified.
    """
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"kubeconfig {path} cannot be read: {error}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"kubeconfig {path} holds no settings")
    context = _named(loaded, "contexts", "context", str(loaded.get("current-context") or ""))
    cluster = _named(loaded, "clusters", "cluster", str(context.get("cluster") or ""))
    user = _named(loaded, "users", "user", str(context.get("user") or ""))
    server = cluster.get("server")
    if not isinstance(server, str) or not server.startswith(("https://", "http://")):
        raise ConfigError(f"kubeconfig {path} names no server")
    if cluster.get("insecure-skip-tls-verify"):
        raise ConfigError(f"kubeconfig {path} skips the server's certificate: {PROXY}")
    if user.get("exec") or user.get("auth-provider"):
        raise ConfigError(f"kubeconfig {path} logs in by a program: {PROXY}")
    place = _Files(path.parent, scratch)
    certificate = place.of(user, "client-certificate")
    key = place.of(user, "client-key")
    token = place.of(user, "tokenFile")
    if isinstance(user.get("token"), str):
        token = place.write("token", user["token"].encode())
    return Access(
        server.rstrip("/"),
        place.of(cluster, "certificate-authority"),
        token,
        (certificate, key) if certificate is not None and key is not None else None,
    )


class _Files:
    """Paths as they are given, relative ones beside the kubeconfig; data in files of ours."""

    def __init__(self, home: Path, scratch: Path) -> None:
        self._home = home
        self._scratch = scratch

    def of(self, section: Mapping[str, Any], key: str) -> Path | None:
        data, path = section.get(f"{key}-data"), section.get(key)
        if isinstance(data, str):
            try:
                return self.write(key, base64.b64decode(data, validate=True))
            except binascii.Error:
                raise ConfigError(f"kubeconfig: {key}-data is not base64") from None
        return self._home / path if isinstance(path, str) else None

    def write(self, name: str, content: bytes) -> Path:
        path = self._scratch / name
        path.touch(mode=0o600)
        path.write_bytes(content)
        return path


def _named(loaded: Mapping[str, Any], plural: str, singular: str, name: str) -> dict[str, Any]:
    entries = loaded.get(plural)
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and entry.get("name") == name:
            inner = entry.get(singular)
            return inner if isinstance(inner, dict) else {}
    raise ConfigError(f"kubeconfig has no {singular} named {name!r}")
