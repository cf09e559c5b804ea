"""Which namespace a vLLM engine's blocks belong to.

Everything that changes the bytes of a page is in it: model and weights, dtypes, the attention
backend's layout (on a CPU its instruction set too), block size, ranks and the engine's version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from client_sdk.engine.weights import UnsupportedEngineError, weights_id_of
from emberkv_proto.layout import Group, GroupKind, KvLayout, Namespace

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

KINDS = {"FullAttentionSpec": GroupKind.FULL, "MLAAttentionSpec": GroupKind.MLA}
"""vLLM's cache specs that are cached."""


@dataclass(frozen=True, slots=True)
class PageShape:
    """How the engine's pages become blocks of the store."""

    namespace: Namespace
    layer_names: tuple[str, ...]
    page_tokens: int
    page_bytes: int
    """Of one layer."""
    pages_per_block: int
    num_pages: int
    """In the engine's own cache."""

    @property
    def block_tokens(self) -> int:
        return self.page_tokens * self.pages_per_block


def page_shape(config: VllmConfig, cache: KVCacheConfig, extra: dict[str, Any]) -> PageShape:
    """The engine's pages and their namespace.

    Args:
        extra: `kv_connector_extra_config`; `weights_id` and `block_tokens` are read here.

    Raises:
        UnsupportedEngineError: hybrid models, pipeline or context parallelism, no known weights.
    """
    parallel = config.parallel_config
    _refuse_split(parallel)
    if len(cache.kv_cache_groups) != 1:
        raise UnsupportedEngineError(
            f"the model has {len(cache.kv_cache_groups)} groups of layers; hybrid models are not"
            " cached yet"
        )
    group = cache.kv_cache_groups[0]
    spec = group.kv_cache_spec
    kind = KINDS.get(type(spec).__name__)
    windowed = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    if kind is None or windowed:
        raise UnsupportedEngineError(f"layers of {type(spec).__name__} are not cached yet")
    page_tokens = int(spec.block_size)
    block_tokens = int(extra.get("block_tokens", page_tokens))
    if block_tokens < page_tokens or block_tokens % page_tokens:
        raise UnsupportedEngineError(
            f"block_tokens {block_tokens} must be a multiple of the engine's block size"
            f" {page_tokens}"
        )
    pages = block_tokens // page_tokens
    layers = len(group.layer_names)
    namespace = Namespace(
        model=str(config.model_config.model),
        weights_id=str(extra.get("weights_id") or weights_id(config.model_config)),
        kv_dtype=str(spec.dtype).removeprefix("torch."),
        layout_fingerprint=_layout(config, cache, spec, layers).fingerprint,
        block_tokens=block_tokens,
        groups=(Group(kind, layers, pages * layers * int(spec.page_size_bytes)),),
        shards=int(parallel.tensor_parallel_size),
        engine_family="vllm",
    )
    return PageShape(
        namespace,
        tuple(group.layer_names),
        page_tokens,
        int(spec.page_size_bytes),
        pages,
        int(cache.num_blocks),
    )


def weights_id(model: Any) -> str:
    """See `weights_id_of`; takes vLLM's model configuration."""
    return weights_id_of(str(model.model), str(model.revision or ""), "kv_connector_extra_config")


def _refuse_split(parallel: Any) -> None:
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        size = getattr(parallel, name, 1)
        if size != 1:
            raise UnsupportedEngineError(f"{name} {size} is not cached yet, only 1")


def _layout(config: VllmConfig, cache: KVCacheConfig, spec: Any, layers: int) -> KvLayout:
    import vllm
    from vllm.platforms import current_platform

    details = {
        "engine": "vllm " + ".".join(str(vllm.__version__).split(".")[:2]),
        "spec": type(spec).__name__,
        "page_tokens": str(spec.block_size),
        "page_bytes": str(spec.page_size_bytes),
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "kv_cache_layout": str(getattr(cache, "kv_cache_layout", None)),
        "device": str(current_platform.device_type),
    }
    if current_platform.is_cpu():
        details["isa"] = _cpu_isa(config, spec)
    else:
        details["device_name"] = str(current_platform.get_device_name())
        details["backend"] = str(getattr(config.attention_config, "backend", None))
    return KvLayout(
        str(spec.dtype).removeprefix("torch."),
        layers,
        int(spec.num_kv_heads),
        int(spec.head_size),
        "layer.page.backend",
        details,
    )


def _cpu_isa(config: VllmConfig, spec: Any) -> str:
    """Pages of one instruction set are garbage to another: keys are packed for its kernels."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return str(
        _get_attn_isa(
            config.model_config.dtype,
            spec.block_size,
            spec.head_size,
            config.cache_config.cache_dtype,
        )
    )
