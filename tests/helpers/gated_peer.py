"""A puller whose blocks land one by one when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from emberkv_proto.hashing import checksum
from emberkv_proto.layout import Namespace
from emberkv_proto.types import BlockHash
from store_daemon.ports import Followed, PullTarget
from tests.helpers.store import SmallStore, payload


class GatedPeer:
    """Implements `ports.Puller`. Its room is closed when it is cancelled, as a real one's is."""

    def __init__(self, small: SmallStore) -> None:
        self._small = small
        self._permits = asyncio.Semaphore(0)
        self.asked = 0
        self.followed: list[Followed] = []
        self.landed = 0
        self.cancelled = 0

    def let_through(self, count: int) -> None:
        for _ in range(count):
            self._permits.release()

    async def pull(
        self,
        namespace: Namespace,
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        target: PullTarget,
        deadline_seconds: float,
    ) -> int:
        self.asked += 1
        return await self._bring(namespace, parent, hashes, target, deadline_seconds)

    async def follow(
        self,
        followed: Followed,
        namespace: Namespace,
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        target: PullTarget,
        deadline_seconds: float,
    ) -> int:
        self.followed.append(followed)
        return await self._bring(namespace, parent, hashes, target, deadline_seconds)

    async def _bring(
        self,
        namespace: Namespace,
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        target: PullTarget,
        deadline_seconds: float,
    ) -> int:
        room = target.allot(namespace, parent, hashes)
        landed = 0
        try:
            for number, places in enumerate(room.ranges):
                await asyncio.wait_for(self._permits.acquire(), deadline_seconds)
                parts = [payload(hashes[number], p, r.length) for p, r in enumerate(places)]
                with self._small.pool.view() as view:
                    for place, content in zip(places, parts, strict=True):
                        view[place.offset : place.offset + place.length] = content
                room.land(number, [checksum(content) for content in parts])
                room.publish()
                landed += 1
                self.landed += 1
        except asyncio.TimeoutError:
            return landed
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            room.close()
        return landed
