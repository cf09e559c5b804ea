"""`python -m store_daemon --config FILE --set section.key=value`: run a store daemon."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from client_sdk.server_main import run_server
from store_daemon.app import Daemon
from store_daemon.config import DaemonSettings


def main(arguments: Sequence[str] | None = None) -> int:
    return run_server(
        "store_daemon", DaemonSettings, serve, arguments, lambda s: s.daemon.log_level
    )


async def serve(settings: DaemonSettings) -> None:
    await Daemon(settings).run()


if __name__ == "__main__":
    sys.exit(main())
