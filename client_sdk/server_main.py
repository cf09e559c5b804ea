"""What the mains of all servers share: options, settings, mistakes in one line, signals, endpoint.

The servers' extras bring what this needs beyond the SDK's own dependencies.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import uvloop

from client_sdk import faults, logs
from client_sdk.logs import LogStyle
from client_sdk.settings import Settings, load_settings
from emberkv_proto import __version__
from emberkv_proto.errors import EmberError

S = TypeVar("S", bound=Settings)
USER_MISTAKE = 2


@dataclass(frozen=True, slots=True)
class SettingsSource(Generic[S]):
    """Where a process's settings come from: its config file, its environment, its flags."""

    kind: type[S]
    path: Path | None
    overrides: tuple[str, ...]

    def load(self) -> S:
        """Read them, anew each time. Raises ConfigError."""
        return load_settings(self.kind, self.path, self.overrides)


def run_server(
    name: str,
    kind: type[S],
    serve: Callable[[S], Coroutine[Any, Any, None]],
    arguments: Sequence[str] | None = None,
    log_style: Callable[[S], LogStyle] = lambda _: LogStyle(),
) -> int:
    """Read the command line and the settings, then `serve`.

    Returns the exit code: 0 after a clean stop, 2 with one line for what the user can mend.
    """
    return run_from(name, read_command_line(name, kind, arguments), serve, log_style)


def read_command_line(
    name: str, kind: type[S], arguments: Sequence[str] | None = None
) -> SettingsSource[S]:
    """Ends the process with SystemExit after --help, --version or a usage error."""
    sections = ", ".join(kind.model_fields)
    parser = argparse.ArgumentParser(prog=f"python -m {name}")
    parser.add_argument("--config", type=Path, help=f"YAML file; sections read: {sections}")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--version", action="version", version=f"emberkv {__version__}")
    options = parser.parse_args(arguments)
    return SettingsSource(kind, options.config, tuple(options.set))


def run_from(
    name: str,
    source: SettingsSource[S],
    serve: Callable[[S], Coroutine[Any, Any, None]],
    log_style: Callable[[S], LogStyle],
) -> int:
    """As `run_server`, from where the settings can be read again."""
    try:
        settings = source.load()
        logs.configure(log_style(settings))
        faults.arm_from(os.environ)
        uvloop.run(serve(settings))
    except (EmberError, OSError) as error:
        print(f"{name.rpartition('.')[2]}: {error}", file=sys.stderr)
        return USER_MISTAKE
    finally:
        logs.unconfigure()
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
