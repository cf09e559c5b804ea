"""vLLM's external KV connector: `kv_connector` EmberConnector, `kv_connector_module_path` this.

The class is imported when it is asked for, so that what does not need vLLM can do without it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from client_sdk.engine.vllm_connector.connector import EmberConnector

__all__ = ["EmberConnector"]


def __getattr__(name: str) -> Any:
    if name != "EmberConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from client_sdk.engine.vllm_connector.connector import EmberConnector

    return EmberConnector
