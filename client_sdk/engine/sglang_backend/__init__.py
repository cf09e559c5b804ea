"""SGLang's HiCache storage: `--hicache-storage-backend dynamic`, module_path this, class_name
EmberHiCache.

The class is imported when it is asked for, so that what does not need SGLang can do without it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from client_sdk.engine.sglang_backend.backend import EmberHiCache

__all__ = ["EmberHiCache"]


def __getattr__(name: str) -> Any:
    if name != "EmberHiCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from client_sdk.engine.sglang_backend.backend import EmberHiCache

    return EmberHiCache
