"""What a client holds of a prefetch: enough to call it off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from client_sdk.connection import Connection
from client_sdk.session import SessionState
from emberkv_proto.v1 import store_pb2
from emberkv_proto.wire import Method

if TYPE_CHECKING:
    from client_sdk.async_client import AsyncClient


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
