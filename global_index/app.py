"""The index as a process of its own: wiring and shutdown order only."""

from __future__ import annotations

import asyncio
import logging
import signal

from global_index.config import IndexSettings
from global_index.embedded import GlobalIndex
from global_index.http_calls import IndexerCalls, open_gate
from global_index.http_endpoint import HttpEndpoint
from global_index.metrics import IndexMetrics
from global_index.service import start_server

log = logging.getLogger(__name__)

DRAIN_SECONDS = 2.0


async def serve(settings: IndexSettings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set. Raises PreflightError when a port is taken."""
    section = settings.index
    index = GlobalIndex(section, name=f"index@{section.host}:{section.port}")
    metrics = IndexMetrics(index)
    calls = IndexerCalls(index, open_gate(section))
    endpoint = HttpEndpoint(metrics.registry, lambda: not stop.is_set(), calls.routes)
    server, port = await start_server(
        index, section.host, section.port, metrics.query_seconds.observe
    )
    try:
        metrics_port = await endpoint.start(section.host, section.metrics_port)
        async with index:
            log.info(
                "serving on %s:%d, metrics on %d, following %d daemons",
                section.host,
                port,
                metrics_port,
                len(section.nodes),
            )
            await stop.wait()
            log.info("draining")
            await server.stop(DRAIN_SECONDS)
    finally:
        await endpoint.stop()
        await server.stop(None)


async def run(settings: IndexSettings) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await serve(settings, stop)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
