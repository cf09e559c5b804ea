"""What is answered to each message of one ext_proc stream, in every body mode. No I/O of its own.

    request NONE, STREAMED     the head is answered with the choice, the body passes unseen
    BUFFERED, BUFFERED_PARTIAL the head passes, the body is answered with the choice
    FULL_DUPLEX_STREAMED       head and body are answered once the body is whole

The response passes as it is; where Envoy shows it, it is only looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType

from emberkv_proto.v1 import envoy_pb2 as pb
from router.ext_proc.messages import (
    BodyMode,
    BodyModes,
    HeadChange,
    ProtocolError,
    changed,
    go_on,
    header_in,
    pieces,
    refusal,
    request_of,
    served_by,
    status_of,
    subset_of,
)
from router.ext_proc.passage import Passage
from router.ext_proc.picking import Asked, Picker, RefusedError
from router.http_message import Request, error_response

Answers = list[pb.ProcessingResponse]
DUPLEX = BodyMode.FULL_DUPLEX_STREAMED
WHOLE = frozenset({BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL, DUPLEX})


class Exchange:
    """One HTTP request through Envoy. Use as a context manager; leaving it ends the passage."""

    def __init__(
        self, picker: Picker, max_body_bytes: int, clock: Callable[[], float], modes: BodyModes
    ) -> None:
        self._picker = picker
        self._max_body_bytes = max_body_bytes
        self._clock = clock
        self._modes = modes
        self._held = ExitStack()
        self._asked: Asked | None = None
        self._body = bytearray()
        self._is_decided = False
        self._passage: Passage | None = None
        self.refused_status: int | None = None
        """Set once Envoy was told to answer by itself; nothing more will come."""

    def __enter__(self) -> Exchange:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._held.close()

    async def answer(self, message: pb.ProcessingRequest) -> Answers:
        """What to send for one message.

        Raises ProtocolError: it cannot come, or not now.
        """
        kind = message.WhichOneof("request")
        try:
            if kind == "request_headers":
                return await self._request_head(message)
            if kind == "request_body":
                return await self._request_body(message.request_body)
            if kind == "request_trailers":
                return await self._request_trailers()
        except RefusedError as refused:
            self._is_decided = True
            self.refused_status = refused.response.status
            return [refusal(refused.response)]
        if kind == "response_headers":
            return [self._response_head(message)]
        if kind == "response_body":
            return self._response_body(message.response_body)
        if kind == "response_trailers":
            self._ended()
            return [go_on("response_trailers")]
        raise ProtocolError("unknown_message", "a message of no kind that is known")

    # ---- the request ----

    async def _request_head(self, message: pb.ProcessingRequest) -> Answers:
        if self._asked is not None:
            raise ProtocolError("out_of_order", "request headers twice")
        heard = message.request_headers
        mode = self._modes.request
        is_whole = heard.end_of_stream or mode in WHOLE
        self._asked = Asked(request_of(heard), is_whole, subset_of(message))
        if heard.end_of_stream or mode not in WHOLE:
            change, _ = await self._pick(b"")
            return [changed("request_headers", change)]
        return [] if mode is DUPLEX else [go_on("request_headers")]

    async def _request_body(self, heard: pb.HttpBody) -> Answers:
        if self._asked is None:
            raise ProtocolError("out_of_order", "a request's body before its headers")
        mode = self._modes.request
        if mode not in WHOLE:
            return [go_on("request_body")]
        if self._is_decided:
            raise ProtocolError("out_of_order", "a request's body after its end")
        if len(self._body) + len(heard.body) > self._max_body_bytes:
            text = f"the body has more than {self._max_body_bytes} bytes (router.max_body_bytes)"
            raise RefusedError(error_response(413, text))
        self._body += heard.body
        if mode is DUPLEX:
            return await self._duplex(is_last=True) if heard.end_of_stream else []
        if mode is BodyMode.BUFFERED_PARTIAL and not heard.end_of_stream:
            self._asked = replace(self._asked, has_whole_body=False)
        change, body = await self._pick(bytes(self._body))
        return [changed("request_body", change, body)]

    async def _request_trailers(self) -> Answers:
        if self._asked is None:
            raise ProtocolError("out_of_order", "a request's trailers before its headers")
        before: Answers = []
        if self._modes.request is DUPLEX and not self._is_decided:
            before = await self._duplex(is_last=False)
        return [*before, go_on("request_trailers")]

    async def _duplex(self, *, is_last: bool) -> Answers:
        sent = bytes(self._body)
        change, body = await self._pick(sent)
        return [
            changed("request_headers", change),
            *pieces("request_body", sent if body is None else body, is_last=is_last),
        ]

    async def _pick(self, body: bytes) -> tuple[HeadChange, bytes | None]:
        assert self._asked is not None
        self._is_decided = True
        self._body = bytearray()
        request: Request = replace(self._asked.request, body=body)
        picked = await self._picker.pick(replace(self._asked, request=request), self._held)
        self._passage = picked.passage
        return picked.change, picked.body

    # ---- the response ----

    def _response_head(self, message: pb.ProcessingRequest) -> pb.ProcessingResponse:
        heard, passage = message.response_headers, self._passage
        if passage is None:
            return go_on("response_headers")
        now = self._clock()
        engine = self._picker.engine_at(served_by(message))
        if engine is not None:
            passage.served_by(engine, now)
        passage.answered(status_of(heard), header_in(heard, b"content-type"), now)
        if self._modes.response is BodyMode.NONE:
            passage.begun()
        if heard.end_of_stream:
            self._ended()
        added = (
            ("x-emberkv-engine", passage.engine.name.encode("latin-1", "replace")),
            ("x-emberkv-hit-tokens", b"%d" % passage.predicted_hit_tokens),
        )
        return changed("response_headers", HeadChange(added=added))

    def _response_body(self, heard: pb.HttpBody) -> Answers:
        if self._passage is not None:
            self._passage.piece(heard.body)
        if heard.end_of_stream:
            self._ended()
        if self._modes.response is DUPLEX:
            return pieces("response_body", heard.body, is_last=heard.end_of_stream)
        return [go_on("response_body")]

    def _ended(self) -> None:
        if self._passage is not None:
            self._passage.ended()
            self._passage = None
