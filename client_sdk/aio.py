"""asyncio names that Python 3.10 lacks, from one place."""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11):
    from asyncio import TaskGroup, timeout
else:
    from taskgroup import TaskGroup, timeout

__all__ = ["TaskGroup", "timeout"]
