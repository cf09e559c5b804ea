"""`python -m router --config F --set router.key=value`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from client_sdk.settings import load_settings
from emberkv_proto import __version__
from emberkv_proto.errors import ConfigError, PreflightError
from router.app import Endpoint, Router, write_endpoint
from router.config import RouterSettings
from router.index_host import hosted_index


async def serve(settings: RouterSettings) -> None:
    """Serve until SIGTERM or SIGINT; then let running requests finish, and end."""
    cfg = settings.router
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with hosted_index(settings.index) as index:
        router = Router(cfg, index.view, random.SystemRandom())
        router.metrics.include(index.registry)
        async with router.running() as port:
            host = f"[{cfg.host}]" if ":" in cfg.host else cfg.host
            endpoint = Endpoint(f"http://{host}:{port}", index.address, os.getpid())
            if cfg.endpoint_file is not None:
                write_endpoint(cfg.endpoint_file, endpoint)
            print(f"router serves at {endpoint.url}, index at {endpoint.index_address}", flush=True)
            await stop.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m router")
    parser.add_argument("--config", type=Path, help="YAML file; sections router and index are read")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--version", action="version", version=__version__)
    options = parser.parse_args(arguments)
    try:
        settings = load_settings(RouterSettings, options.config, options.set)
        logging.basicConfig(
            level=settings.router.log_level.upper(),
            format="%(asctime)s %(levelname)s %(name)s %(message)s",
        )
        uvloop.run(serve(settings))
    except (ConfigError, PreflightError, OSError) as error:
        print(f"router: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
