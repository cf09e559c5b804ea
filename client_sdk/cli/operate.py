"""What an operator orders a daemon to do: the calls, and how their answers are told.

The commands themselves are in `operator_app`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from client_sdk.cli.remote import Access, ask_operator, daemon_status, indexed_nodes
from client_sdk.cli.where import WhereQuery, find_chain
from client_sdk.index_client import IndexClient
from client_sdk.settings import load_settings
from client_sdk.tls import Tls
from emberkv_proto.convert import hashes_to_wire
from emberkv_proto.errors import ConfigError, UnavailableError
from emberkv_proto.types import (
    BLOCK_HASH_BYTES,
    NAMESPACE_ID_BYTES,
    SALT_ID_BYTES,
    BlockHash,
    NamespaceId,
    SaltId,
    Tier,
)
from emberkv_proto.v1 import store_pb2
from emberkv_proto.wire import MAX_BLOCKS_PER_CALL

CALL_SECONDS = 10.0
LONG_CALL_SECONDS = 300.0
"""For calls that may look at every block."""
POLL_SECONDS = 0.1
MAX_INPUT_BYTES = 80 * MAX_BLOCKS_PER_CALL


@dataclass(frozen=True, slots=True)
class Daemon:
    """Where a daemon takes orders, and what it asks for."""

    address: str
    access: Access

    async def ask(self, name: str, request: Any, seconds: float = CALL_SECONDS) -> Any:
        """Raises EmberError."""
        return await ask_operator(self.address, self.access, name, request, seconds)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A chain run of one namespace."""

    namespace_id: NamespaceId
    hashes: tuple[BlockHash, ...]


def find_daemon(
    address: str, token_file: Path | None, config: Path | None, overrides: Sequence[str]
) -> Daemon:
    """The daemon at `address`, or the one that the configuration describes.

    Raises ConfigError: the configuration, a TLS file or the token file is wrong.
    """
    from client_sdk.operator_gate import read_token
    from store_daemon.config import DaemonSettings

    daemon = load_settings(DaemonSettings, config, overrides).daemon
    files = daemon.tls_files()
    tls = Tls.read(files) if files is not None else None
    token: str | None = None
    if token_file is not None:
        token = read_token(token_file, "--token-file").decode("ascii")
    elif daemon.operator_token_file is not None and os.access(daemon.operator_token_file, os.R_OK):
        token = read_token(daemon.operator_token_file).decode("ascii")
    if not address:
        host = daemon.advertised_host or daemon.grpc_host
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        address = f"[{host}]:{daemon.grpc_port}" if ":" in host else f"{host}:{daemon.grpc_port}"
    return Daemon(address, Access(tls, token))


def read_hashes(text: str) -> tuple[BlockHash, ...]:
    """Block hashes in hexadecimal, with commas or white space between; `-` reads standard input.

    Raises ConfigError.
    """
    if text == "-":
        text = sys.stdin.read(MAX_INPUT_BYTES + 1)
        if len(text) > MAX_INPUT_BYTES:
            raise ConfigError(f"too many hashes; one call takes {MAX_BLOCKS_PER_CALL}")
    words = text.replace(",", " ").split()
    if not words:
        raise ConfigError("no block hashes were given")
    if len(words) > MAX_BLOCKS_PER_CALL:
        raise ConfigError(f"{len(words)} hashes; one call takes {MAX_BLOCKS_PER_CALL}")
    return tuple(BlockHash(_hex(word, BLOCK_HASH_BYTES, "a block hash")) for word in words)


def read_namespace(text: str) -> NamespaceId:
    """Raises ConfigError."""
    return NamespaceId(_hex(text, NAMESPACE_ID_BYTES, "a namespace id"))


def read_salt_id(text: str) -> SaltId:
    """Raises ConfigError."""
    return SaltId(_hex(text, SALT_ID_BYTES, "a salt id"))


def read_tier(text: str) -> Tier:
    """Raises ConfigError."""
    tiers = {"dram": Tier.DRAM, "ssd": Tier.SSD}
    if text.lower() not in tiers:
        raise ConfigError(f"tier {text!r} is unknown; it is dram or ssd")
    return tiers[text.lower()]


async def prompt_blocks(query: WhereQuery) -> Blocks:
    """The full blocks of a prompt. Raises as `where.find_chain`."""
    index = IndexClient(query.index_address, timeout_seconds=CALL_SECONDS, tls=query.tls)
    try:
        chain = await find_chain(query, await indexed_nodes(index))
    finally:
        await index.close()
    if not chain.hashes:
        raise ConfigError(
            f"the prompt's {len(chain.tokens)} tokens fill no block of {chain.engine.block_tokens}"
        )
    return Blocks(chain.engine.namespace_id, chain.hashes)


async def pin(daemon: Daemon, blocks: Blocks, ttl_seconds: float) -> dict[str, Any]:
    request = store_pb2.PinRequest(
        namespace_id=blocks.namespace_id,
        hashes=hashes_to_wire(blocks.hashes),
        ttl_seconds=ttl_seconds,
    )
    answer = await daemon.ask("Pin", request)
    return {
        "asked_blocks": len(blocks.hashes),
        "pinned_blocks": answer.pinned_blocks,
        "pinned_bytes": answer.pinned_bytes,
        "limit_bytes": answer.limit_bytes,
    }


async def unpin(
    daemon: Daemon, namespace_id: NamespaceId | None, hashes: Sequence[BlockHash]
) -> dict[str, Any]:
    request = store_pb2.UnpinRequest(
        namespace_id=namespace_id or b"", hashes=hashes_to_wire(hashes)
    )
    answer = await daemon.ask("Unpin", request, LONG_CALL_SECONDS)
    return {"unpinned_blocks": answer.unpinned_blocks}


async def evict(daemon: Daemon, tier: Tier, blocks: Blocks) -> dict[str, Any]:
    request = store_pb2.EvictRequest(
        tier=int(tier),  # type: ignore[arg-type]
        namespace_id=blocks.namespace_id,
        hashes=hashes_to_wire(blocks.hashes),
    )
    return _evicted(await daemon.ask("Evict", request, LONG_CALL_SECONDS))


async def evict_bytes(
    daemon: Daemon, tier: Tier, namespace_id: NamespaceId | None, byte_count: int
) -> dict[str, Any]:
    request = store_pb2.EvictRequest(
        tier=int(tier),  # type: ignore[arg-type]
        namespace_id=namespace_id or b"",
        bytes=byte_count,
    )
    return _evicted(await daemon.ask("Evict", request, LONG_CALL_SECONDS))


async def what_clear_would_take(daemon: Daemon, tier: Tier | None) -> dict[str, int]:
    """Blocks by tier, of all namespaces; hard pins, which would stay, counted in."""
    status = await daemon_status(daemon.address, daemon.access)
    wanted = (Tier.DRAM, Tier.SSD) if tier is None else (tier,)
    return {row.tier.name.lower(): row.blocks for row in status.tiers if row.tier in wanted}


async def clear(
    daemon: Daemon, tier: Tier | None, namespace_id: NamespaceId | None
) -> dict[str, Any]:
    request = store_pb2.ClearRequest(
        tier=int(tier or 0),  # type: ignore[arg-type]
        namespace_id=namespace_id or b"",
    )
    return _evicted(await daemon.ask("Clear", request, LONG_CALL_SECONDS))


async def set_quota(daemon: Daemon, salt_id: SaltId, dram_bytes: int, ssd_bytes: int) -> None:
    request = store_pb2.QuotaRequest(salt_id=salt_id, dram_bytes=dram_bytes, ssd_bytes=ssd_bytes)
    await daemon.ask("SetQuota", request)


async def quotas(daemon: Daemon) -> list[dict[str, Any]]:
    """Usage and limits of each tenant; a limit of 0 is none."""
    answer = await daemon.ask("Quotas", store_pb2.QuotasRequest())
    return [
        {
            "salt_id": tenant.salt_id.hex(),
            "dram_bytes": tenant.dram_bytes,
            "dram_limit_bytes": tenant.dram_limit_bytes,
            "ssd_bytes": tenant.ssd_bytes,
            "ssd_limit_bytes": tenant.ssd_limit_bytes,
            "evicted_blocks": tenant.evicted_blocks,
        }
        for tenant in answer.tenants
    ]


async def drain(daemon: Daemon, wait_seconds: float) -> bool:
    """Order the drain, and wait until the daemon answers no more; False: it still does."""
    await daemon.ask("Drain", store_pb2.DrainRequest())
    until = time.monotonic() + wait_seconds
    while time.monotonic() < until:
        try:
            await daemon_status(daemon.address, daemon.access)
        except UnavailableError:
            return True
        await asyncio.sleep(POLL_SECONDS)
    return False


async def scrub(daemon: Daemon) -> dict[str, Any]:
    answer = await daemon.ask("Scrub", store_pb2.ScrubRequest())
    return {"records": answer.records, "expected_seconds": answer.expected_seconds}


async def reload(daemon: Daemon) -> dict[str, list[str]]:
    answer = await daemon.ask("Reload", store_pb2.ReloadRequest())
    return {"changed": list(answer.changed), "needs_restart": list(answer.needs_restart)}


def _evicted(answer: store_pb2.EvictResponse) -> dict[str, Any]:
    return {
        "evicted_blocks": answer.evicted_blocks,
        "freed_bytes": answer.freed_bytes,
        "kept_blocks": answer.kept_blocks,
    }


def _hex(text: str, length: int, what: str) -> bytes:
    try:
        value = bytes.fromhex(text)
    except ValueError:
        value = b""
    if len(value) != length:
        raise ConfigError(f"{text[:80]!r} is not {what}: wanted {2 * length} hexadecimal digits")
    return value
