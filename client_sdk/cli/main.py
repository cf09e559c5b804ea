"""Entry of the `emberkv` command: runs it, and turns our errors into one line and a status.

Exit status: 0 done, 1 something failed, 2 the user has to change something, 130 interrupted.
"""

from __future__ import annotations

import sys

from emberkv_proto.errors import (
    AccessDeniedError,
    EmberError,
    InvalidRequestError,
    PreflightError,
    UnauthenticatedError,
    UnknownNamespaceError,
)

USER_ERRORS = (
    AccessDeniedError,
    InvalidRequestError,
    PreflightError,
    UnauthenticatedError,
    UnknownNamespaceError,
)
_EXTRAS = {
    "typer": "cli",
    "rich": "cli",
    "pydantic": "cli",
    "yaml": "cli",
    "psutil": "cli",
    "taskgroup": "cli",
    "grpc": "daemon",
    "rocksdict": "daemon",
    "prometheus_client": "daemon",
    "uvloop": "daemon",
    "httptools": "router",
    "numba": "router",
    "aiohttp": "router",
    "zmq": "daemon",
    "msgspec": "daemon",
    "torch": "torch",
}
"""Imported module -> the extra that brings it."""


def run() -> None:
    """The console script. Never shows a stack trace for a mistake of the user."""
    sys.exit(run_with(sys.argv[1:]))


def run_with(arguments: list[str]) -> int:
    """Run one command line and return its exit status."""
    try:
        from client_sdk.cli.app import invoke

        invoke(arguments)
    except SystemExit as stopped:
        return stopped.code if isinstance(stopped.code, int) else 0
    except EmberError as error:
        print(f"emberkv: {error}", file=sys.stderr)
        return 2 if isinstance(error, USER_ERRORS) else 1
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        print(f"emberkv: {error.name} is not installed; install emberkv[{extra}]", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 1  # whoever read our output has left
    except OSError as error:
        print(f"emberkv: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    run()
