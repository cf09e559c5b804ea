"""The tree of errors, and its way over the wire."""

from __future__ import annotations

import pytest

from emberkv_proto import errors
from emberkv_proto.errors import ERROR_TYPES, EmberError, UnavailableError, error_from_wire


@pytest.mark.parametrize("name", sorted(ERROR_TYPES))
def test_each_error_comes_back_as_itself(name: str) -> None:
    rebuilt = error_from_wire(name, "what happened")
    assert type(rebuilt) is getattr(errors, name)
    assert str(rebuilt) == "what happened"
    assert isinstance(rebuilt, EmberError)


@pytest.mark.parametrize("name", ["", "FromTheFutureError", "OSError", "SystemExit", "__class__"])
def test_a_name_that_is_not_ours_becomes_the_base_error(name: str) -> None:
    assert type(error_from_wire(name, "x")) is EmberError


def test_tree_and_codes_are_those_of_the_module_docstring() -> None:
    drawn = {}
    for line in (errors.__doc__ or "").splitlines():
        words = line.replace("│", " ").replace("├──", " ").replace("└──", " ").split()
        if words and words[0].endswith("Error"):
            drawn[words[0]] = int(words[1]) if len(words) > 1 and words[1].isdigit() else None
    assert set(drawn) == set(ERROR_TYPES)
    for name, code in drawn.items():
        if code is not None:
            assert ERROR_TYPES[name].code == code, name


def test_codes_are_grpc_failures_and_children_keep_their_parents() -> None:
    for kind in ERROR_TYPES.values():
        assert 1 <= kind.code <= 16
        if kind.__base__ in ERROR_TYPES.values() and kind.__base__ is not EmberError:
            assert kind.code == kind.__base__.code  # type: ignore[attr-defined]
    assert issubclass(errors.DrainingError, UnavailableError)
