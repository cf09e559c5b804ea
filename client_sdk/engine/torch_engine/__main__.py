"""`python -m client_sdk.engine.torch_engine --config F --set engine.key=value`."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop
from aiohttp import web

from client_sdk.engine.torch_engine.config import EngineSection, EngineSettings
from client_sdk.engine.torch_engine.engine import TorchEngine
from client_sdk.engine.torch_engine.server import EngineServer
from client_sdk.settings import load_settings
from emberkv_proto import __version__
from emberkv_proto.errors import InvalidRequestError


async def serve(cfg: EngineSection) -> None:
    """Serve until SIGTERM or SIGINT; then let running requests finish, save, and end."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    engine = TorchEngine(cfg)
    runner = web.AppRunner(
        EngineServer(engine).app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=cfg.drain_seconds,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, cfg.host, cfg.port)
        await site.start()
        port = runner.addresses[0][1]
        url = f"http://{cfg.host}:{port}"
        engine.start(url)
        if cfg.endpoint_file is not None:
            _write_endpoint(cfg.endpoint_file, url)
        print(f"engine {cfg.engine_id} serves {cfg.model} at {url}", flush=True)
        await stop.wait()
    finally:
        await runner.cleanup()
        await asyncio.to_thread(engine.close, cfg.drain_seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m client_sdk.engine.torch_engine")
    parser.add_argument("--config", type=Path, help="YAML file; section `engine` is read")
    parser.add_argument("--set", action="append", default=[], metavar="engine.KEY=VALUE")
    parser.add_argument("--version", action="version", version=__version__)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        uvloop.run(serve(load_settings(EngineSettings, options.config, options.set).engine))
    except (InvalidRequestError, OSError) as error:
        print(f"engine: {error}", file=sys.stderr)
        return 2
    return 0


def _write_endpoint(path: Path, url: str) -> None:
    """JSON with url and pid; atomically, so that whoever polls the file never reads half of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps({"url": url, "pid": os.getpid()}), encoding="utf-8")
    os.replace(partial, path)


if __name__ == "__main__":
    sys.exit(main())
