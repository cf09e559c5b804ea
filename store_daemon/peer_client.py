"""gRPC client of other daemons' Peer service. Checks every number that comes back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from client_sdk import faults
from client_sdk.index_client import CHANNEL_OPTIONS, ember_error
from client_sdk.tls import Tls, open_channel
from client_sdk.transport.base import TransportAddress
from emberkv_proto.convert import hashes_to_wire, salt_ids_from_wire, u64s_from_wire
from emberkv_proto.errors import InvalidRequestError
from emberkv_proto.layout import Namespace
from emberkv_proto.types import BlockHash, Incarnation, NodeId
from emberkv_proto.v1 import store_pb2, store_pb2_grpc
from store_daemon.ports import PeerGrant, PoolRange
from store_daemon.transport.base import FirstBytes


@dataclass(frozen=True, slots=True)
class LeaseOwner:
    """A node that lends, and its gRPC address."""

    node_id: NodeId
    address: str


@dataclass(frozen=True, slots=True)
class RemoteGrant:
    """A lease another daemon gave us, and where its bytes can be read."""

    grant: PeerGrant
    source: TransportAddress
    ticket: bytes = b""
    """With which the owner may be asked for more at its transport's port."""
    first: FirstBytes | None = None
    """Of its first blocks, which are on their way: to be taken or abandoned."""

    def block_ranges(self, block: int) -> Sequence[PoolRange]:
        parts = self.grant.parts
        return self.grant.ranges[block * parts : (block + 1) * parts]

    def block_checksums(self, block: int) -> Sequence[int]:
        parts = self.grant.parts
        return self.grant.checksums[block * parts : (block + 1) * parts]


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked of an owner: leading blocks of a run."""

    namespace: Namespace
    hashes: Sequence[BlockHash]
    lease_seconds: float
    first_blocks: int = 0
    """Whose bytes are to come at once, where that can be."""
    wait_seconds: float = 0.0
    """For the first one, if it is not there yet."""


class PeerClient:
    """Keeps one channel for each peer address. Belongs to one event loop; close it there."""

    def __init__(self, node_id: NodeId, tls: Tls | None = None) -> None:
        self._node_id = node_id
        self._tls = tls
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._calls: Counter[str] = Counter()

    async def acquire(
        self,
        address: str,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        lease_seconds: float,
        timeout_seconds: float,
        wait_seconds: float = 0.0,
    ) -> RemoteGrant:
        """Lease the leading blocks that the peer has; wait so long for it to have the first one.

        Raises:
            InvalidRequestError: the answer does not fit the namespace or the question.
            EmberError: what the peer raised; UnavailableError or DeadlineError when it is away.
        """
        request = lease_request(self._node_id, namespace, hashes, lease_seconds)
        request.wait_seconds = wait_seconds
        faults.hit(faults.PEER_LEASE)
        with self._calling(address) as stub:
            response = await stub.Acquire(request, timeout=timeout_seconds + wait_seconds)
        source = TransportAddress(
            response.transport, response.transport_address, Incarnation(response.incarnation)
        )
        grant = grant_from_wire(response, namespace, len(hashes))
        return RemoteGrant(grant, source, response.ticket)

    async def release(self, address: str, lease_id: int, timeout_seconds: float) -> None:
        """End a lease early. Raises EmberError; the lease then ends by its clock."""
        request = store_pb2.PeerReleaseRequest(lease_id=lease_id)
        with self._calling(address) as stub:
            await stub.Release(request, timeout=timeout_seconds)

    async def retain(self, addresses: Collection[str]) -> None:
        """Close the channels to all other addresses, but for those with a call in flight."""
        gone = [a for a in self._channels if a not in addresses and not self._calls[a]]
        for channel in [self._channels.pop(address) for address in gone]:
            await channel.close(grace=None)

    async def close(self) -> None:
        """Close all channels; calls in flight are cancelled."""
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close(grace=None)

    @contextmanager
    def _calling(self, address: str) -> Iterator[store_pb2_grpc.PeerStub]:
        channel = self._channels.get(address)
        if channel is None:
            channel = open_channel(address, self._tls, CHANNEL_OPTIONS)
            self._channels[address] = channel
        self._calls[address] += 1
        try:
            yield store_pb2_grpc.PeerStub(channel)  # type: ignore[no-untyped-call]
        except grpc.aio.AioRpcError as error:
            raise ember_error(error, f"peer {address}") from None
        finally:
            self._calls[address] -= 1
            if not self._calls[address]:
                del self._calls[address]


def lease_request(
    node_id: NodeId, namespace: Namespace, hashes: Sequence[BlockHash], lease_seconds: float
) -> store_pb2.PeerAcquireRequest:
    return store_pb2.PeerAcquireRequest(
        namespace_id=namespace.id,
        hashes=hashes_to_wire(hashes),
        lease_seconds=lease_seconds,
        requester=node_id,
    )


def grant_from_wire(
    message: store_pb2.PeerAcquireResponse, namespace: Namespace, asked_blocks: int
) -> PeerGrant:
    """Raises InvalidRequestError when the answer does not fit the namespace or the question."""
    usable, parts = message.usable_blocks, message.parts
    offsets = u64s_from_wire(message.offsets)
    lengths = u64s_from_wire(message.lengths)
    checksums = u64s_from_wire(message.checksums)
    if usable > asked_blocks:
        raise InvalidRequestError(f"peer grants {usable} blocks of {asked_blocks} asked")
    if usable and parts != namespace.parts:
        raise InvalidRequestError(f"peer has {parts} parts a block, not {namespace.parts}")
    rows = usable * parts
    if not rows == len(offsets) == len(lengths) == len(checksums):
        raise InvalidRequestError(f"peer sent rows that do not match {usable} x {parts} parts")
    wanted = [namespace.part_bytes(part) for part in range(namespace.parts)] * usable
    if lengths != wanted:
        raise InvalidRequestError("peer's part lengths are not the namespace's")
    if any(o + n >= 1 << 63 for o, n in zip(offsets, lengths, strict=True)):
        raise InvalidRequestError("peer's offsets are out of range")
    salt_ids = salt_ids_from_wire(message.salt_ids, usable)
    ranges = tuple(PoolRange(o, n) for o, n in zip(offsets, lengths, strict=True))
    return PeerGrant(message.lease_id, usable, parts, ranges, tuple(checksums), salt_ids)
