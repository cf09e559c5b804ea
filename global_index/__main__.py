"""`python -m global_index --config FILE --set index.key=value`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from client_sdk.logs import LogStyle
from client_sdk.server_main import run_server
from global_index.app import run
from global_index.config import IndexSettings


def main(arguments: Sequence[str] | None = None) -> int:
    return run_server(
        "global_index",
        IndexSettings,
        run,
        arguments,
        lambda settings: LogStyle(settings.index.log_level, settings.index.log_format),
    )


if __name__ == "__main__":
    sys.exit(main())
