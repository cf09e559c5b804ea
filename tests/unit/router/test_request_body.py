"""Bodies read field by field say what they would say read whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.request_body import BadBodyError, RequestBody, parse_body

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(st.dictionaries(st.text(max_size=6), values, max_size=6), st.booleans())
def test_fields_have_the_values_of_the_whole(fields: dict[str, Any], is_ascii: bool) -> None:
    raw = json.dumps(fields, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    body = parse_body(raw)
    assert dict(body) == json.loads(raw)
    assert json.loads(json.dumps({**body})) == json.loads(raw)


@given(st.binary(max_size=60))
def test_whatever_comes_is_a_body_or_a_refusal(raw: bytes) -> None:
    try:
        body = parse_body(raw)
        for name in body:
            body.get(name)
    except BadBodyError:
        pass


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[1]",
        b"{",
        b'{"a":1} x',
        b'{"a" 1}',
        b'{"a":01}',
        b"[" * 100_000,
        b'{"a":' + b"[" * 100_000,
        b'{"\xff":1}',
    ],
)
def test_what_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(BadBodyError):
        parse_body(raw)


def test_what_only_python_takes_for_json_is_read_too() -> None:
    assert parse_body(b'{"a": NaN, "model": "m"}')["model"] == "m"
    assert parse_body('{"model": "m"}'.encode("utf-16"))["model"] == "m"


def test_the_last_of_two_fields_counts_and_escaped_names_are_names() -> None:
    assert parse_body(b'{"a": 1, "a": 2}')["a"] == 2
    assert parse_body(b'{"cache\\u005fsalt": "s"}')["cache_salt"] == "s"


def test_a_field_that_is_set_is_read_back_and_written() -> None:
    body = parse_body(b'{"priority": -3, "prompt": "x"}')
    body["priority"] = 0
    assert body["priority"] == 0
    assert body.raw("priority") == b"0"
    assert json.loads(json.dumps({**body, "n": 1})) == {"priority": 0, "prompt": "x", "n": 1}
    del body["prompt"]
    assert "prompt" not in body
    assert len(RequestBody.of(a=None)) == 1
    assert RequestBody.of(a=None).raw("a") is None
