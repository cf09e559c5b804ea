"""python -m global_index --config FILE --set index.key=value"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from client_sdk.settings import load_settings
from emberkv_proto import __version__
from emberkv_proto.errors import ConfigError, PreflightError
from global_index.app import run
from global_index.config import IndexSettings


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 after SIGTERM or SIGINT, 2 with one line for what the user can mend."""
    parser = argparse.ArgumentParser(
        prog="python -m global_index", description="Global index: which node has which block."
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of settings")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="one setting"
    )
    parser.add_argument("--version", action="version", version=f"emberkv {__version__}")
    parsed = parser.parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        asyncio.run(run(load_settings(IndexSettings, parsed.config, parsed.set)))
    except (ConfigError, PreflightError) as error:
        print(f"global_index: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
