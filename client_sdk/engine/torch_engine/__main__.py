"""`python -m client_sdk.engine.torch_engine --config F --set engine.key=value`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from client_sdk.engine.torch_engine.config import EngineSettings
from client_sdk.engine.torch_engine.server import serve
from client_sdk.server_main import run_server


def main(arguments: Sequence[str] | None = None) -> int:
    return run_server("client_sdk.engine.torch_engine", EngineSettings, serve, arguments)


if __name__ == "__main__":
    sys.exit(main())
