"""A consumer of KV events as routers of others have one: SUB, DEALER, and vLLM's own classes.

The structs have the fields, order and tags of vLLM 0.32's (notes in docs/kv-events.md): what they
do not decode, its consumers do not either.
"""

from __future__ import annotations

from collections import defaultdict

import msgspec
import zmq
import zmq.asyncio

from client_sdk import aio

END = b"\xff" * 8
WAIT_SECONDS = 60.0


class KVCacheEvent(
    msgspec.Struct, omit_defaults=True, gc=False, tag=True, forbid_unknown_fields=True
):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class KvListener:
    """What a node's events say is resident, by medium. `async with`; then `catch_up`, `follow`."""

    def __init__(self, endpoint: str, replay_endpoint: str = "") -> None:
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self.resident: defaultdict[str, set[int]] = defaultdict(set)
        self.parents: dict[int, int | None] = {}
        self.sizes: set[int] = set()
        self.topics: set[bytes] = set()
        self.next = 0
        self.missed: list[int] = []
        """Numbers after which some were missing, live."""
        self.clears = 0

    async def __aenter__(self) -> KvListener:
        self._context = zmq.asyncio.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"")
        self._sub.connect(self._endpoint)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    async def catch_up(self, first: int = 0) -> int:
        """Ask for what was sent from `first` on; how many messages came."""
        dealer = self._context.socket(zmq.DEALER)
        try:
            dealer.connect(self._replay_endpoint)
            await dealer.send_multipart([b"", first.to_bytes(8, "big")])
            count = 0
            async with aio.timeout(WAIT_SECONDS):
                while True:
                    empty, topic, number, payload = await dealer.recv_multipart()
                    assert empty == b""
                    if number == END:
                        assert (topic, payload) == (b"", b"")
                        return count
                    self._take(topic, number, payload)
                    count += 1
        finally:
            dealer.close(linger=0)

    async def follow(self, numbers: int) -> None:
        """Read until the message of this number has come."""
        async with aio.timeout(WAIT_SECONDS):
            while self.next < numbers:
                topic, number, payload = await self._sub.recv_multipart()
                if int.from_bytes(number, "big") >= self.next:
                    self._take(topic, number, payload)

    def _take(self, topic: bytes, number: bytes, payload: bytes) -> None:
        self.topics.add(topic)
        seq = int.from_bytes(number, "big")
        if seq != self.next:
            self.missed.append(self.next)
        self.next = seq + 1
        batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
        assert batch.ts > 0
        for event in batch.events:
            match event:
                case AllBlocksCleared():
                    self.resident.clear()
                    self.clears += 1
                case BlockRemoved():
                    self.resident[str(event.medium)] -= set(event.block_hashes)
                case BlockStored():
                    assert event.token_ids == []
                    self.sizes.add(event.block_size)
                    self.resident[str(event.medium)] |= set(event.block_hashes)
                    for parent, key in zip(
                        [event.parent_block_hash, *event.block_hashes],
                        event.block_hashes,
                        strict=False,
                    ):
                        self.parents[key] = parent
