"""`python -m router --config F --set router.key=value`."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

from client_sdk.logs import LogStyle
from client_sdk.server_main import run_server, stop_signal, write_endpoint
from router.app import Router
from router.config import RouterSettings
from router.index_host import hosted_index


async def serve(settings: RouterSettings) -> None:
    """Serve until SIGTERM or SIGINT; then let running requests finish, and end."""
    cfg, stop = settings.router, stop_signal()
    async with hosted_index(settings.index) as index:
        router = Router(cfg, index.view, random.SystemRandom())
        router.metrics.include(index.registry)
        async with router.running() as port:
            host = f"[{cfg.host}]" if ":" in cfg.host else cfg.host
            url = f"http://{host}:{port}"
            if cfg.endpoint_file is not None:
                write_endpoint(cfg.endpoint_file, {"url": url, "index_address": index.address})
            print(f"router serves at {url}, index at {index.address}", flush=True)
            await stop.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    return run_server(
        "router",
        RouterSettings,
        serve,
        arguments,
        lambda settings: LogStyle(settings.router.log_level, settings.router.log_format),
    )


if __name__ == "__main__":
    sys.exit(main())
