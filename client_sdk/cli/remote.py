"""What the CLI asks of a daemon over its gRPC, as an operator. Every call has a deadline."""

from __future__ import annotations

import grpc

from client_sdk.index_client import CHANNEL_OPTIONS, IndexClient, IndexedNode, ember_error
from client_sdk.status import NodeStatus, status_from_wire
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


async def daemon_status(address: str) -> NodeStatus:
    """Ask the daemon at host:port how it is.

    Raises:
        UnavailableError, DeadlineError: it is away.
    """
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub = store_pb2_grpc.OperatorStub(channel)  # type: ignore[no-untyped-call]
        try:
            answer = await stub.Status(store_pb2.StatusRequest(), timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise ember_error(error, f"daemon {address}") from None
    return status_from_wire(answer)


async def daemon_problems(address: str) -> list[str]:
    """Let the daemon at host:port check its own invariants; what does not hold, in words."""
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub = store_pb2_grpc.OperatorStub(channel)  # type: ignore[no-untyped-call]
        try:
            answer = await stub.Check(store_pb2.CheckRequest(), timeout=CHECK_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise ember_error(error, f"daemon {address}") from None
    return list(answer.problems)
