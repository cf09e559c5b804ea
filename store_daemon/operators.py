"""What the daemon answers operators with: convert, call, convert back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message

from emberkv_proto.v1 import common_pb2
from store_daemon.operator_server import OperatorCalls
from store_daemon.servicer import Servicer


def operator_calls(servicer: Servicer, on_drain: Callable[[], None]) -> OperatorCalls:
    """The calls of service Operator, by name. `on_drain`: an operator asked the daemon to end."""

    async def status(request: Any) -> Message:
        return servicer.status()

    async def check(request: Any) -> Message:
        return servicer.check()

    async def drain(request: Any) -> Message:
        on_drain()
        return common_pb2.Empty()

    return {"Status": status, "Check": check, "Drain": drain}
