"""`python -m client_sdk.engine.torch_engine --config F --set engine.key=value`."""

import sys
from functools import partial

from client_sdk.engine.torch_engine.config import EngineSettings
from client_sdk.engine.torch_engine.server import serve
from client_sdk.server_main import run_server

main = partial(run_server, "client_sdk.engine.torch_engine", EngineSettings, serve)

if __name__ == "__main__":
    sys.exit(main())
