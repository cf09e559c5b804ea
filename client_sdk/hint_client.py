"""Async gRPC client of the daemons' Hints, for routers: have chains brought into a node's DRAM."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Collection, Sequence, Set
from dataclasses import dataclass

import grpc

from client_sdk.index_client import CHANNEL_OPTIONS, ember_error
from client_sdk.prefetch import HintedSource
from client_sdk.tls import Tls, open_channel
from emberkv_proto.convert import hashes_to_wire
from emberkv_proto.types import BlockHash, NamespaceId
from emberkv_proto.v1 import store_pb2, store_pb2_grpc

MAX_SECONDS = 600.0
"""The longest deadline that daemons take; a longer one is cut to it."""
ANSWER_SECONDS = 1.0
"""Beyond its deadline a prefetch that has ended is told of for so long."""


@dataclass(frozen=True, slots=True)
class HintProgress:
    """What of a chain can be read in the node's DRAM."""

    scheduled_blocks: int
    readable_blocks: int
    is_done: bool


class HintClient:
    """Keeps one channel for each daemon. Belongs to one event loop; close it there."""

    def __init__(self, tls: Tls | None = None) -> None:
        self._tls = tls
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._calls: Counter[str] = Counter()

    @property
    def addresses(self) -> Set[str]:
        """Of the daemons to which there is a channel."""
        return self._channels.keys()

    async def prefetch(
        self,
        address: str,
        namespace_id: NamespaceId,
        hashes: Sequence[BlockHash],
        deadline_seconds: float,
        source: HintedSource | None = None,
    ) -> AsyncGenerator[HintProgress, None]:
        """Have a chain brought into DRAM; closing the generator, or cancelling, ends that.

        Ends by itself with the prefetch. `source`: see `HintedSource`; without, what is missing
        comes from where the index says it is.

        Raises:
            EmberError: what the daemon raised; UnavailableError or DeadlineError when it is away.
        """
        seconds = min(deadline_seconds, MAX_SECONDS)
        request = store_pb2.HintRequest(
            namespace_id=namespace_id,
            hashes=hashes_to_wire(hashes),
            deadline_seconds=seconds,
            source_node_id=source.node_id if source is not None else "",
            patience_seconds=source.patience_seconds if source is not None else 0.0,
        )
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(address, self._tls, CHANNEL_OPTIONS)
        stub = store_pb2_grpc.HintsStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Prefetch(request, timeout=seconds + ANSWER_SECONDS)
        self._calls[address] += 1
        try:
            async for said in call:
                readable = min(said.readable_blocks, len(hashes))
                yield HintProgress(said.scheduled_blocks, readable, said.is_done)
        except grpc.aio.AioRpcError as error:
            raise ember_error(error, f"daemon {address}") from None
        finally:
            call.cancel()
            self._calls[address] -= 1
            if not self._calls[address]:
                del self._calls[address]

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
