"""What the CLI asks of a daemon over its gRPC, as an operator. Every call has a deadline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message

from client_sdk.index_client import CHANNEL_OPTIONS, IndexClient, IndexedNode, ember_error
from client_sdk.status import NodeStatus, status_from_wire
from client_sdk.tls import Tls, open_channel
from emberkv_proto.errors import UnavailableError
from emberkv_proto.v1 import store_pb2, store_pb2_grpc

CALL_SECONDS = 3.0
CHECK_SECONDS = 30.0


async def indexed_nodes(index: IndexClient) -> list[IndexedNode]:
    """The index's nodes, by name.

    Raises:
        UnavailableError: no index there; says how to get one, or to another.
        DeadlineError: it does not answer in time.
    """
    try:
        return sorted(await index.nodes(), key=lambda node: node.node_id)
    except UnavailableError as error:
        raise UnavailableError(
            f"{error}\nis a cluster running? `emberkv up` starts one; --index names another"
        ) from None


@dataclass(frozen=True, slots=True)
class Access:
    """What a daemon may ask for before it takes orders: TLS, and from elsewhere its token."""

    tls: Tls | None = None
    token: str | None = None


LOCAL = Access()


async def ask_operator(
    address: str, access: Access, name: str, request: Message, seconds: float
) -> Any:
    """Make a call of service Operator at host:port; return its answer's message.

    Raises EmberError as the daemon does; UnavailableError, DeadlineError: it is away.
    """
    metadata = (("authorization", f"Bearer {access.token}"),) if access.token else ()
    async with open_channel(address, access.tls, CHANNEL_OPTIONS) as channel:
        stub = store_pb2_grpc.OperatorStub(channel)  # type: ignore[no-untyped-call]
        try:
            return await getattr(stub, name)(request, timeout=seconds, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise ember_error(error, f"daemon {address}") from None


async def daemon_status(address: str, access: Access = LOCAL) -> NodeStatus:
    """Ask the daemon at host:port how it is. Raises as `ask_operator`."""
    request = store_pb2.StatusRequest()
    return status_from_wire(await ask_operator(address, access, "Status", request, CALL_SECONDS))


async def daemon_problems(address: str, access: Access = LOCAL) -> list[str]:
    """Let the daemon at host:port check its own invariants; what does not hold, in words."""
    request = store_pb2.CheckRequest()
    answer = await ask_operator(address, access, "Check", request, CHECK_SECONDS)
    return list(answer.problems)
