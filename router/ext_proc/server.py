"""Serves Envoys over gRPC: ext_proc's one call, and the health service that probes ask.

Handlers are registered by name, since only the names and the messages' fields are on the wire.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from emberkv_proto.errors import PreflightError
from emberkv_proto.v1 import envoy_pb2 as pb
from router.ext_proc.exchange import Exchange
from router.ext_proc.messages import ProtocolError, body_modes, read_message
from router.ext_proc.picking import Picker
from router.metrics import RouterMetrics

log = logging.getLogger(__name__)

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH = "grpc.health.v1.Health"
LIVENESS = frozenset({"", "liveness"})
READINESS = frozenset({"readiness", SERVICE})
MAX_STREAMS = 8192
"""Requests on their way at once on one connection of an Envoy."""
OVERHEAD_BYTES = 1 << 20
"""Of a message beside a body."""


class ExtProcServer:
    """The endpoint picker's port. On the event loop."""

    def __init__(
        self,
        picker: Picker,
        metrics: RouterMetrics,
        is_ready: Callable[[], bool],
        max_body_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._picker = picker
        self._metrics = metrics
        self._is_ready = is_ready
        self._max_body_bytes = max_body_bytes
        self._clock = clock
        self._is_draining = False
        self._server: grpc.aio.Server | None = None
        self.streams = 0
        """Requests on their way now."""

    async def start(self, host: str, port: int) -> int:
        """Listen; return the port. Raises PreflightError: it is taken."""
        size = self._max_body_bytes + OVERHEAD_BYTES
        server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", size),
                ("grpc.max_send_message_length", size),
                ("grpc.max_concurrent_streams", MAX_STREAMS),
                ("grpc.so_reuseport", 0),
            )
        )
        server.add_generic_rpc_handlers(self._handlers())
        host = f"[{host}]" if ":" in host else host
        try:
            bound = server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise PreflightError(
                f"cannot listen on {host}:{port}; set router.ext_proc_port"
            ) from error
        await server.start()
        self._server = server
        return bound

    async def drain(self, seconds: float) -> None:
        """Take no more and let streams end; nothing happens where nothing was started."""
        self._is_draining = True
        server, self._server = self._server, None
        if server is not None:
            await server.stop(seconds)

    def check_integrity(self) -> None:
        assert self.streams >= 0

    async def process(self, _: object, context: Any) -> None:
        """One HTTP request: read what Envoy says, answer it, until Envoy ends the stream."""
        self.streams += 1
        try:
            await self._process(context)
        except ProtocolError as error:
            self._metrics.ext_proc_errors.labels(error.kind).inc()
            log.debug("an Envoy broke the protocol: %s", error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Exception:
            self._metrics.ext_proc_errors.labels("internal").inc()
            log.exception("choosing for an Envoy failed")
            await context.abort(grpc.StatusCode.INTERNAL, "a fault of the router; see its log")
        finally:
            self.streams -= 1

    async def _process(self, context: Any) -> None:
        raw = await context.read()
        if not isinstance(raw, bytes):  # grpc's end of a stream
            return
        message = read_message(raw)
        with Exchange(
            self._picker, self._max_body_bytes, self._clock, body_modes(message)
        ) as exchange:
            while True:
                for answer in await exchange.answer(message):
                    await context.write(answer.SerializeToString())
                if exchange.refused_status is not None:
                    self._metrics.requests.labels("", str(exchange.refused_status)).inc()
                    return
                raw = await context.read()
                if not isinstance(raw, bytes):  # grpc's end of a stream
                    return
                message = read_message(raw)

    async def check(self, raw: bytes, context: Any) -> bytes:
        """grpc.health.v1: `liveness` while the process answers, `readiness` with an engine."""
        try:
            service = pb.HealthCheckRequest.FromString(raw).service
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a HealthCheckRequest")
            raise
        if service not in LIVENESS | READINESS:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no such service: {service}")
        is_well = service in LIVENESS or (self._is_ready() and not self._is_draining)
        status = pb.HealthCheckResponse.SERVING if is_well else pb.HealthCheckResponse.NOT_SERVING
        return pb.HealthCheckResponse(status=status).SerializeToString()

    def _handlers(self) -> tuple[grpc.GenericRpcHandler[bytes, bytes], ...]:
        # Bytes in and out: what cannot be parsed is answered and counted here, not logged by grpc.
        process = grpc.stream_stream_rpc_method_handler(self.process)
        check = grpc.unary_unary_rpc_method_handler(self.check)
        return (
            grpc.method_handlers_generic_handler(SERVICE, {"Process": process}),
            grpc.method_handlers_generic_handler(HEALTH, {"Check": check}),
        )
