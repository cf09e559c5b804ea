"""A reader's view of one owner over UCX: its links, and what became of reads."""

from __future__ import annotations

import logging
import threading

from client_sdk.transport.agent_pool import AgentPool
from client_sdk.transport.agent_process import AgentProcess
from client_sdk.transport.base import Peer, TransportAddress
from client_sdk.transport.connections import Link, PeerConnections
from client_sdk.transport.timed_socket import TimedSocket
from client_sdk.transport.ucx_frames import Introduction
from emberkv_proto.errors import EmberError

log = logging.getLogger(__name__)

FORGET_SECONDS = 1.0


class UcxLink(Link):
    """A control connection, and the two agents that it introduced to each other."""

    def __init__(
        self,
        sock: TimedSocket,
        agent: AgentProcess,
        agents: AgentPool,
        owner: Introduction,
    ) -> None:
        super().__init__(sock)
        self.agent = agent
        self._agents = agents
        self.owner = owner
        self.owner_name: bytes | None = None
        """Once our agent knows the owner's, to read or write by itself."""
        self.is_one_sided = False
        """Whether both sides have RDMA of the same kind."""

    def know_owner(self, seconds: float) -> None:
        """Let our agent read and write the owner's memory by itself."""
        self.owner_name = self.agent.introduce(self.owner.facts.metadata, seconds)

    def is_reusable(self) -> bool:
        return self.agent.is_usable and super().is_reusable()

    def abort(self) -> None:
        self.destroy_agent()
        super().abort()

    def destroy_agent(self) -> bool:
        """Whether it was this call that did."""
        is_first = self.agent.destroy()
        self._agents.poke()
        return is_first

    def close(self) -> None:
        super().close()
        if self.owner_name is not None and self.agent.is_usable:
            try:
                self.agent.forget(self.owner_name, FORGET_SECONDS)
            except EmberError as error:
                log.debug("ucx transport: %s", error)
            self.owner_name = None


class UcxPeer:
    """An owner: links over which its agents work with ours, and a plain way beside them."""

    def __init__(
        self, address: TransportAddress, number: int, links: PeerConnections[UcxLink], plain: Peer
    ) -> None:
        self.address = address
        self.number = number
        self.links = links
        self.plain = plain


class UcxCounters:
    """Since the start; `quarantined_bytes` is now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.one_sided_bytes = 0
        self.pushed_bytes = 0
        self.plain_bytes = 0
        self.placed_bytes = 0
        self.refused_writes = 0
        self.restarted_reads = 0
        self.quarantines = 0
        self.quarantined_bytes = 0

    def add(self, name: str, value: int) -> None:
        with self._lock:
            setattr(self, name, getattr(self, name) + value)


class Quarantine:
    """Whether a failed transfer may still have bytes under way."""

    def __init__(self) -> None:
        self.is_lifted = False

    def lift(self) -> None:
        self.is_lifted = True
