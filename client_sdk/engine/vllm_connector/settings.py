"""Settings of the connector, from `kv_connector_extra_config`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from emberkv_proto.errors import ConfigError

ROLES = ("both", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """All have defaults; `block_tokens` and `weights_id` are read by `identity`."""

    socket_path: str = "/run/emberkv/daemon.sock"
    """The node's store daemon."""
    engine_url: str = ""
    """Where routers reach this engine, e.g. http://10.0.0.5:8000; empty: it is not announced."""
    role: str = "both"
    """What routers send here: both, prefill or decode."""
    load_async: bool = True
    """Load between steps, while other requests compute; False: before each layer of the step."""
    load_seconds: float = 5.0
    """How long a load waits for blocks from SSD or peers; what is late is computed."""
    peer_seconds: float = 0.5
    """How long a request waits for what other nodes have, before it is admitted without."""
    handover_seconds: float = 1.0
    """How long the next block of a prompt that another engine computed is waited for."""
    timeout_seconds: float = 0.25
    """What one call of the scheduler to the daemon may cost."""
    verify: bool = True
    """Compare loaded blocks with their checksums."""
    block_tokens: int | None = None
    """Tokens of a block; a multiple of the engine's block size, which is the default."""
    weights_id: str | None = None
    """Names the weights, where neither a commit nor a local directory does."""

    @staticmethod
    def of(extra: Mapping[str, Any]) -> ConnectorSettings:
        """Raises ConfigError for an unknown key, naming the nearest, or a value of a wrong kind."""
        known = {field.name for field in fields(ConnectorSettings)}
        for name, value in extra.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]}?" if near else f"; known: {sorted(known)}"
                raise ConfigError(f"kv_connector_extra_config: {name} is unknown{hint}")
            wanted = _KINDS[name]
            if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
                kinds = " or ".join(kind.__name__ for kind in wanted)
                raise ConfigError(f"kv_connector_extra_config: {name} must be {kinds}")
        settings = ConnectorSettings(**extra)
        if settings.role not in ROLES:
            raise ConfigError(
                f"kv_connector_extra_config: role {settings.role!r} is none of {', '.join(ROLES)}"
            )
        return settings


_KINDS: dict[str, tuple[type, ...]] = {
    "socket_path": (str,),
    "engine_url": (str,),
    "role": (str,),
    "load_async": (bool,),
    "load_seconds": (float, int),
    "peer_seconds": (float, int),
    "handover_seconds": (float, int),
    "timeout_seconds": (float, int),
    "verify": (bool,),
    "block_tokens": (int,),
    "weights_id": (str,),
}
