"""The Operator service over gRPC: every call of the contract, behind the gate."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from client_sdk.operator_gate import OperatorGate, speaker
from emberkv_proto import __version__
from emberkv_proto.errors import InvalidRequestError, UnavailableError
from emberkv_proto.v1 import store_pb2
from store_daemon.grpc_errors import Context, errors_answered
from store_daemon.life import Life

OperatorCalls = Mapping[str, Callable[[Any], Awaitable[Message]]]
"""Each call of service Operator -> what answers its request; it may raise EmberError."""

SERVICE = store_pb2.DESCRIPTOR.services_by_name["Operator"]
CALL_NAMES = frozenset(method.name for method in SERVICE.methods)


class OperatorService:
    """Answers operators. Until `open_to`, only Status: that the daemon recovers."""

    def __init__(self, life: Life, gate: OperatorGate) -> None:
        self._life = life
        self._gate = gate
        self._calls: OperatorCalls | None = None

    def open_to(self, calls: OperatorCalls) -> None:
        assert calls.keys() <= CALL_NAMES, calls.keys() - CALL_NAMES
        self._calls = calls

    def handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        """For `Server.add_generic_rpc_handlers`."""
        handlers = {
            method.name: grpc.unary_unary_rpc_method_handler(
                self._answerer(method.name),
                request_deserializer=GetMessageClass(method.input_type).FromString,
                response_serializer=GetMessageClass(method.output_type).SerializeToString,
            )
            for method in SERVICE.methods
        }
        return grpc.method_handlers_generic_handler(SERVICE.full_name, handlers)

    def _answerer(self, name: str) -> Callable[[Message, Context], Awaitable[Message]]:
        async def answer(request: Message, context: Context) -> Message:
            async with errors_answered(context):
                metadata = dict(context.invocation_metadata() or ())
                peer = speaker(context.peer(), metadata)
                self._gate.check(peer, metadata.get("authorization"))
                if self._calls is not None and name not in self._calls:
                    raise InvalidRequestError(f"this daemon does not know the call {name}")
                if self._calls is not None:
                    return await self._calls[name](request)
                if name == "Status":
                    return self._recovering()
                raise UnavailableError(f"the daemon is recovering ({self._life.doing}); try later")
            raise AssertionError("unreachable: an error aborts the call")

        return answer

    def _recovering(self) -> store_pb2.StatusResponse:
        return store_pb2.StatusResponse(
            node_id=self._life.node_id,
            state=self._life.state,
            uptime_seconds=self._life.uptime_seconds,
            version=__version__,
        )
