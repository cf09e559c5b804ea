"""A request's JSON body, read as little as its routing needs: the raw bytes of each top field.

A long prompt is not taken apart: what its engine will parse anyway is only found here. So what
stands inside a field is judged by the engine; that the body is an object with these fields is
judged here. Where a field is asked for as a value, it is decoded then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, MutableMapping
from typing import Any

import msgspec

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_MISSING = object()


class BadBodyError(Exception):
    """The request's body is not a JSON object."""


class RequestBody(MutableMapping[str, Any]):
    """Top fields by name. Reading one decodes it; setting one keeps the value, not the bytes."""

    __slots__ = ("_fields", "_values")

    def __init__(self, fields: dict[str, bytes | msgspec.Raw]) -> None:
        self._fields = fields
        self._values: dict[str, Any] = {}

    @classmethod
    def of(cls, **values: Any) -> RequestBody:
        """A body made here."""
        body = cls({})
        for name, value in values.items():
            body[name] = value
        return body

    def raw(self, name: str) -> bytes | None:
        """The JSON of a field as it came; None where it is missing or null."""
        field = self._fields.get(name)
        if field is None:
            return None
        raw = field if type(field) is bytes else bytes(field)
        return None if raw == b"null" else raw

    def text(self, name: str) -> str:
        """A field that should be a text; empty where it is none. Mostly without the decoder."""
        raw = self.raw(name)
        if raw is None or raw[:1] != b'"':
            return ""
        if b"\\" not in raw:
            try:
                return raw[1:-1].decode()
            except UnicodeDecodeError as error:
                raise BadBodyError(f"the body's {name} is not JSON: {error}") from None
        return str(self[name])

    def __getitem__(self, name: str) -> Any:
        value = self._values.get(name, _MISSING)
        if value is _MISSING:
            try:
                value = json.loads(bytes(self._fields[name]))
            except (ValueError, RecursionError) as error:
                raise BadBodyError(f"the body's {name} is not JSON: {error}") from None
            self._values[name] = value
        return value

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self._fields else default

    def __setitem__(self, name: str, value: Any) -> None:
        self._values[name] = value
        self._fields[name] = json.dumps(value, separators=(",", ":")).encode()

    def __delitem__(self, name: str) -> None:
        del self._fields[name]
        self._values.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


def parse_body(raw: bytes) -> RequestBody:
    """Raises BadBodyError, with a text for the client."""
    try:
        return RequestBody(_decode(raw))  # type: ignore[arg-type]
    except (msgspec.DecodeError, RecursionError):
        return _parsed_whole(raw)


def _parsed_whole(raw: bytes) -> RequestBody:
    """What is JSON to Python though not to the RFC (NaN, UTF-16), and the words for what is not."""
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadBodyError(f"the body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise BadBodyError("the body must be a JSON object")
    return RequestBody.of(**values)
