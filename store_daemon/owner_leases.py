"""Leases at other nodes, by the quicker of two ways, and their ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping

from client_sdk.transport.base import BusyHereError
from emberkv_proto.errors import EmberError
from emberkv_proto.types import NodeId
from store_daemon.peer_client import LeaseOwner, PeerClient, RemoteGrant, Wish
from store_daemon.pull_failures import failure_reason
from store_daemon.quick_leases import QuickLeases


class OwnerLeases:
    """Belongs to one event loop; close it there.

    A request that is under way is not cancelled: the lease may be given already. What comes of one
    that nobody waits for any more is given back.
    """

    def __init__(
        self,
        client: PeerClient,
        quick: QuickLeases,
        release_seconds: float,
        on_failure: Callable[[str, EmberError], None],
    ) -> None:
        """`on_failure` is told by which reason a lease was not given back."""
        self._client = client
        self._quick = quick
        self._release_seconds = release_seconds
        self._on_failure = on_failure
        self._ending: set[asyncio.Task[None]] = set()
        self.quick_leases = 0
        """Given at owners' transport ports."""

    def may_be_quick(self, owner: LeaseOwner) -> bool:
        """Whether the owner can be asked without gRPC, and now."""
        return self._quick.may_ask(owner)

    async def ask(
        self, owner: LeaseOwner, wish: Wish, timeout_seconds: float, is_first: bool
    ) -> RemoteGrant:
        """A lease. The quick way is for a pull's first one: the next ones' bytes would wait behind
        those that are read. Not to be cancelled. Raises as `PeerClient.acquire`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_seconds
        if is_first and not wish.wait_seconds and self._quick.may_ask(owner):
            lent = None
            with contextlib.suppress(BusyHereError):
                lent = await self._quick.ask(owner, wish, timeout_seconds)
            if lent is not None:
                self.quick_leases += bool(lent.grant.lease_id)
                return lent
        remote = await self._client.acquire(
            owner.address,
            wish.namespace,
            wish.hashes,
            wish.lease_seconds,
            max(0.001, until - loop.time()),
            wish.wait_seconds,
        )
        self._quick.learn(owner, remote)
        return remote

    async def ask_at_once(
        self, owner: LeaseOwner, wish: Wish, timeout_seconds: float
    ) -> RemoteGrant | None:
        """A lease of what is in the owner's DRAM, the quick way, which `may_be_quick` has just
        said to be there. None: of nothing, or it did not come in time, for whatever reason.

        Raises BusyHereError when others have taken that way meanwhile.
        """
        asked = asyncio.create_task(self._ask_at_once(owner, wish, timeout_seconds))
        try:
            await asyncio.wait({asked})
        except asyncio.CancelledError:
            self._end_later(self._give_back_unasked(owner, asked))
            raise
        try:
            lent = asked.result()
        except BusyHereError:
            raise
        except EmberError:
            return None
        if lent is None:
            return None
        if not (lent.grant.lease_id and lent.grant.usable_blocks):
            self.give_back(owner, lent)  # also what comes behind it, of an owner that lies
            return None
        self.quick_leases += 1
        return lent

    def give_back(self, owner: LeaseOwner, remote: RemoteGrant) -> None:
        """End the lease without waiting for the answer."""
        if remote.first is not None:
            remote.first.abandon()
        if remote.grant.lease_id:
            self._end_later(self._release(owner, remote.grant.lease_id))

    def give_back_later(self, owner: LeaseOwner, asked: asyncio.Task[RemoteGrant]) -> None:
        """End the lease that a request may bring yet."""
        self._end_later(self._give_back_unasked(owner, asked))

    async def retain(self, addresses: Mapping[NodeId, str]) -> None:
        """Forget all other nodes, and close the channels there."""
        self._quick.retain(addresses)
        await self._client.retain(set(addresses.values()))

    def cancel(self) -> None:
        """Make quick requests under way fail soon; the others have short deadlines."""
        self._quick.cancel()

    async def close(self) -> None:
        """Give back what there is to give back; drop all connections. Nobody may be asking."""
        if self._ending:
            await asyncio.wait(self._ending)
        await self._client.close()
        self._quick.close()

    def check_integrity(self) -> None:
        self._quick.check_integrity()

    def _end_later(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _ask_at_once(
        self, owner: LeaseOwner, wish: Wish, timeout_seconds: float
    ) -> RemoteGrant | None:
        if not self._quick.may_ask(owner):  # others have asked between this task's making and start
            raise BusyHereError(f"{owner.node_id} is being asked")
        return await self._quick.ask(owner, wish, timeout_seconds, ready_only=True)

    async def _give_back_unasked(
        self,
        owner: LeaseOwner,
        asked: asyncio.Task[RemoteGrant] | asyncio.Task[RemoteGrant | None],
    ) -> None:
        try:
            remote = await asked
        except EmberError as error:
            self._on_failure(failure_reason(error), error)
            return
        if remote is None:
            return
        if remote.first is not None:
            remote.first.abandon()
        if remote.grant.lease_id:
            await self._release(owner, remote.grant.lease_id)

    async def _release(self, owner: LeaseOwner, lease_id: int) -> None:
        try:
            await self._client.release(owner.address, lease_id, self._release_seconds)
        except EmberError as error:
            self._on_failure("release", error)  # its clock ends it
