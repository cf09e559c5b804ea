"""What an Envoy says to an endpoint picker, said by a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from emberkv_proto.v1 import envoy_pb2 as pb
from router.ext_proc.messages import DESTINATION, SUBSET, SUBSET_NAMESPACE
from router.ext_proc.server import HEALTH, SERVICE

SECONDS = 30.0
POST = {":method": "POST", ":path": "/v1/completions", "content-type": "application/json"}


def request_head(
    headers: Mapping[str, str] = POST,
    *,
    mode: str = "BUFFERED",
    response_mode: str = "NONE",
    ends: bool = False,
    subset: list[str] | None = None,
) -> pb.ProcessingRequest:
    message = pb.ProcessingRequest(
        request_headers=pb.HttpHeaders(headers=header_map(headers), end_of_stream=ends),
        protocol_config=pb.ProtocolConfiguration(
            request_body_mode=mode,
            response_body_mode=response_mode,
        ),
    )
    if subset is not None:
        hint = message.metadata_context.filter_metadata[SUBSET_NAMESPACE]
        hint.get_or_create_list(SUBSET).extend(subset)
    return message


def header_map(headers: Mapping[str, str]) -> pb.HeaderMap:
    return pb.HeaderMap(
        headers=[pb.HeaderValue(key=k, raw_value=v.encode()) for k, v in headers.items()]
    )


def request_body(body: bytes, *, ends: bool = True) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=ends))


def response_body(body: bytes, *, ends: bool = True) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(response_body=pb.HttpBody(body=body, end_of_stream=ends))


def response_head(
    status: str = "200", served: str = "", content_type: str = "application/json"
) -> pb.ProcessingRequest:
    headers = header_map({":status": status, "content-type": content_type})
    message = pb.ProcessingRequest(response_headers=pb.HttpHeaders(headers=headers))
    if served:
        message.attributes["envoy.filters.http.ext_proc"]["upstream.address"] = served
    return message


def set_headers(answer: pb.ProcessingResponse) -> dict[str, str]:
    """The headers that an answer of any kind sets."""
    kind = answer.WhichOneof("response")
    assert kind is not None
    part = getattr(answer, kind)
    mutation = part.headers if kind == "immediate_response" else part.response.header_mutation
    return {
        item.header.key: (item.header.raw_value or item.header.value.encode()).decode()
        for item in mutation.set_headers
    }


def destinations(answer: pb.ProcessingResponse) -> list[str]:
    told = set_headers(answer)[DESTINATION]
    metadata = answer.dynamic_metadata.fields["envoy.lb"].struct_value.fields
    assert metadata[DESTINATION].string_value == told
    return told.split(",")


class Envoy:
    """One ext_proc stream."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def say(self, message: pb.ProcessingRequest | bytes) -> None:
        raw = message if isinstance(message, bytes) else message.SerializeToString()
        await asyncio.wait_for(self.call.write(raw), SECONDS)

    async def hear(self) -> pb.ProcessingResponse:
        raw = await asyncio.wait_for(self.call.read(), SECONDS)
        assert isinstance(raw, bytes), "the picker ended the stream"
        return pb.ProcessingResponse.FromString(raw)

    async def ask(self, message: pb.ProcessingRequest) -> pb.ProcessingResponse:
        await self.say(message)
        return await self.hear()

    async def end(self) -> None:
        await self.call.done_writing()
        assert await asyncio.wait_for(self.call.read(), SECONDS) is grpc.aio.EOF  # type: ignore[attr-defined]

    async def code(self) -> grpc.StatusCode:
        """How the stream ended, once all that was answered is read."""
        try:
            while isinstance(await asyncio.wait_for(self.call.read(), SECONDS), bytes):
                pass
        except grpc.aio.AioRpcError as error:
            return error.code()
        code: grpc.StatusCode = await asyncio.wait_for(self.call.code(), SECONDS)
        return code


class Picker:
    """A connection to a router's picker."""

    def __init__(self, channel: Any) -> None:  # bytes in and out, which grpc's stubs do not know
        self._channel = channel

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[Envoy]:
        """Cancelled when left, as Envoy does when its client goes away."""
        call = self._channel.stream_stream(f"/{SERVICE}/Process")()
        try:
            yield Envoy(call)
        finally:
            call.cancel()

    async def play(self, said: Sequence[bytes]) -> grpc.StatusCode:
        """Say all this, hear what comes, and tell how the stream ended."""

        async def saying() -> AsyncIterator[bytes]:
            for raw in said:
                yield raw

        call = self._channel.stream_stream(f"/{SERVICE}/Process")(saying())
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code()
        code: grpc.StatusCode = await call.code()
        return code

    async def health(self, service: str) -> int:
        call = self._channel.unary_unary(f"/{HEALTH}/Check")
        raw = await call(pb.HealthCheckRequest(service=service).SerializeToString())
        assert isinstance(raw, bytes)
        return pb.HealthCheckResponse.FromString(raw).status

    async def pick(self, body: bytes, **head: Any) -> pb.ProcessingResponse:
        """The answer to one buffered request, whose stream is cancelled then."""
        async with self.stream() as envoy:
            await envoy.ask(request_head(**head))
            return await envoy.ask(request_body(body))


@asynccontextmanager
async def picker_at(port: int | None) -> AsyncIterator[Picker]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Picker(channel)
