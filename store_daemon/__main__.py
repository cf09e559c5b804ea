"""`python -m store_daemon --config FILE --set section.key=value`: run a store daemon."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from client_sdk.server_main import read_command_line, run_from
from store_daemon.app import Daemon
from store_daemon.config import DaemonSettings


def main(arguments: Sequence[str] | None = None) -> int:
    source = read_command_line("store_daemon", DaemonSettings, arguments)

    async def serve(settings: DaemonSettings) -> None:
        await Daemon(settings, source.load).run()

    return run_from("store_daemon", source, serve, lambda settings: settings.daemon.log_style)


if __name__ == "__main__":
    sys.exit(main())
