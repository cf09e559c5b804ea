"""Least recently used first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from store_daemon.policies.base import EvictionPolicy

if TYPE_CHECKING:
    from store_daemon.block import Block


class LruPolicy(EvictionPolicy):
    """One lane in the order of the last access. Keeps no books, so it cannot fail."""

    is_by_access = True

    def choose(self, heads: Sequence[Block | None]) -> Block | None:
        return heads[0]
