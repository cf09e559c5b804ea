"""`python -m router` as a process of a test."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from client_sdk.aio import timeout


def command(*settings: str) -> list[str]:
    """A command line with these settings, and an index that needs no compiling."""
    flags = [item for setting in ("index.backend=python", *settings) for item in ("--set", setting)]
    return [sys.executable, "-m", "router", *flags]


@dataclass
class RouterProcess:
    process: asyncio.subprocess.Process
    endpoint: dict[str, Any]

    @property
    def port(self) -> int:
        return int(self.endpoint["url"].rpartition(":")[2])


@asynccontextmanager
async def router_process(
    tmp_path: Path, *settings: str, config: Path | None = None
) -> AsyncIterator[RouterProcess]:
    file = tmp_path / "run" / "router.json"
    own = (f"router.endpoint_file={file}", "router.port=0", "index.port=0")
    process = await asyncio.create_subprocess_exec(
        *command(*own, *settings),
        *(() if config is None else ("--config", str(config))),
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        async with timeout(120):
            while not file.exists():
                assert process.returncode is None, "the router ended before it served"
                await asyncio.sleep(0.05)
        yield RouterProcess(process, json.loads(file.read_text()))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        process._transport.close()  # type: ignore[attr-defined]
