"""Operators' calls to a whole daemon in this process, over its gRPC port."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from client_sdk.aio import timeout
from client_sdk.async_client import AsyncClient
from client_sdk.index_client import ember_error
from client_sdk.settings import load_settings
from emberkv_proto.errors import (
    ConfigError,
    EmberError,
    InvalidRequestError,
    UnknownNamespaceError,
)
from emberkv_proto.types import BlockHash, Tier
from emberkv_proto.v1 import store_pb2, store_pb2_grpc
from store_daemon.app import Daemon
from store_daemon.config import DaemonSettings
from store_daemon.operator_server import CALL_NAMES
from store_daemon.operators import operator_calls
from tests.helpers.store import chain, payload, small_namespace

NAMESPACE = small_namespace()
SALT = b"s" * 16
pb = store_pb2


class Operated:
    """A daemon, a client that has stored ten blocks, and an operator's stub."""

    def __init__(self, daemon: Daemon, config: Path, stub: Any, hashes: list[BlockHash]) -> None:
        self.daemon = daemon
        self.config = config
        self.stub = stub
        self.hashes = hashes
        self.packed = b"".join(hashes)

    @property
    def store(self) -> Any:
        assert self.daemon.store is not None
        return self.daemon.store

    def configure(self, **sections: dict[str, Any]) -> None:
        """Write the config file anew."""
        base = yaml.safe_load(self.config.read_text())
        for section, keys in sections.items():
            base.setdefault(section, {}).update(keys)
        self.config.write_text(yaml.safe_dump(base))

    async def refused(self, call: Any) -> EmberError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        return ember_error(caught.value, "daemon")


@asynccontextmanager
async def operated(directory: Path) -> AsyncIterator[Operated]:
    config = directory / "daemon.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "node": {"id": "node-1"},
                "daemon": {
                    "socket_path": str(directory / "s"),
                    "data_dir": str(directory / "data"),
                    "grpc_port": 0,
                    "metrics_port": 0,
                    "drain_seconds": 3.0,
                },
                "dram": {
                    "path": str(directory / "pool"),
                    "capacity_bytes": 1 << 20,
                    "extent_bytes": 1 << 16,
                },
                "ssd": {
                    "path": str(directory / "ssd"),
                    "capacity_bytes": 1 << 20,
                    "segment_bytes": 1 << 16,
                    "direct_io": False,
                },
            }
        )
    )

    def load() -> DaemonSettings:
        return load_settings(DaemonSettings, config, (), {})

    daemon = Daemon(load(), load)
    task = asyncio.ensure_future(daemon.run())
    async with timeout(60):
        await daemon.is_serving.wait()
    assert daemon.endpoints is not None
    hashes = chain(NAMESPACE, 10)
    client = AsyncClient(directory / "s", NAMESPACE, timeout_seconds=30.0)
    try:
        staged = await client.stage(hashes)
        for number in staged.granted:
            staged.view(number)[:] = payload(hashes[number], 0, 5000)
        await staged.commit()
        store = daemon.store
        assert store is not None
        async with timeout(60):
            while store.holdings.blocks_of(Tier.SSD) < 10 or any(  # noqa: ASYNC110
                block.pins for block in store.holdings.catalog.blocks.values()
            ):
                await asyncio.sleep(0.01)
        async with grpc.aio.insecure_channel(daemon.endpoints.grpc_address) as channel:
            stub = store_pb2_grpc.OperatorStub(channel)  # type: ignore[no-untyped-call]
            async with timeout(40):
                yield Operated(daemon, config, stub, hashes)
        assert daemon.store is not None
        daemon.store.check_integrity()
    finally:
        await client.close()
        daemon.stop()
        async with timeout(60):
            await task


@pytest.fixture
async def op(tmp_path: Path) -> AsyncIterator[Operated]:
    async with operated(tmp_path) as op:
        yield op


async def test_every_call_of_the_contract_has_an_answer(op: Operated) -> None:
    servicer = type("S", (), {"store": op.store})()
    calls = operator_calls(servicer, lambda: None, lambda: None)  # type: ignore[arg-type]
    assert calls.keys() == CALL_NAMES


async def test_pinned_blocks_stay_when_all_else_is_cleared(op: Operated) -> None:
    hashes = b"".join(op.hashes[:4])
    pinned = await op.stub.Pin(pb.PinRequest(namespace_id=NAMESPACE.id, hashes=hashes))
    assert (pinned.pinned_blocks, pinned.pinned_bytes) == (4, 4 * 8192)
    assert pinned.limit_bytes == 1 << 19
    cleared = await op.stub.Clear(pb.ClearRequest(tier=2))
    assert cleared.kept_blocks == 4
    assert cleared.evicted_blocks == 6
    assert op.store.holdings.blocks_of(Tier.DRAM) == 4
    unpinned = await op.stub.Unpin(pb.UnpinRequest(namespace_id=NAMESPACE.id))
    assert unpinned.unpinned_blocks == 4
    await op.stub.Clear(pb.ClearRequest())
    assert op.store.holdings.blocks_of(Tier.DRAM) == 0
    assert op.store.holdings.blocks_of(Tier.SSD) == 0


async def test_a_soft_pin_has_a_time_and_every_pin_can_be_ended(op: Operated) -> None:
    await op.stub.Pin(pb.PinRequest(namespace_id=NAMESPACE.id, hashes=op.packed, ttl_seconds=60.0))
    assert len(op.store.holdings.pins) == 10
    assert (await op.stub.Unpin(pb.UnpinRequest())).unpinned_blocks == 10


async def test_named_blocks_or_a_number_of_bytes_are_evicted(op: Operated) -> None:
    tail = b"".join(op.hashes[8:])
    evicted = await op.stub.Evict(pb.EvictRequest(tier=2, namespace_id=NAMESPACE.id, hashes=tail))
    assert (evicted.evicted_blocks, evicted.kept_blocks) == (2, 0)
    evicted = await op.stub.Evict(pb.EvictRequest(tier=2, bytes=8192 * 2 + 1))
    assert (evicted.evicted_blocks, evicted.freed_bytes) == (3, 3 * 8192)
    assert op.store.holdings.blocks_of(Tier.DRAM) == 5


async def test_quotas_are_set_and_shown(op: Operated) -> None:
    await op.stub.SetQuota(pb.QuotaRequest(salt_id=SALT, dram_bytes=7, ssd_bytes=8))
    (tenant,) = (await op.stub.Quotas(pb.QuotasRequest())).tenants
    assert tenant.salt_id == SALT
    assert (tenant.dram_limit_bytes, tenant.ssd_limit_bytes) == (7, 8)
    await op.stub.SetQuota(pb.QuotaRequest(salt_id=SALT))
    (tenant,) = (await op.stub.Quotas(pb.QuotasRequest())).tenants
    assert (tenant.dram_limit_bytes, tenant.ssd_limit_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("name", "request_", "kind"),
    [
        ("Pin", pb.PinRequest(namespace_id=NAMESPACE.id), InvalidRequestError),
        ("Pin", pb.PinRequest(namespace_id=b"x", hashes=bytes(32)), InvalidRequestError),
        ("Pin", pb.PinRequest(namespace_id=bytes(16), hashes=bytes(32)), UnknownNamespaceError),
        ("Pin", pb.PinRequest(namespace_id=NAMESPACE.id, hashes=b"x"), InvalidRequestError),
        ("Pin", pb.PinRequest(namespace_id=NAMESPACE.id, hashes=bytes(64)), InvalidRequestError),
        (
            "Pin",
            pb.PinRequest(namespace_id=NAMESPACE.id, hashes=bytes(32), ttl_seconds=math.nan),
            InvalidRequestError,
        ),
        (
            "Pin",
            pb.PinRequest(namespace_id=NAMESPACE.id, hashes=bytes(32), ttl_seconds=-1),
            InvalidRequestError,
        ),
        (
            "Pin",
            pb.PinRequest(namespace_id=NAMESPACE.id, hashes=bytes(32 * 65537)),
            InvalidRequestError,
        ),
        ("Unpin", pb.UnpinRequest(hashes=bytes(32)), InvalidRequestError),
        ("Unpin", pb.UnpinRequest(namespace_id=bytes(16)), UnknownNamespaceError),
        ("Evict", pb.EvictRequest(bytes=1), InvalidRequestError),
        ("Evict", pb.EvictRequest(tier=1, bytes=1), InvalidRequestError),
        ("Evict", pb.EvictRequest(tier=2), InvalidRequestError),
        ("Evict", pb.EvictRequest(tier=2, bytes=1 << 63), InvalidRequestError),
        ("Evict", pb.EvictRequest(tier=2, bytes=1, hashes=bytes(32)), InvalidRequestError),
        ("Clear", pb.ClearRequest(tier=1), InvalidRequestError),
        ("Clear", pb.ClearRequest(namespace_id=bytes(16)), UnknownNamespaceError),
        ("Clear", pb.ClearRequest(namespace_id=bytes(15)), InvalidRequestError),
        ("SetQuota", pb.QuotaRequest(dram_bytes=1), InvalidRequestError),
        ("SetQuota", pb.QuotaRequest(salt_id=b"short"), InvalidRequestError),
        ("SetQuota", pb.QuotaRequest(salt_id=SALT, ssd_bytes=1 << 63), InvalidRequestError),
    ],
)
async def test_what_makes_no_sense_is_refused_and_changes_nothing(
    op: Operated, name: str, request_: Any, kind: type[EmberError]
) -> None:
    refusal = await op.refused(getattr(op.stub, name)(request_))
    assert type(refusal) is kind
    assert str(refusal)
    assert op.store.holdings.blocks_of(Tier.DRAM) == 10
    assert len(op.store.holdings.pins) == 0


async def test_a_scrub_says_what_it_will_read_and_finds_the_bad_record(op: Operated) -> None:
    store = op.store
    row = store.holdings.catalog.blocks[op.hashes[3]].rows[0]
    with store.ssd.segment_path(row).open("r+b") as file:
        file.seek(row.offset + 4096)
        file.write(b"\xff\xfe\xfd")
    answer = await op.stub.Scrub(pb.ScrubRequest())
    assert answer.records == 10
    assert answer.expected_seconds > 0
    counters = store.holdings.counters
    while not counters["scrub_passes"]:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert (counters["scrubbed_records"], counters["scrub_corrupt"]) == (10, 1)


async def test_rates_of_the_drives_can_be_changed_while_serving(op: Operated) -> None:
    op.configure(ssd={"write_bytes_per_second": 1 << 20, "scrub_bytes_per_second": 0})
    answer = await op.stub.Reload(pb.ReloadRequest())
    assert not answer.needs_restart
    assert list(answer.changed) == [
        "ssd.write_bytes_per_second: 0 -> 1048576",
        "ssd.scrub_bytes_per_second: 4194304 -> 0",
    ]
    ssd = op.store.ssd
    assert ssd.write_delay_seconds == 0
    ssd._writer.budget.spend(1 << 22, time.monotonic())
    assert ssd.write_delay_seconds > 1


async def test_a_reload_changes_the_running_store(op: Operated, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    token.chmod(0o600)
    op.configure(
        daemon={
            "lease_seconds": 33.0,
            "peer_timeout_seconds": 4.0,
            "stage_seconds": 5.0,
            "drain_seconds": 4.0,
            "metrics_port": 1,
            "operator_token_file": str(token),
        },
        dram={"high_watermark": 0.1, "low_watermark": 0.05, "policy": "arc", "pin_share": 0.25},
        ssd={"queue_blocks": 7},
        tenants={SALT.hex(): {"dram_bytes": 8192}},
    )
    answer = await op.stub.Reload(pb.ReloadRequest())
    assert 'dram.policy: "lru" -> "arc"' in list(answer.changed)
    assert "daemon.lease_seconds: 10.0 -> 33.0" in list(answer.changed)
    assert list(answer.needs_restart) == ["daemon.metrics_port: 0 -> 1"]
    pinned = await op.stub.Pin(
        pb.PinRequest(namespace_id=NAMESPACE.id, hashes=op.packed, ttl_seconds=9)
    )
    assert pinned.limit_bytes == 1 << 18
    (tenant,) = (await op.stub.Quotas(pb.QuotasRequest())).tenants
    assert tenant.dram_limit_bytes == 8192
    client = AsyncClient(tmp_path / "s", NAMESPACE, timeout_seconds=30.0)
    lease = await client.acquire(op.hashes)
    assert lease.usable_blocks == 10
    assert 20 < lease._expires_at - time.monotonic() <= 33
    await lease.release()
    await client.close()
    await op.stub.Unpin(pb.UnpinRequest())
    client = AsyncClient(tmp_path / "s", NAMESPACE, timeout_seconds=30.0)
    await (await client.stage(chain(NAMESPACE, 1, 5))).abort()
    await client.close()
    assert op.store.holdings.pool.slots.usage <= 0.1  # the new watermark


async def test_a_wrong_configuration_changes_nothing_and_says_why(op: Operated) -> None:
    op.configure(daemon={"log_level": "debug", "lok_format": "json"})
    refusal = await op.refused(op.stub.Reload(pb.ReloadRequest()))
    assert type(refusal) is ConfigError
    assert "did you mean 'log_format'" in str(refusal)
    counters = (await op.stub.Status(pb.StatusRequest())).counters
    assert counters["failed_reloads"] == 1
    op.config.write_text("dram: [")
    refusal = await op.refused(op.stub.Reload(pb.ReloadRequest()))
    assert "not YAML" in str(refusal)


async def test_a_token_file_that_others_may_read_stops_the_whole_reload(
    op: Operated, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    token.chmod(0o644)
    op.configure(daemon={"operator_token_file": str(token)}, dram={"pin_share": 0.25})
    refusal = await op.refused(op.stub.Reload(pb.ReloadRequest()))
    assert "chmod 600" in str(refusal)
    pinned = await op.stub.Pin(
        pb.PinRequest(namespace_id=NAMESPACE.id, hashes=op.packed, ttl_seconds=9)
    )
    assert pinned.limit_bytes == 1 << 19


async def test_a_drain_ends_the_daemon_in_order(tmp_path: Path) -> None:
    async with operated(tmp_path) as op:
        await op.stub.Drain(pb.DrainRequest())
        assert (tmp_path / "data").exists()
    endpoints = tmp_path / "data" / "endpoints.json"
    assert not endpoints.exists(), json.loads(endpoints.read_text())
