"""What a client holds of a prefetch: enough to call it off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from client_sdk.borrowed import pack_hashes
from client_sdk.connection import Connection
from client_sdk.patience import check_seconds
from client_sdk.session import SessionState
from emberkv_proto.types import BlockHash, NodeId
from emberkv_proto.v1 import store_pb2
from emberkv_proto.wire import Method

if TYPE_CHECKING:
    from client_sdk.async_client import AsyncClient


@dataclass(frozen=True, slots=True)
class HintedSource:
    """The node on which a chain is being computed, and how long its next block is waited for."""

    node_id: NodeId
    patience_seconds: float


def prefetch_request(
    hashes: Sequence[BlockHash], deadline_seconds: float, source: HintedSource | None
) -> store_pb2.PrefetchRequest:
    """Raises InvalidRequestError for seconds that are none."""
    return store_pb2.PrefetchRequest(
        hashes=pack_hashes(hashes),
        deadline_seconds=check_seconds(deadline_seconds),
        source_node_id=source.node_id if source is not None else "",
        patience_seconds=check_seconds(source.patience_seconds) if source is not None else 0.0,
    )


class Prefetch:
    """A prefetch begun by `SyncClient.start_prefetch`. It ends by itself, and with its session."""

    def __init__(
        self, connection: Connection, session: SessionState, answer: store_pb2.PrefetchResponse
    ) -> None:
        self._connection = connection
        self._session = session
        self._id = answer.prefetch_id
        self.scheduled_blocks: int = answer.scheduled_blocks
        """How many blocks will move, or may come from peers."""

    def cancel(self) -> None:
        """Stop what has not begun to move. Idempotent; the daemon may be away."""
        prefetch_id, self._id = self._id, 0
        if prefetch_id and self._session.is_alive:
            self._connection.tell(
                self._session,
                Method.CANCEL_PREFETCH,
                store_pb2.CancelPrefetchRequest(prefetch_id=prefetch_id),
            )


class AsyncPrefetch:
    """A prefetch begun by `AsyncClient.start_prefetch`. It ends by itself, and with its session."""

    def __init__(
        self, client: AsyncClient, session: SessionState, answer: store_pb2.PrefetchResponse
    ) -> None:
        self._client = client
        self._session = session
        self._id = answer.prefetch_id
        self.scheduled_blocks: int = answer.scheduled_blocks
        """How many blocks will move, or may come from peers."""

    async def cancel(self) -> None:
        """As `Prefetch.cancel`."""
        prefetch_id, self._id = self._id, 0
        if prefetch_id and self._session.is_alive:
            await self._client.tell(
                self._session,
                Method.CANCEL_PREFETCH,
                store_pb2.CancelPrefetchRequest(prefetch_id=prefetch_id),
            )
