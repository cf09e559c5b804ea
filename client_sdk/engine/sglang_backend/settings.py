"""Settings of the backend, from `--hicache-storage-backend-extra-config`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from emberkv_proto.errors import ConfigError

SGLANG_KEYS = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})
"""What SGLang itself reads there, and leaves for us to see."""


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """All have defaults; `weights_id` is read by `identity`."""

    socket_path: str = "/run/emberkv/daemon.sock"
    """The node's store daemon."""
    engine_url: str = ""
    """Where routers reach this engine, e.g. http://10.0.0.6:30000; empty: it is not announced."""
    load_seconds: float = 5.0
    """How long a batch of pages waits for blocks on SSD or peers; what is late is computed."""
    peer_seconds: float = 0.5
    """How long a lookup waits for what other nodes have; 0: only this node's blocks count."""
    timeout_seconds: float = 1.0
    """What one call to the daemon may cost."""
    verify: bool = True
    """Compare loaded blocks with their checksums."""
    weights_id: str | None = None
    """Names the weights, where neither a commit nor a local directory does."""

    @staticmethod
    def of(extra: Mapping[str, Any]) -> BackendSettings:
        """Raises ConfigError for an unknown key, naming the nearest, or a value of a wrong kind."""
        known = {field.name for field in fields(BackendSettings)}
        own = {name: value for name, value in extra.items() if name not in SGLANG_KEYS}
        for name, value in own.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]}?" if near else f"; known: {sorted(known)}"
                raise ConfigError(f"hicache-storage-backend-extra-config: {name} is unknown{hint}")
            wanted = _KINDS[name]
            if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
                kinds = " or ".join(kind.__name__ for kind in wanted)
                raise ConfigError(f"hicache-storage-backend-extra-config: {name} must be {kinds}")
            if isinstance(value, float | int) and not 0 <= value <= MAX_SECONDS:
                raise ConfigError(
                    f"hicache-storage-backend-extra-config: {name} {value} is not in"
                    f" 0..{MAX_SECONDS:g}"
                )
        return BackendSettings(**own)


MAX_SECONDS = 600.0
_KINDS: dict[str, tuple[type, ...]] = {
    "socket_path": (str,),
    "engine_url": (str,),
    "load_seconds": (float, int),
    "peer_seconds": (float, int),
    "timeout_seconds": (float, int),
    "verify": (bool,),
    "weights_id": (str,),
}
