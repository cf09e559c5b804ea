"""What the mains of all servers share: options, settings, mistakes in one line, signals, endpoint.

The servers' extras bring what this needs beyond the SDK's own dependencies.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from client_sdk import faults
from client_sdk.settings import Settings, load_settings
from emberkv_proto import __version__
from emberkv_proto.errors import EmberError

S = TypeVar("S", bound=Settings)
USER_MISTAKE = 2


def run_server(
    name: str,
    kind: type[S],
    serve: Callable[[S], Coroutine[Any, Any, None]],
    arguments: Sequence[str] | None = None,
    log_level: Callable[[S], str] = lambda _: "info",
) -> int:
    """Read the command line and the settings, then `serve`.

    Returns the exit code: 0 after a clean stop, 2 with one line for what the user can mend.
    """
    sections = ", ".join(kind.model_fields)
    parser = argparse.ArgumentParser(prog=f"python -m {name}")
    parser.add_argument("--config", type=Path, help=f"YAML file; sections read: {sections}")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--version", action="version", version=f"emberkv {__version__}")
    options = parser.parse_args(arguments)
    try:
        settings = load_settings(kind, options.config, options.set)
        logging.basicConfig(
            level=log_level(settings).upper(),
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        )
        faults.arm_from(os.environ)
        uvloop.run(serve(settings))
    except (EmberError, OSError) as error:
        print(f"{name.rpartition('.')[2]}: {error}", file=sys.stderr)
        return USER_MISTAKE
    return 0


def stop_signal() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets, in the running loop."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


def write_endpoint(path: Path, facts: Mapping[str, Any]) -> None:
    """Write the facts and our pid as JSON; atomically, so that nobody reads half of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps({**facts, "pid": os.getpid()}), encoding="utf-8")
    partial.replace(path)
