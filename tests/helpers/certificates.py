"""Certificates for tests, made by the openssl program when they are needed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from client_sdk.settings import TlsFiles

HOST = "subjectAltName=IP:127.0.0.1,DNS:localhost"


class Authority:
    """A certificate authority in a directory of its own."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        if shutil.which("openssl") is None:
            pytest.skip("there is no openssl program to make certificates with")
        self.directory = directory
        self.cert, self._key = directory / f"{name}.pem", directory / f"{name}.key"
        self._name = name
        subject = ["-subj", f"/CN={name}", "-days", "2"]
        _openssl("req", "-x509", *_new_key(self._key), *subject, "-out", str(self.cert))

    def issue(self, name: str, host: str = HOST) -> TlsFiles:
        """A certificate for 127.0.0.1, or `host`, its key, and this authority to trust."""
        base = self.directory / f"{self._name}-{name}"
        key, request, cert = (
            base.with_suffix(".key"),
            base.with_suffix(".csr"),
            base.with_suffix(".pem"),
        )
        extensions = base.with_suffix(".ext")
        extensions.write_text(host + "\n")
        _openssl("req", *_new_key(key), "-subj", f"/CN={name}", "-out", str(request))
        signer = ["-CA", str(self.cert), "-CAkey", str(self._key), "-CAcreateserial"]
        where = ["-in", str(request), "-out", str(cert), "-extfile", str(extensions)]
        _openssl("x509", "-req", *where, *signer, "-days", "2")
        return TlsFiles(cert, key, self.cert)


def _new_key(path: Path) -> list[str]:
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    return [*curve, "-nodes", "-keyout", str(path)]


def _openssl(*arguments: str) -> None:
    done = subprocess.run(
        ["openssl", *arguments], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
