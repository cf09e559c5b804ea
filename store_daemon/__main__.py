"""`python -m store_daemon --config FILE --set section.key=value`: run a store daemon."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import uvloop

from client_sdk.settings import load_settings
from emberkv_proto import __version__
from emberkv_proto.errors import EmberError
from store_daemon.app import Daemon
from store_daemon.config import DaemonSettings

USER_MISTAKE = 2


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 0 after a clean stop, 2 when it cannot start as configured."""
    parser = argparse.ArgumentParser(
        prog="store_daemon", description="The KV cache store of one node."
    )
    parser.add_argument("--config", type=Path, help="YAML file with the settings")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="set one value, over the file's and the environment's",
    )
    parser.add_argument("--version", action="version", version=f"emberkv {__version__}")
    options = parser.parse_args(arguments)
    try:
        settings = load_settings(DaemonSettings, options.config, options.set)
        logging.basicConfig(
            stream=sys.stderr,
            level=settings.daemon.log_level.upper(),
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        )
        uvloop.run(serve(settings))
    except EmberError as error:
        print(f"store_daemon: {error}", file=sys.stderr)
        return USER_MISTAKE
    return 0


async def serve(settings: DaemonSettings) -> None:
    await Daemon(settings).run()


if __name__ == "__main__":
    sys.exit(main())
