"""The index inside the router, and its HTTP calls where they are wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from client_sdk import aio
from emberkv_proto.errors import ConfigError, PreflightError
from global_index.config import IndexSection
from router.index_host import hosted_index


def section(**changes: object) -> IndexSection:
    return IndexSection(**{"port": 0, "backend": "python", "capacity_blocks": 10_000, **changes})


async def asked(port: int, path: str) -> bytes:
    async with aio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
    return answer


async def test_http_calls_are_served_on_their_port_and_end_with_the_router(
    unused_tcp_port_factory: Callable[[], int],
) -> None:
    port = unused_tcp_port_factory()
    async with hosted_index(section(http_port=port)):
        assert (await asked(port, "/workers")).endswith(b"\r\n\r\n[]\n")
        assert b"emberkv_index_blocks" in await asked(port, "/metrics")
    with pytest.raises(OSError, match="onnect"):
        await asked(port, "/workers")


async def test_without_a_port_there_are_none_and_a_taken_one_is_named(
    unused_tcp_port_factory: Callable[[], int],
) -> None:
    port = unused_tcp_port_factory()
    async with hosted_index(section()):
        pass
    async with hosted_index(section(http_port=port)):
        with pytest.raises(PreflightError, match=r"index\.http_port"):
            async with hosted_index(section(http_port=port)):
                pass


async def test_a_token_file_that_is_not_there_is_a_mistake_of_the_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"index\.operator_token_file"):
        async with hosted_index(section(operator_token_file=tmp_path / "none")):
            pass
