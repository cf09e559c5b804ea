"""Settings of the index in Redis: keys `index.redis_*`. Times in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator

from client_sdk.settings import Section
from emberkv_proto.errors import ConfigError

_SCHEMES = ("redis", "rediss", "unix")
Seconds = Annotated[float, Field(gt=0)]


class RedisKeys(Section):
    redis_url: str = ""
    """redis://host:port, rediss:// for TLS, unix:///path. Empty: this process follows all daemons
    itself. A Cluster is recognised; any of its nodes can be named."""
    redis_username: str = ""
    redis_password: SecretStr = SecretStr("")
    """Better given by EMBERKV_INDEX__REDIS_PASSWORD or the file than by a configuration file."""
    redis_password_file: Path | None = None
    redis_ca_file: Path | None = None
    """Whom rediss:// trusts, where the system's certificates do not do."""
    redis_prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,32}$")] = "ek"
    """Of all key names, so that several clusters can share a Redis."""
    redis_query_seconds: Seconds = 0.02
    """A query that Redis has not answered by then is answered from this process's rows alone."""
    redis_lease_seconds: Annotated[float, Field(ge=0.3)] = 3.0
    """After a writer's silence of this length another process takes its daemons over."""
    redis_queue_rows: Annotated[int, Field(ge=1024)] = 1 << 20
    """Changes that may wait to be written; beyond it a node's rows are compared instead."""
    redis_audit_seconds: Seconds = 300.0
    """How often each node's rows in Redis are counted against this process's."""
    redis_forget_seconds: Annotated[float, Field(ge=1)] = 3600.0
    """A node that no process has followed for so long is taken out of Redis; its number is free."""
    redis_away: Literal["follow_all", "follow_own"] = "follow_all"
    """While Redis is away for longer than a lease: follow every daemon, or only one's own."""

    @field_validator("redis_url")
    @classmethod
    def _url(cls, url: str) -> str:
        if not url:
            return url
        parts = urlsplit(url)
        if parts.scheme not in _SCHEMES:
            raise ValueError(f"wanted one of {', '.join(f'{s}://' for s in _SCHEMES)}")
        if parts.username or parts.password:
            raise ValueError("a password does not belong into the URL: use redis_password_file")
        if parts.scheme != "unix" and not parts.hostname:
            raise ValueError("wanted redis://host:port")
        return url

    def password(self) -> str:
        """What Redis asks for; empty when it asks for nothing.

        Raises:
            ConfigError: the file cannot be read.
        """
        if self.redis_password_file is None:
            return self.redis_password.get_secret_value()
        try:
            return self.redis_password_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"index.redis_password_file: {error}") from None
