"""How our servers log: one line an event, as text for people or as JSON for a collector.

A log call may name its facts with `extra={"session": 7}`; they become fields of the JSON line. What
holds for the whole process (node, incarnation) is given once, with `describe_process`. Prompts,
token ids and payloads are never logged, nor secrets.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Literal, TextIO

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""What every record has; the rest came by `extra`."""


@dataclass(frozen=True, slots=True)
class LogStyle:
    level: LogLevel = "info"
    format: LogFormat = "text"


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON: time (UTC), level, logger, message, then the event's fields."""

    def __init__(self, process: Mapping[str, Any]) -> None:
        """`process`: fields that every line carries, read at each."""
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        facts = {key: value for key, value in vars(record).items() if key not in _OWN}
        line |= {k: v for k, v in {**self._process, **facts}.items() if k not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(style: LogStyle) -> None:
    """Set how the process logs. May be called again while it runs: a new style replaces the old."""
    root = logging.getLogger()
    root.setLevel(style.level.upper())
    handler = _handler()
    if handler is None:
        handler = _ProcessHandler()
        root.addHandler(handler)
    formatter = JsonFormatter(handler.fields) if style.format == "json" else logging.Formatter(TEXT)
    handler.setFormatter(formatter)


def describe_process(**fields: str | int) -> None:
    """Give fields to every JSON line from now on. Without `configure` there is nothing to do."""
    handler = _handler()
    if handler is not None:
        handler.fields.update(fields)


def unconfigure() -> None:
    """Take back what `configure` set up, the level excepted."""
    handler = _handler()
    if handler is not None:
        logging.getLogger().removeHandler(handler)
        handler.close()


class _ProcessHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to whatever standard error is at the time."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.fields: dict[str, Any] = {}

    @property
    def stream(self) -> TextIO:
        return sys.stderr


def _handler() -> _ProcessHandler | None:
    """Ours among those that others may have put on the root logger."""
    ours = (h for h in logging.getLogger().handlers if isinstance(h, _ProcessHandler))
    return next(ours, None)
