"""Between ext_proc's messages and the router's values. Pure; checks what comes from the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from google.protobuf.message import DecodeError

from emberkv_proto.v1 import envoy_pb2 as pb
from router.http_message import Headers, Request, Response

DESTINATION = "x-gateway-destination-endpoint"
"""Where Envoy shall send the request: ip:port, or several in the order in which to try them."""
SUBSET = "x-gateway-destination-endpoint-subset"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SERVED = "x-gateway-destination-endpoint-served"
NAMESPACE = "envoy.lb"
FILTER = "envoy.filters.http.ext_proc"
UPSTREAM = "upstream.address"
PIECE_BYTES = 62_000
"""Of a body, in one message: Envoy's flow control is made for pieces below 64 KiB."""
MAX_SUBSET = 4096
MAX_HEADERS = 1024


class ProtocolError(Exception):
    """An Envoy said what no Envoy may say here. `kind` is the label of a counter."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class BodyMode(IntEnum):
    """How Envoy shows a body (ext_proc's BodySendMode)."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4


@dataclass(frozen=True, slots=True)
class BodyModes:
    request: BodyMode
    response: BodyMode


def read_message(raw: bytes) -> pb.ProcessingRequest:
    """Raises ProtocolError."""
    try:
        return pb.ProcessingRequest.FromString(raw)
    except DecodeError as error:
        raise ProtocolError("garbled", f"not a ProcessingRequest: {error}") from None


def body_modes(message: pb.ProcessingRequest) -> BodyModes:
    """How the bodies of this request will come; Envoy says it in the first message.

    Raises ProtocolError: by a mode that is none of ours.
    """
    told = message.protocol_config
    try:
        return BodyModes(BodyMode(told.request_body_mode), BodyMode(told.response_body_mode))
    except ValueError as error:
        raise ProtocolError("unknown_mode", f"body mode of ext_proc: {error}") from None


def request_of(heard: pb.HttpHeaders) -> Request:
    """The head of a request, as the router's own server would have read it; no body yet.

    Raises ProtocolError: a head without method or path, or out of bounds.
    """
    pseudo, headers = _split(heard.headers)
    method, target = pseudo.get(b":method"), pseudo.get(b":path")
    if not method or not target:
        raise ProtocolError("bad_head", "request headers without :method and :path")
    return Request(
        method.decode("latin-1"),
        target.partition(b"?")[0].decode("latin-1"),
        target,
        headers,
        b"",
        "1.1",
        True,
    )


def status_of(heard: pb.HttpHeaders) -> int:
    """Raises ProtocolError: response headers without a status."""
    pseudo, _ = _split(heard.headers)
    raw = pseudo.get(b":status", b"")
    if not raw.isdigit() or len(raw) != 3:
        raise ProtocolError("bad_head", f"response headers with status {raw!r}")
    return int(raw)


def header_in(heard: pb.HttpHeaders, name: bytes) -> bytes:
    """The first value of `name` (lower case); empty without one."""
    for header in heard.headers.headers:
        if header.key.lower().encode() == name:
            return _value(header)
    return b""


def subset_of(message: pb.ProcessingRequest) -> frozenset[str] | None:
    """The endpoints among which to choose, where Envoy names any; an empty set allows none.

    Raises ProtocolError: by what is no list of texts.
    """
    metadata = message.metadata_context.filter_metadata
    if SUBSET_NAMESPACE not in metadata:
        return None
    fields = metadata[SUBSET_NAMESPACE].fields
    if SUBSET not in fields:
        return None
    told = fields[SUBSET]
    if told.WhichOneof("kind") == "string_value":
        return frozenset(filter(None, map(str.strip, told.string_value.split(","))))
    if told.WhichOneof("kind") != "list_value" or len(told.list_value.values) > MAX_SUBSET:
        raise ProtocolError("bad_subset", f"{SUBSET} is no list of at most {MAX_SUBSET} endpoints")
    return frozenset(value.string_value for value in told.list_value.values)


def served_by(message: pb.ProcessingRequest) -> str:
    """The endpoint that answered, where Envoy tells; else empty."""
    metadata = message.metadata_context.filter_metadata
    for source, space, field in (
        (metadata, NAMESPACE, SERVED),
        (message.attributes, FILTER, UPSTREAM),
    ):
        if space in source and field in source[space].fields:
            return source[space].fields[field].string_value
    return ""


def go_on(kind: str) -> pb.ProcessingResponse:
    """Leave this part of the message as it is."""
    answer = pb.ProcessingResponse()
    getattr(answer, kind).SetInParent()
    return answer


@dataclass(frozen=True, slots=True)
class HeadChange:
    """What changes in a head. `endpoints`: where the request goes, in order; empty leaves it."""

    endpoints: Sequence[str] = ()
    added: Sequence[tuple[str, bytes]] = ()
    removed: Sequence[str] = ()


def changed(kind: str, change: HeadChange, body: bytes | None = None) -> pb.ProcessingResponse:
    """Answer headers or a buffered body; `body`, if any, takes its place."""
    added = list(change.added)
    if change.endpoints:
        added.append((DESTINATION, ",".join(change.endpoints).encode()))
    answer = go_on(kind)
    common = getattr(answer, kind).response
    common.header_mutation.set_headers.extend(_set(name, value) for name, value in added)
    common.header_mutation.remove_headers.extend(change.removed)
    if body is not None:
        common.body_mutation.body = body
    if change.endpoints:
        answer.dynamic_metadata.get_or_create_struct(NAMESPACE)[DESTINATION] = ",".join(
            change.endpoints
        )
    return answer


def pieces(kind: str, body: bytes, *, is_last: bool) -> list[pb.ProcessingResponse]:
    """A body for Envoy to send on in full duplex; `is_last`: nothing follows, trailers neither."""
    starts = range(0, max(1, len(body)), PIECE_BYTES)
    return [
        _piece(kind, body[start : start + PIECE_BYTES], is_last and start == starts[-1])
        for start in starts
    ]


def refusal(response: Response) -> pb.ProcessingResponse:
    """Envoy answers the client with this at once."""
    headers = [(b"content-type", response.content_type), *response.headers]
    return pb.ProcessingResponse(
        immediate_response=pb.ImmediateResponse(
            status=pb.HttpStatus(code=response.status),
            headers=pb.HeaderMutation(
                set_headers=[_set(name.decode("latin-1"), value) for name, value in headers]
            ),
            body=response.body,
            details="emberkv_router",
        )
    )


def _piece(kind: str, body: bytes, is_last: bool) -> pb.ProcessingResponse:
    answer = pb.ProcessingResponse()
    streamed = getattr(answer, kind).response.body_mutation.streamed_response
    streamed.body, streamed.end_of_stream = body, is_last
    return answer


def _set(name: str, value: bytes) -> pb.HeaderValueOption:
    return pb.HeaderValueOption(
        header=pb.HeaderValue(key=name, raw_value=value),
        append_action=pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )


def _split(heard: pb.HeaderMap) -> tuple[dict[bytes, bytes], Headers]:
    """Pseudo-headers, the first of each, and the others in order."""
    if len(heard.headers) > MAX_HEADERS:
        raise ProtocolError("bad_head", f"more than {MAX_HEADERS} headers")
    pseudo: dict[bytes, bytes] = {}
    headers: Headers = []
    for header in heard.headers:
        name = header.key.lower().encode()
        if name.startswith(b":"):
            pseudo.setdefault(name, _value(header))
        else:
            headers.append((name, _value(header)))
    return pseudo, headers


def _value(header: pb.HeaderValue) -> bytes:
    """Envoy fills one of the two, by its version."""
    return header.raw_value or header.value.encode()
