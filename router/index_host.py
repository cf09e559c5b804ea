"""The index inside the router: follows the daemons, and is served to them over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from global_index.config import IndexSection
from global_index.embedded import GlobalIndex
from global_index.http_calls import IndexerCalls, open_gate
from global_index.http_endpoint import HttpEndpoint
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

    With `index.http_port`, docs/index-http.md is served there too.

    Raises:
        ConfigError: the backend or a file that the settings name cannot be used.
        PreflightError: a port is taken.
    """
    gate = open_gate(section)
    index = GlobalIndex(section, name="router")
    metrics = IndexMetrics(index)
    server, port = await start_server(
        index, section.host, section.port, metrics.query_seconds.observe
    )
    endpoint = HttpEndpoint(metrics.registry, lambda: True, IndexerCalls(index, gate).routes)
    try:
        if section.http_port is not None:
            await endpoint.start(section.host, section.http_port, "index.http_port")
        async with index:
            host = f"[{section.host}]" if ":" in section.host else section.host
            yield HostedIndex(index, f"{host}:{port}", metrics.registry)
    finally:
        await endpoint.stop()
        await server.stop(STOP_SECONDS)
