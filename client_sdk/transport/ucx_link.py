"""How two hosts' UCX agents are introduced to each other over a control connection."""

from __future__ import annotations

from dataclasses import dataclass

from client_sdk.transport.agent_pool import AgentPool
from client_sdk.transport.agent_process import AgentLostError
from client_sdk.transport.base import TransportAddress
from client_sdk.transport.connections import exchange_hellos
from client_sdk.transport.frames import ANSWER_BYTES, AnswerHeader, Status
from client_sdk.transport.timed_socket import TimedSocket
from client_sdk.transport.ucx_frames import Introduction
from client_sdk.transport.ucx_peer import UcxLink
from client_sdk.transport.ucx_settings import Rdma, UcxSettings, can_read_by_itself
from emberkv_proto.errors import InvalidRequestError, UnavailableError


class OwnerBusyError(UnavailableError):
    """The owner's agents are being replaced."""


@dataclass(frozen=True, slots=True)
class LinkTerms:
    """What this side brings to every link."""

    settings: UcxSettings
    place: int
    """Of the local memory (see `memory`)."""


def meet(
    connection: TimedSocket,
    address: TransportAddress,
    magic: bytes,
    agents: AgentPool,
    number: int,
    terms: LinkTerms,
) -> UcxLink:
    """Agent `number` of ours (or another, while that is replaced) and one of the owner's.

    Raises:
        AgentLostError: all of ours are being replaced.
        OwnerBusyError: all of theirs are.
        InvalidRequestError: RDMA is required, and they have none in common.
        EmberError: as `exchange_hellos`.
    """
    agent = agents.take(number)
    if agent is None:
        raise AgentLostError("every UCX agent is being replaced")
    exchange_hellos(connection, address, magic)
    connection.send(Introduction(agent.span_bytes, agent.facts, terms.place).pack())
    answer = AnswerHeader.unpack(connection.receive(ANSWER_BYTES))
    if answer.status is not Status.OK:
        raise OwnerBusyError(f"{address.address} has no UCX agent free")
    owner = Introduction.receive(connection)
    link = UcxLink(connection, agent, agents, owner)
    link.is_one_sided = can_read_by_itself(
        agent.facts.transports, owner.facts.transports, terms.settings.one_sided
    )
    if not link.is_one_sided and terms.settings.rdma is Rdma.REQUIRED:
        raise InvalidRequestError(
            f"{address.address} has no RDMA in common with this node, only"
            f" {' '.join(owner.facts.transports)}, and transport.rdma is required"
        )
    return link
