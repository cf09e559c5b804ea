"""The index inside the router: follows the daemons, and is served to them over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from global_index.config import IndexSection
from global_index.embedded import GlobalIndex
from global_index.metrics import IndexMetrics
from global_index.service import start_server

STOP_SECONDS = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class HostedIndex:
    """A running index: what the router asks, where daemons ask, what it counts."""

    view: GlobalIndex
    address: str
    registry: CollectorRegistry


@asynccontextmanager
async def hosted_index(section: IndexSection) -> AsyncIterator[HostedIndex]:
    """Follow `index.nodes` and serve on index.host:index.port inside the block.

    Raises:
        ConfigError: the backend cannot be used.
        PreflightError: the port is taken.
    """
    index = GlobalIndex(section, name="router")
    metrics = IndexMetrics(index)
    server, port = await start_server(
        index, section.host, section.port, metrics.query_seconds.observe
    )
    try:
        async with index:
            host = f"[{section.host}]" if ":" in section.host else section.host
            yield HostedIndex(index, f"{host}:{port}", metrics.registry)
    finally:
        await server.stop(STOP_SECONDS)
