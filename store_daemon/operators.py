"""What the daemon answers operators with over gRPC: convert, call, convert back."""

from __future__ import annotations

import math
from collections.abc import Callable

from google.protobuf.message import Message

from emberkv_proto.convert import (
    hashes_from_wire,
    namespace_id_from_wire,
    salt_id_from_wire,
    tier_from_wire,
)
from emberkv_proto.errors import InvalidRequestError
from emberkv_proto.types import NamespaceId, Tier
from emberkv_proto.v1 import common_pb2, store_pb2
from store_daemon.live_settings import Changes
from store_daemon.operations import Evicted, Operations
from store_daemon.operator_server import OperatorCalls
from store_daemon.servicer import Servicer
from store_daemon.tenants import quota_of

MAX_BYTES = 1 << 62
"""More than any tier has; guards sums against numbers that no disk holds."""


def operator_calls(
    servicer: Servicer, on_drain: Callable[[], None], reload: Callable[[], Changes]
) -> OperatorCalls:
    """The calls of service Operator, by name.

    Args:
        on_drain: an operator asked the daemon to end.
        reload: takes over a changed configuration; raises ConfigError when it does not.
    """
    calls = _Calls(servicer, on_drain, reload)
    return {
        "Status": calls.status,
        "Check": calls.check,
        "Pin": calls.pin,
        "Unpin": calls.unpin,
        "Evict": calls.evict,
        "Clear": calls.clear,
        "SetQuota": calls.set_quota,
        "Quotas": calls.quotas,
        "Drain": calls.drain,
        "Scrub": calls.scrub,
        "Reload": calls.reload,
    }


class _Calls:
    def __init__(
        self, servicer: Servicer, on_drain: Callable[[], None], reload: Callable[[], Changes]
    ) -> None:
        self._servicer = servicer
        self._operations: Operations = servicer.store.operations
        self._on_drain = on_drain
        self._reload = reload

    async def status(self, request: store_pb2.StatusRequest) -> Message:
        return self._servicer.status()

    async def check(self, request: store_pb2.CheckRequest) -> Message:
        return self._servicer.check()

    async def pin(self, request: store_pb2.PinRequest) -> Message:
        hashes = hashes_from_wire(request.hashes)
        if not hashes:
            raise InvalidRequestError("pin names no blocks")
        seconds = request.ttl_seconds
        if not math.isfinite(seconds) or seconds < 0:
            raise InvalidRequestError(f"ttl_seconds {seconds} must be a number, 0 or more")
        pinned = self._operations.pin(
            namespace_id_from_wire(request.namespace_id), hashes, seconds or None
        )
        return store_pb2.PinResponse(
            pinned_blocks=pinned.pinned_blocks,
            pinned_bytes=pinned.pinned_bytes,
            limit_bytes=pinned.limit_bytes,
        )

    async def unpin(self, request: store_pb2.UnpinRequest) -> Message:
        hashes = hashes_from_wire(request.hashes)
        ended = self._operations.unpin(_namespace(request.namespace_id), hashes or None)
        return store_pb2.UnpinResponse(unpinned_blocks=ended)

    async def evict(self, request: store_pb2.EvictRequest) -> Message:
        tier, hashes = _tier(request.tier), hashes_from_wire(request.hashes)
        if tier is None:
            raise InvalidRequestError("evict needs a tier: DRAM or SSD")
        if hashes and request.bytes:
            raise InvalidRequestError("evict names blocks and bytes; give one of them")
        if hashes:
            namespace_id = namespace_id_from_wire(request.namespace_id)
            return _evicted(await self._operations.evict(tier, namespace_id, hashes))
        wanted = _bytes(request.bytes, "bytes")
        namespace = _namespace(request.namespace_id)
        return _evicted(await self._operations.evict_bytes(tier, namespace, wanted))

    async def clear(self, request: store_pb2.ClearRequest) -> Message:
        namespace = _namespace(request.namespace_id)
        return _evicted(await self._operations.clear(_tier(request.tier), namespace))

    async def set_quota(self, request: store_pb2.QuotaRequest) -> Message:
        salt_id = salt_id_from_wire(request.salt_id)
        if salt_id is None:
            raise InvalidRequestError("a quota needs the tenant's salt id")
        quota = quota_of(
            _bytes(request.dram_bytes, "dram_bytes"), _bytes(request.ssd_bytes, "ssd_bytes")
        )
        self._operations.set_quota(salt_id, quota)
        return common_pb2.Empty()

    async def quotas(self, request: store_pb2.QuotasRequest) -> Message:
        return store_pb2.QuotasResponse(
            tenants=[
                store_pb2.TenantUsage(
                    salt_id=usage.salt_id,
                    dram_bytes=usage.dram_bytes,
                    ssd_bytes=usage.ssd_bytes,
                    dram_limit_bytes=usage.quota.dram_bytes or 0,
                    ssd_limit_bytes=usage.quota.ssd_bytes or 0,
                    evicted_blocks=usage.evicted_blocks,
                )
                for usage in self._operations.usage()
            ]
        )

    async def drain(self, request: store_pb2.DrainRequest) -> Message:
        self._on_drain()
        return common_pb2.Empty()

    async def scrub(self, request: store_pb2.ScrubRequest) -> Message:
        scrubbing = self._servicer.store.scrubbing
        if scrubbing is None:
            raise InvalidRequestError("there is nothing to scrub: ssd.capacity_bytes is 0")
        plan = scrubbing.scrub_now()
        return store_pb2.ScrubResponse(records=plan.records, expected_seconds=plan.expected_seconds)

    async def reload(self, request: store_pb2.ReloadRequest) -> Message:
        changes = self._reload()
        return store_pb2.ReloadResponse(
            changed=[str(change) for change in changes.live],
            needs_restart=[str(change) for change in changes.needs_restart],
        )


def _namespace(packed: bytes) -> NamespaceId | None:
    return namespace_id_from_wire(packed) if packed else None


def _tier(value: int) -> Tier | None:
    return tier_from_wire(value) if value else None


def _bytes(count: int, name: str) -> int:
    if count > MAX_BYTES:
        raise InvalidRequestError(f"{name} {count} is more than any tier has")
    return count


def _evicted(evicted: Evicted) -> Message:
    return store_pb2.EvictResponse(
        evicted_blocks=evicted.evicted_blocks,
        freed_bytes=evicted.freed_bytes,
        kept_blocks=evicted.kept_blocks,
    )
