"""`python -m store_daemon --config FILE --set section.key=value`: run a store daemon."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from client_sdk.logs import LogStyle
from client_sdk.server_main import read_command_line, run_from
from store_daemon.app import Daemon
from store_daemon.config import DaemonSettings


def main(arguments: Sequence[str] | None = None) -> int:
    source = read_command_line("store_daemon", DaemonSettings, arguments)

    async def serve(settings: DaemonSettings) -> None:
        await Daemon(settings).run()

    return run_from("store_daemon", source, serve, log_style)


def log_style(settings: DaemonSettings) -> LogStyle:
    return LogStyle(settings.daemon.log_level, settings.daemon.log_format)


if __name__ == "__main__":
    sys.exit(main())
