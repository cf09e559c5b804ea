"""Start from another index's rows instead of every daemon's snapshot.

A seed is only a head start. Its rows are asked by no query until their daemon has spoken, and its
stream then goes on from the event after them; what differs is found by the digest audit, as ever.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

from client_sdk import aio
from client_sdk.index_client import IndexClient
from client_sdk.tls import Tls
from emberkv_proto.errors import EmberError
from emberkv_proto.types import NodeId
from global_index.directory import NodeDirectory

log = logging.getLogger(__name__)

SEED_SECONDS = 60.0
"""A seed that takes longer is given up; the daemons are asked instead."""


@dataclass(slots=True)
class SeedCounts:
    """How the start from another index went; never goes down."""

    nodes: int = 0
    blocks: int = 0
    failures: int = 0


async def load_seed(
    address: str,
    directory: NodeDirectory,
    counts: SeedCounts,
    *,
    tls: Tls | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Fill `directory` from the index at `address`. Its absence is a warning, never an error."""
    client = IndexClient(address, tls=tls)
    current: NodeId | None = None
    began = clock()
    try:
        pages = client.snapshot(timeout_seconds=SEED_SECONDS)
        async with aio.timeout(SEED_SECONDS), aclosing(pages):
            async for page in pages:
                current = page.node_id
                if directory.on_seed_page(page, clock()):
                    counts.blocks += len(page.keys)
                    counts.nodes += page.is_last
                if page.is_last:
                    current = None
                await asyncio.sleep(0)  # queries come between two pages
    except (EmberError, asyncio.TimeoutError, TimeoutError) as error:
        counts.failures += 1
        log.warning(
            "start from the index at %s failed (%s); the daemons are asked instead",
            address,
            error or "no answer in time",
        )
    finally:
        if current is not None:
            directory.drop_seed(current)
        await client.close()
    log.info(
        "started from %s with %d nodes, %d blocks, in %.2f s",
        address,
        counts.nodes,
        counts.blocks,
        clock() - began,
    )
