"""Sources of events that came by HTTP, not by settings; forgotten when the process ends."""

from __future__ import annotations

from emberkv_proto.errors import UnavailableError
from emberkv_proto.types import EngineInfo, NodeId
from global_index.hbm.engines import EngineKey

MAX_REGISTERED = 4096


class Registry:
    """Registered engines and daemons. A rank that is registered again is replaced."""

    def __init__(self) -> None:
        self._engines: dict[EngineKey, EngineInfo] = {}
        self._daemons: set[str] = set()

    def add_engine(self, node_id: NodeId, info: EngineInfo) -> None:
        """Raises UnavailableError when there are too many."""
        key = EngineKey(node_id, info.engine_id, info.dp_rank)
        if key not in self._engines:
            self._make_room()
        self._engines[key] = info

    def remove_engine(self, engine_id: str, dp_rank: int | None) -> list[EngineKey]:
        """Forget a rank, or all of the engine's; who was forgotten."""
        gone = [
            key
            for key in self._engines
            if key.engine_id == engine_id and dp_rank in (None, key.dp_rank)
        ]
        for key in gone:
            del self._engines[key]
        return gone

    def engines(self) -> list[tuple[NodeId, EngineInfo]]:
        return [(key.node_id, info) for key, info in self._engines.items()]

    def add_daemon(self, address: str) -> None:
        """Raises UnavailableError when there are too many."""
        if address not in self._daemons:
            self._make_room()
        self._daemons.add(address)

    def remove_daemon(self, address: str) -> bool:
        """False when it was not registered."""
        was_there = address in self._daemons
        self._daemons.discard(address)
        return was_there

    def daemons(self) -> list[str]:
        return sorted(self._daemons)

    def check_integrity(self) -> None:
        assert len(self._engines) + len(self._daemons) <= MAX_REGISTERED
        for key, info in self._engines.items():
            assert (key.engine_id, key.dp_rank) == (info.engine_id, info.dp_rank)

    def _make_room(self) -> None:
        if len(self._engines) + len(self._daemons) >= MAX_REGISTERED:
            raise UnavailableError(f"{MAX_REGISTERED} sources of events are registered already")
