"""The router's key file: who may call, as which tenant, within which limits.

A key is `ek-<id>-<secret>`; the file keeps its id and a keyed BLAKE3 of the secret under a salt of
its own, never the secret. Secrets are 256 random bits, so a slow hash would add nothing. The file
is JSON, written whole, mode 600. What touches no file is pure.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal

import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from emberkv_proto.errors import ConfigError, InvalidRequestError

MAX_FILE_BYTES = 16 * 1024 * 1024
MAX_KEY_BYTES = 256
PREFIX = "ek"
TENANT_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
PerMinute = Annotated[int, Field(ge=1)]


class TenantLimits(BaseModel):
    """What a tenant may do, over all its keys. None is no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None
    """Of prompts, and of answers whose usage tells."""
    concurrent_requests: Annotated[int, Field(ge=1)] | None = None
    models: tuple[str, ...] | None = None
    highest_priority: Literal["high", "normal", "low"] = "high"
    """A request that asks for a higher class gets this one."""


class StoredKey(BaseModel):
    """One key as the file keeps it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key_id: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    tenant: Annotated[str, Field(pattern=TENANT_PATTERN)]
    salt: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    created: str
    revoked: str | None = None


class KeyFile(BaseModel):
    """The whole file. A tenant without limits of its own has none."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    keys: tuple[StoredKey, ...] = ()
    tenants: Mapping[str, TenantLimits] = Field(default_factory=dict)

    def with_key(self, key: StoredKey, limits: TenantLimits | None) -> KeyFile:
        """The file with one key more; `limits` replace the tenant's."""
        tenants = dict(self.tenants)
        if limits is not None:
            tenants[key.tenant] = limits
        return KeyFile(keys=(*self.keys, key), tenants=tenants)

    def without_key(self, key_id: str, when: str) -> KeyFile:
        """The file with a key revoked; its line stays, so that its id is never given again.

        Raises:
            InvalidRequestError: there is no such key, or it is revoked already.
        """
        if not any(key.key_id == key_id and key.revoked is None for key in self.keys):
            raise InvalidRequestError(f"no key {key_id!r} that could be revoked")
        keys = tuple(
            key.model_copy(update={"revoked": when}) if key.key_id == key_id else key
            for key in self.keys
        )
        return KeyFile(keys=keys, tenants=self.tenants)


class NewKey(BaseModel):
    """A key just made: what the file keeps, and the text that is shown once."""

    model_config = ConfigDict(frozen=True)

    stored: StoredKey
    text: str


def make_key(tenant: str, when: str) -> NewKey:
    """A new key of chance.

    Raises:
        InvalidRequestError: the tenant's name is none.
    """
    key_id, secret, salt = secrets.token_hex(8), secrets.token_urlsafe(32), os.urandom(32)
    try:
        stored = StoredKey(
            key_id=key_id,
            tenant=tenant,
            salt=salt.hex(),
            digest=_digest(secret.encode(), salt).hex(),
            created=when,
        )
    except ValidationError:
        raise InvalidRequestError(
            f"tenant {tenant!r}: wanted up to 64 letters, digits, dots, dashes and underscores"
        ) from None
    return NewKey(stored=stored, text=f"{PREFIX}-{key_id}-{secret}")


class KeyRing:
    """Finds the tenant of a key. Lookups are by id; the secret is compared in constant time."""

    def __init__(self, file: KeyFile) -> None:
        self.file = file
        self._by_id = {key.key_id: key for key in file.keys if key.revoked is None}

    def tenant_of(self, text: bytes) -> str | None:
        """None for a key that is malformed, unknown, revoked or wrong; which, nobody learns."""
        prefix, _, rest = text.partition(b"-")
        key_id, _, secret = rest.partition(b"-")
        if len(text) > MAX_KEY_BYTES or prefix != PREFIX.encode():
            return None
        stored = self._by_id.get(key_id.decode("latin-1"))
        if stored is None:
            return None
        digest = _digest(secret, bytes.fromhex(stored.salt))
        return stored.tenant if hmac.compare_digest(digest, bytes.fromhex(stored.digest)) else None

    def limits_of(self, tenant: str) -> TenantLimits:
        return self.file.tenants.get(tenant, NO_LIMITS)


NO_LIMITS = TenantLimits()


def _digest(secret: bytes, salt: bytes) -> bytes:
    return blake3.blake3(secret, key=salt).digest()


def read_keys(path: Path) -> KeyFile:
    """The keys of a file.

    Raises ConfigError, which shows nothing of it: unreadable, writable by others, or no key file.
    """
    what = f"router.key_file {path}"
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            status = os.fstat(file.fileno())
            content = file.read(MAX_FILE_BYTES + 1) if stat.S_ISREG(status.st_mode) else b""
    except OSError as error:
        raise ConfigError(f"{what} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode) or len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{what} is no file of at most {MAX_FILE_BYTES} bytes")
    if status.st_mode & 0o022:
        raise ConfigError(f"{what} can be written by others; chmod 600")
    try:
        found = KeyFile.model_validate_json(content)
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"]) or "the file"
        raise ConfigError(f"{what}: {where} is not what a key file has there") from None
    if len({key.key_id for key in found.keys}) != len(found.keys):
        raise ConfigError(f"{what}: a key id appears twice")
    return found


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe without a writer must not hold us up


def edit_keys(path: Path, change: Callable[[KeyFile], KeyFile]) -> None:
    """Read, change and write; one at a time, a missing file is an empty one.

    Raises what `read_keys` and `change` raise; then nothing was written.
    """
    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"directory {path.parent} cannot be used: {error.strerror}") from None
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        write_keys(path, change(read_keys(path) if path.exists() else KeyFile()))
        os.fsync(directory)
    finally:
        os.close(directory)


def write_keys(path: Path, file: KeyFile) -> None:
    """Write the whole file beside it and move it there, readable by its owner alone."""
    # Not by process id: in containers they repeat, and one that died here left its file.
    fd, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    partial = Path(name)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as out:
            json.dump(file.model_dump(mode="json"), out, indent=1)
            out.flush()
            os.fsync(out.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
