"""What users of the SDK may rely on, as text: `python -m tests.helpers.public_api` prints it."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import client_sdk
from emberkv_proto import errors, hashing, layout, types

MODULES = (hashing, layout, types, errors)
"""Beside `client_sdk`: what examples and engines import from the contract."""


def public_api() -> str:
    lines = [line for name in client_sdk.__all__ for line in _told(client_sdk, name)]
    for module in MODULES:
        names = [name for name, value in vars(module).items() if _is_own(module, name, value)]
        lines += [line for name in sorted(names) for line in _told(module, name)]
    return "\n".join(lines) + "\n"


def _is_own(module: ModuleType, name: str, value: Any) -> bool:
    is_defined_here = getattr(value, "__module__", None) == module.__name__
    return (
        is_defined_here and not name.startswith("_") and (inspect.isclass(value) or callable(value))
    )


def _told(module: ModuleType, name: str) -> Iterator[str]:
    value, path = getattr(module, name), f"{module.__name__}.{name}"
    if hasattr(value, "__supertype__"):
        yield f"{path}: {value.__supertype__.__name__}"
        return
    if not inspect.isclass(value):
        yield f"{path}{_signature(value)}"
        return
    if issubclass(value, enum.Enum):
        yield f"{path}: {', '.join(member.name for member in value)}"
        return
    init = _signature(value.__init__).removesuffix(" -> None") if _has_init(value) else ""
    yield f"{path}{'' if _is_inner(init) else init}"
    for field in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
        if not field.name.startswith("_"):
            yield f"  {field.name}: {field.type}"
    members = {
        name: found
        for owner in reversed(value.__mro__)
        if owner.__module__.startswith(("client_sdk", "emberkv_proto"))
        for name, found in vars(owner).items()
    }
    for member, found in sorted(members.items()):
        if member.startswith("_"):
            continue
        if isinstance(found, property):
            yield f"  {member}: {_signature(found.fget).partition(' -> ')[2]}"
        elif inspect.isfunction(found) and not _is_inner(_signature(found)):
            prefix = "async " if inspect.iscoroutinefunction(found) else ""
            yield f"  {prefix}{member}{_signature(found)}"
        elif isinstance(found, staticmethod | classmethod):
            yield f"  static {member}{_signature(found.__func__)}"


def _has_init(value: type) -> bool:
    return not dataclasses.is_dataclass(value) and inspect.isfunction(vars(value).get("__init__"))


def _is_inner(signature: str) -> bool:
    """Whether it takes what only the SDK has."""
    return re.search(r"store_pb2|SessionState|AsyncSession", signature) is not None


def _signature(function: Any) -> str:
    """As it is written, but for quotes, which depend on where it is written."""
    return str(inspect.signature(function)).replace("'", "")


if __name__ == "__main__":
    print(public_api(), end="")
