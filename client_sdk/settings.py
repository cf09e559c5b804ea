"""One YAML file, environment and flags into one checked settings object.

Precedence, weakest first: defaults, file, environment (`EMBERKV_SECTION__KEY`), flags
(`section.key=value`). An unknown key is refused by name, with the nearest valid one.
Server packages declare their sections as `Section` subclasses; a process reads the sections it
knows and leaves the other known ones alone, so one file serves every part.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from emberkv_proto.errors import ConfigError

ENV_PREFIX = "EMBERKV_"
KNOWN_SECTIONS = (
    "node",
    "daemon",
    "dram",
    "ssd",
    "events",
    "resp",
    "transport",
    "peers",
    "tenants",
    "index",
    "router",
    "engine",
    "cluster",
)


class Section(BaseModel):
    """One section of the file. Frozen, strict on unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Settings(BaseModel):
    """A process's settings: one field per section it reads."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of a process's certificate (with its chain), its private key, and the CAs it trusts."""

    cert: Path
    key: Path
    ca: Path
    server_name: str = ""
    """Must stand in the certificates of those it calls; empty: the host it calls them by."""


def tls_files_of(
    cert: Path | None, key: Path | None, ca: Path | None, server_name: str = ""
) -> TlsFiles | None:
    """All three or none. Raises ValueError, for a section's validator to pass on."""
    if cert is not None and key is not None and ca is not None:
        return TlsFiles(cert, key, ca, server_name)
    if cert is None and key is None and ca is None and not server_name:
        return None
    raise ValueError(
        "tls_cert_file, tls_key_file and tls_ca_file go together: set all, or none and no"
        " tls_server_name"
    )


S = TypeVar("S", bound=Settings)
Origins = dict[str, str]


def load_settings(
    kind: type[S],
    path: Path | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> S:
    """Read, merge and check. Raises ConfigError with the key, its origin and the fix."""
    return load_with_origins(kind, path, overrides, environ)[0]


def load_with_origins(
    kind: type[S],
    path: Path | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> tuple[S, Origins]:
    """As `load_settings`, and for each key that was set, where it came from."""
    values: dict[str, dict[str, Any]] = {}
    origins: Origins = {}
    if path is not None:
        for section, keys in _read_file(path).items():
            values.setdefault(section, {})  # an unknown name is refused, even with nothing in it
            for key, value in keys.items():
                _put(values, origins, section, key, value, f"file {path}")
    for section, key, text, origin in _from_environment(os.environ if environ is None else environ):
        _put(values, origins, section, key, _value(kind, section, key, text), origin)
    for override in overrides:
        name, equals, text = override.partition("=")
        section, dot, key = name.partition(".")
        if not equals or not dot:
            raise ConfigError(f"--set {override!r}: wanted section.key=value")
        _put(values, origins, section, key, _value(kind, section, key, text), f"--set {name}")
    _refuse_missing_underscore(kind, os.environ if environ is None else environ)
    own = {section: keys for section, keys in values.items() if section in kind.model_fields}
    _check_names(kind, values, origins)
    try:
        return kind.model_validate(own), origins
    except ValidationError as error:
        raise ConfigError(_describe(error, origins)) from None


def _read_file(path: Path) -> dict[str, dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from None
    try:
        loaded = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"config file {path} is not YAML: {error}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"config file {path}: the top level must be sections, not a list or text")
    for section, keys in loaded.items():
        if keys is not None and not isinstance(keys, dict):
            raise ConfigError(f"config file {path}: section {section!r} must hold key: value lines")
    return {str(section): dict(keys or {}) for section, keys in loaded.items()}


def _from_environment(environ: Mapping[str, str]) -> list[tuple[str, str, str, str]]:
    found = []
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX) and "__" in name:
            section, _, key = name[len(ENV_PREFIX) :].lower().partition("__")
            found.append((section, key, environ[name], f"environment {name}"))
    return found


def _refuse_missing_underscore(kind: type[Settings], environ: Mapping[str, str]) -> None:
    """EMBERKV_SECTION_KEY, which would be silently without effect, is refused.

    Kubernetes sets EMBERKV_ROUTER_PORT=tcp://... in the pods beside a service of that name; such
    an address is left alone.
    """
    for section, field in kind.model_fields.items():
        for key in getattr(field.annotation, "model_fields", ()):
            wrong = f"{ENV_PREFIX}{section}_{key}".upper()
            if wrong in environ and not environ[wrong].startswith(("tcp://", "udp://")):
                right = f"{ENV_PREFIX}{section}__{key}".upper()
                raise ConfigError(f"environment {wrong} has no effect; did you mean {right!r}?")


def _value(kind: type[Settings], section: str, key: str, text: str) -> Any:
    """What a text stands for. A key that is text stays so: a node may be called 17, or "on"."""
    value = _scalar(text)
    if isinstance(value, str):
        return value
    field = kind.model_fields.get(section)
    keys = getattr(field.annotation, "model_fields", {}) if field is not None else {}
    return text if key in keys and keys[key].annotation is str else value


def _scalar(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _put(
    values: dict[str, dict[str, Any]],
    origins: Origins,
    section: str,
    key: str,
    value: Any,
    origin: str,
) -> None:
    values.setdefault(section, {})[key] = value
    origins[f"{section}.{key}"] = origin


def _check_names(kind: type[Settings], values: dict[str, dict[str, Any]], origins: Origins) -> None:
    for section, keys in values.items():
        if section not in KNOWN_SECTIONS:
            origin = next((o for k, o in origins.items() if k.startswith(f"{section}.")), "file")
            raise ConfigError(
                f"unknown section {section!r} ({origin}){_nearest(section, KNOWN_SECTIONS)}"
            )
        field = kind.model_fields.get(section)
        if field is None or not isinstance(field.annotation, type):
            continue
        known = tuple(field.annotation.model_fields)
        for key in keys:
            if key not in known:
                raise ConfigError(
                    f"unknown key {section}.{key} ({origins[f'{section}.{key}']})"
                    f"{_nearest(key, known)}"
                )


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


def _describe(error: ValidationError, origins: Origins) -> str:
    lines = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        if len(problem["loc"]) < 2:  # of a section as a whole; its words name the keys
            lines.append(f"{key}: {problem['msg'].removeprefix('Value error, ')}")
            continue
        origin = origins.get(".".join(str(part) for part in problem["loc"][:2]), "default")
        lines.append(f"{key}: {problem['msg']} (got {_shown(problem['input'])}, from {origin})")
    return "; ".join(lines)


def _shown(value: object) -> str:
    """A value for an error message; a URL that may hold a password is left out."""
    text = repr(value)
    return "a URL with a password" if "://" in text and "@" in text else text
