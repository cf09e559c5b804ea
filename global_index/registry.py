"""Sources of events that came by HTTP, not by settings; forgotten when the process ends."""

from __future__ import annotations

from dataclasses import dataclass

from emberkv_proto.errors import UnavailableError
from emberkv_proto.types import EngineInfo, NodeId

MAX_REGISTERED = 4096


@dataclass(frozen=True, slots=True)
class RankKey:
    """An engine's rank, as callers name it."""

    instance_id: str
    dp_rank: int


class Registry:
    """Registered engines and daemons. Registering one again replaces it."""

    def __init__(self) -> None:
        self._engines: dict[RankKey, tuple[NodeId, EngineInfo]] = {}
        self._daemons: set[str] = set()

    def add_engine(self, node_id: NodeId, info: EngineInfo) -> None:
        """Raises UnavailableError when there are too many."""
        key = RankKey(info.engine_id, info.dp_rank)
        self._make_room(is_known=key in self._engines)
        self._engines[key] = (node_id, info)

    def remove_engine(self, instance_id: str, dp_rank: int | None) -> list[RankKey]:
        """Forget a rank, or all of the engine; who was forgotten."""
        gone = [
            key
            for key in self._engines
            if key.instance_id == instance_id and dp_rank in (None, key.dp_rank)
        ]
        for key in gone:
            del self._engines[key]
        return gone

    def engines(self) -> list[tuple[NodeId, EngineInfo]]:
        return list(self._engines.values())

    def add_daemon(self, address: str) -> None:
        """Raises UnavailableError when there are too many."""
        self._make_room(is_known=address in self._daemons)
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
        for key, (_, info) in self._engines.items():
            assert key == RankKey(info.engine_id, info.dp_rank)

    def _make_room(self, *, is_known: bool) -> None:
        if not is_known and len(self._engines) + len(self._daemons) >= MAX_REGISTERED:
            raise UnavailableError(f"{MAX_REGISTERED} sources of events are registered already")


