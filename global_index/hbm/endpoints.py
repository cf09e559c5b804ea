"""Where engines publish: only what a stranger may make the index connect to."""

from __future__ import annotations

import re

from emberkv_proto.errors import InvalidRequestError

MAX_CHARS = 300
_TCP = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]*]+):(\d{1,5})")


def check_endpoint(text: str) -> str:
    """`text`, if it is tcp://host:port with one host. Raises InvalidRequestError otherwise."""
    match = _TCP.fullmatch(text) if len(text) <= MAX_CHARS else None
    if match is None or not 0 < int(match[2]) <= 65535:
        raise InvalidRequestError(f"events endpoint {text[:MAX_CHARS]!r} is not tcp://host:port")
    return text
