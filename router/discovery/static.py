"""Engines named in the settings."""

from __future__ import annotations

from collections.abc import Iterable

from router.config import StaticEngine
from router.engines import Engine, EngineTable


def drop_static_engines(table: EngineTable, engines: Iterable[StaticEngine]) -> None:
    """The file names these no longer: those known from nowhere else go at once.

    Requests that they are answering go on.
    """
    for entry in engines:
        engine = table.get(entry.url)
        if engine is not None and not engine.is_announced and not engine.engine_id:
            table.remove(engine.url)


def add_static_engines(table: EngineTable, engines: Iterable[StaticEngine], now: float) -> None:
    """Put the engines of the file into the table. They are never forgotten."""
    for entry in engines:
        engine = table.add(entry.url, now)
        engine.is_static = True
        _describe(engine, entry)
    table.changed()


def _describe(engine: Engine, entry: StaticEngine) -> None:
    if entry.node_id:
        engine.node_id = entry.node_id
    if entry.model:
        engine.model = entry.model
