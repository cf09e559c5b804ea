"""A server as the cluster launcher sees one: writes its endpoint file, then waits for SIGTERM.

`python -m tests.helpers.fake_server MODE [--set k=v ...]`; MODE is serve, stubborn (ignores
SIGTERM), silent (never writes the file), broken (says why and exits), or foreign (writes no file,
has a child, and answers on --port's /health, at first with 503).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar


def endpoint_file(arguments: list[str]) -> Path:
    """Where a server of the derived arguments would write: its last word counts."""
    found = Path("unset")
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key == "daemon.data_dir":
            found = Path(value) / "endpoints.json"
        elif key in ("router.endpoint_file", "engine.endpoint_file"):
            found = Path(value)
        elif key == "dram.path":
            Path(value).write_bytes(b"pool")
    return found


class _Health(BaseHTTPRequestHandler):
    statuses: ClassVar = [503, 503, 200]

    def do_GET(self) -> None:
        self.send_response(self.statuses[0] if len(self.statuses) == 1 else self.statuses.pop(0))
        self.end_headers()


def serve_foreign(arguments: list[str]) -> None:
    child = [sys.executable, "-c", "import signal; signal.pause()", *arguments]
    with subprocess.Popen(child):
        HTTPServer(("127.0.0.1", int(arguments[-1].rpartition("=")[2])), _Health).serve_forever()


def main() -> None:
    mode, arguments = sys.argv[1], sys.argv[2:]
    if mode == "broken":
        print("fake: the drive is on fire", flush=True)
        sys.exit(3)
    if mode == "foreign":
        serve_foreign(arguments)
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    path = endpoint_file(arguments)
    if mode != "silent":
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"pid": os.getpid(), "url": "http://nowhere"}))
        temporary.replace(path)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
