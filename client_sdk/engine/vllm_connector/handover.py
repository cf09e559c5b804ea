"""Prefill here, decode there: what two engines tell each other in `kv_transfer_params`.

A proxy asks one engine for one token with `do_remote_decode`, and hands the `kv_transfer_params` of
its answer on to another. That one waits for the prompt's blocks, which may still be on their way
into the store of the first, or to its own node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from client_sdk.prefetch import HintedSource, Prefetch
from client_sdk.sync_client import SyncClient
from emberkv_proto.errors import EmberError
from emberkv_proto.types import BlockHash, NodeId

POLL_SECONDS = 0.005
"""How often the daemon is asked how much has come."""
LONGEST_SECONDS = 60.0
"""How long all blocks of a prompt are waited for, however steadily they come."""
MAX_NODE_ID_BYTES = 253


@dataclass(frozen=True, slots=True)
class Handover:
    """A prompt that another engine has computed: at which node, and how many blocks of it."""

    node_id: NodeId
    blocks: int


def is_handed_over(params: Mapping[str, Any] | None) -> bool:
    """Whether the request's answer is to say where its prompt's blocks are."""
    return bool(params) and (params or {}).get("do_remote_decode") is True


def handover_params(handover: Handover) -> dict[str, Any]:
    """For the answer of the engine that prefilled."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_node_id": handover.node_id,
        "remote_blocks": handover.blocks,
    }


def handover_in(params: Mapping[str, Any] | None) -> Handover | None:
    """What the engine that prefilled has said; None where it is not of ours. Clients send it."""
    if not params or params.get("do_remote_prefill") is not True:
        return None
    node_id, blocks = params.get("remote_node_id"), params.get("remote_blocks")
    if not isinstance(node_id, str) or not 0 < len(node_id.encode()) <= MAX_NODE_ID_BYTES:
        return None
    if type(blocks) is not int or blocks <= 0:
        return None
    return Handover(NodeId(node_id), blocks)


class Arrival:
    """The wait for a prompt's blocks. `now` is monotonic; each poll costs one call at most."""

    def __init__(
        self,
        client: SyncClient,
        handover: Handover,
        hashes: Sequence[BlockHash],
        patience_seconds: float,
        now: float,
    ) -> None:
        """Begins to bring the blocks from that node, unless it is this one.

        Args:
            hashes: of the whole prompt.
            patience_seconds: how long the next block is waited for.

        Raises:
            EmberError: the daemon is away.
        """
        self._client = client
        self._hashes = hashes[: handover.blocks]
        self._patience_seconds = patience_seconds
        self._deadline = now + LONGEST_SECONDS
        self._polled_at = now
        self._came_at = now
        self._readable_blocks = client.probe(self._hashes).hit_blocks
        self._prefetch: Prefetch | None = None
        if not self.is_complete and client.node_id != handover.node_id:
            self._prefetch = client.start_prefetch(
                self._hashes, LONGEST_SECONDS, HintedSource(handover.node_id, patience_seconds)
            )

    @property
    def is_complete(self) -> bool:
        """Whether all blocks have come."""
        return self._readable_blocks >= len(self._hashes)

    def is_over(self, now: float) -> bool:
        """Whether all have come, or no more is worth waiting for."""
        if not self.is_complete and now - self._polled_at >= POLL_SECONDS:
            self._polled_at = now
            try:
                readable = self._client.probe(self._hashes).hit_blocks
            except EmberError:
                return True  # and what is looked up next says so, too
            if readable > self._readable_blocks:
                self._readable_blocks, self._came_at = readable, now
        waited = now - self._came_at
        return self.is_complete or waited >= self._patience_seconds or now >= self._deadline

    def end(self) -> None:
        """Bring no more. The daemon may be away."""
        prefetch, self._prefetch = self._prefetch, None
        if prefetch is not None:
            prefetch.cancel()
