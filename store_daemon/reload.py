"""Takes over a changed configuration while the daemon serves: all that may change, or nothing."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from emberkv_proto.errors import EmberError, InvalidRequestError
from store_daemon.config import DaemonSettings
from store_daemon.live_settings import Changes, compare, with_live_changes

log = logging.getLogger(__name__)


class Reloader:
    """Reads the configuration again, on SIGHUP or an operator's call. On the daemon's loop.

    Args:
        load: reads file, environment and flags anew; None: the settings came from elsewhere.
        apply: makes the settings valid for all parts; raises, if at all, before it changed any.
        counters: `reloads` and `failed_reloads` are counted there.
    """

    def __init__(
        self,
        settings: DaemonSettings,
        load: Callable[[], DaemonSettings] | None,
        apply: Callable[[DaemonSettings], None],
        counters: Counter[str],
    ) -> None:
        self.current = settings
        """What the daemon runs with."""
        self._load = load
        self._apply = apply
        self._counters = counters

    def reload(self) -> Changes:
        """Change what may change now; return that, and what waits for a restart.

        Raises ConfigError, or InvalidRequestError without a configuration: nothing has changed.
        """
        try:
            if self._load is None:
                raise InvalidRequestError("this daemon was not started from a configuration")
            wanted = self._load()
            changes = compare(self.current, wanted)
            settings = with_live_changes(self.current, wanted)
            self._apply(settings)
        except EmberError as error:
            self._counters["failed_reloads"] += 1
            log.error("the configuration is not reloaded, nothing has changed: %s", error)
            raise
        self.current = settings
        self._counters["reloads"] += 1
        for change in changes.live:
            log.info("reloaded %s", change)
        for change in changes.needs_restart:
            log.warning("waits for a restart: %s", change)
        if not changes.live and not changes.needs_restart:
            log.info("reloaded: nothing has changed")
        return changes
