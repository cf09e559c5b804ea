"""`python -m router --config F --set router.key=value`."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from client_sdk.logs import LogStyle
from client_sdk.server_main import read_command_line, run_from, stop_signal, write_endpoint
from emberkv_proto.errors import EmberError
from router.app import Router
from router.config import RouterSettings
from router.index_host import hosted_index

if TYPE_CHECKING:
    from router.board import BoardMaker

log = logging.getLogger(__name__)
OBJECTS_BETWEEN_COLLECTIONS = 50_000


async def serve(settings: RouterSettings, load: Callable[[], RouterSettings]) -> None:
    """Serve until SIGTERM or SIGINT; then let running requests finish, and end.

    On SIGHUP `load` reads the configuration anew; one that is wrong changes nothing.
    """
    cfg, stop = settings.router, stop_signal()
    async with hosted_index(settings.index) as index:
        make_board = _compiled(settings.index.backend)
        # Chance only breaks ties; the system's would be a call of the kernel for each request.
        chance = random.Random()  # noqa: S311
        router = Router(cfg, index.view, chance, index.view.tls, make_board)
        router.metrics.include(index.registry)

        def reload() -> None:
            try:
                router.reconfigure(load().router)
            except EmberError as error:
                log.error("the configuration is not reloaded, nothing has changed: %s", error)

        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
        async with router.running() as port:
            host = f"[{cfg.host}]" if ":" in cfg.host else cfg.host
            url = f"http://{host}:{port}"
            facts = {"url": url, "index_address": index.address}
            line = f"router serves at {url}, index at {index.address}"
            if router.ext_proc_port is not None:
                facts["ext_proc_address"] = f"{host}:{router.ext_proc_port}"
                line += f", Envoys at {host}:{router.ext_proc_port}"
            if cfg.endpoint_file is not None:
                write_endpoint(cfg.endpoint_file, facts)
            print(line, flush=True)
            spare_collections()
            await stop.wait()


def spare_collections() -> None:
    """Let the garbage collector look for cycles seldom, and never among what was made at start.

    Requests leave none: what they make goes when they end. A collection for every 700 objects that
    are alive at once would look at all requests in flight, again and again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)


def _compiled(backend: str) -> BoardMaker | None:
    """The compiled choice, where the index is compiled too."""
    if backend == "python":
        return None
    try:
        from router.board import Board, warm_board

        warm_board()
    except (ImportError, OSError, RuntimeError) as error:
        log.warning("numba cannot be used (%s): engines are chosen by slower python", error)
        return None
    return Board


def main(arguments: Sequence[str] | None = None) -> int:
    source = read_command_line("router", RouterSettings, arguments)
    return run_from(
        "router",
        source,
        lambda settings: serve(settings, source.load),
        lambda settings: LogStyle(settings.router.log_level, settings.router.log_format),
    )


if __name__ == "__main__":
    sys.exit(main())
