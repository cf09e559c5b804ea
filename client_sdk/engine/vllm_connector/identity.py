"""Which namespace a vLLM engine's blocks belong to.

Everything that changes the bytes of a page is in it: model and weights, dtypes, the attention
backend's layout (on a CPU its instruction set too), block size, ranks and the engine's version.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import blake3

from client_sdk.engine.weights import UnsupportedEngineError, weights_id_of
from emberkv_proto.groups import WHOLE_PREFIX, needed_from
from emberkv_proto.layout import Group, GroupKind, KvLayout, Namespace, canonical_json

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

KINDS = {
    "FullAttentionSpec": GroupKind.FULL,
    "MLAAttentionSpec": GroupKind.MLA,
    "SlidingWindowSpec": GroupKind.SLIDING_WINDOW,
    "ChunkedLocalAttentionSpec": GroupKind.CHUNKED_LOCAL,
}
"""vLLM's cache specs that are cached."""
NULL_PAGE = 0
"""The page that vLLM puts where a window has moved on; nobody's bytes."""


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Layers that share a table of pages. Block for block a part of its own in the store."""

    stored: Group
    layer_names: tuple[str, ...]
    page_tokens: int
    page_bytes: int
    """Of one layer."""
    pages_per_block: int

    @property
    def needs_all(self) -> bool:
        """Whether its layers read every page of a prefix; then none is given up before the end."""
        return self.stored.kind in WHOLE_PREFIX

    def live_from(self, tokens: int) -> int:
        """First page that the engine surely still has once it computed `tokens` of a request."""
        return needed_from(self.stored, 1, tokens) // self.page_tokens


@dataclass(frozen=True, slots=True)
class PageShape:
    """How the engine's pages become blocks of the store."""

    namespace: Namespace
    groups: tuple[PageGroup, ...]
    num_pages: int
    """In the engine's own cache; the groups share them."""

    @property
    def block_tokens(self) -> int:
        return self.namespace.block_tokens

    @property
    def is_hybrid(self) -> bool:
        """Whether a hit is good for its whole length only, and a load for all of its pages.

        Elsewhere there is one group, and each shorter hit is a hit as well.
        """
        return len(self.groups) > 1 or not self.groups[0].needs_all

    @property
    def told_group(self) -> PageGroup:
        """The group whose pages an engine's KV events are followed by: one that keeps them all."""
        return next((group for group in self.groups if group.needs_all), self.groups[0])

    @property
    def lookup_step(self) -> int:
        """Blocks between those that a part of a chain may begin at.

        The daemon counts chunks of chunked attention from the first block that it is asked for.
        """
        size = self.block_tokens
        chunks = (
            group.stored.window_tokens
            for group in self.groups
            if group.stored.kind is GroupKind.CHUNKED_LOCAL
        )
        return math.lcm(size, *chunks) // size


def page_shape(config: VllmConfig, cache: KVCacheConfig, extra: dict[str, Any]) -> PageShape:
    """The engine's pages and their namespace.

    Args:
        extra: `kv_connector_extra_config`; `weights_id` and `block_tokens` are read here.

    Raises:
        UnsupportedEngineError: layers with a state, pipeline or context parallelism, no known
            weights, a block size that does not fit.
    """
    parallel = config.parallel_config
    _refuse_split(parallel)
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    if len(specs) > 1 and any(group.is_eagle_group for group in cache.kv_cache_groups):
        raise UnsupportedEngineError("draft layers beside other groups are not cached yet")
    page_tokens = math.lcm(*(int(spec.block_size) for spec in specs))
    block_tokens = int(extra.get("block_tokens", page_tokens))
    if block_tokens < page_tokens or block_tokens % page_tokens:
        raise UnsupportedEngineError(
            f"block_tokens {block_tokens} must be a multiple of the engine's block size"
            f" {page_tokens}"
        )
    groups = tuple(page_group(group, block_tokens) for group in cache.kv_cache_groups)
    namespace = Namespace(
        model=str(config.model_config.model),
        weights_id=str(extra.get("weights_id") or weights_id(config.model_config)),
        kv_dtype="+".join(sorted({str(spec.dtype).removeprefix("torch.") for spec in specs})),
        layout_fingerprint=_fingerprint(config, cache),
        block_tokens=block_tokens,
        groups=tuple(group.stored for group in groups),
        shards=int(parallel.tensor_parallel_size),
        engine_family="vllm",
    )
    shape = PageShape(namespace, groups, int(cache.num_blocks))
    if shape.is_hybrid:
        _refuse_old_engine()
    return shape


def _refuse_old_engine() -> None:
    """A load that failed has to be told by request, which older engines do not understand."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    if not hasattr(base, "KVConnectorTransferResults"):
        raise UnsupportedEngineError(
            "models with several groups of layers, or windows alone, need vLLM 0.30 or later; or"
            " start this one with --disable-hybrid-kv-cache-manager"
        )


def page_group(group: Any, block_tokens: int) -> PageGroup:
    """One of vLLM's groups, as it is stored. Raises UnsupportedEngineError, see `page_shape`."""
    spec = group.kv_cache_spec
    kind = KINDS.get(type(spec).__name__)
    if kind is None:
        raise UnsupportedEngineError(f"layers of {type(spec).__name__} are not cached yet")
    page_tokens, page_bytes = int(spec.block_size), _page_bytes(spec)
    pages, layers = block_tokens // page_tokens, len(group.layer_names)
    window = _window_tokens(kind, spec)
    crosses_chunks = kind is GroupKind.CHUNKED_LOCAL and window % block_tokens
    if window and pages > 1 and (window < block_tokens or crosses_chunks):
        raise UnsupportedEngineError(
            f"block_tokens {block_tokens} does not fit a window of {window} tokens: vLLM gives up"
            f" the first pages of such a block before its last is full; set it to {page_tokens}"
        )
    stored = Group(kind, layers, pages * layers * page_bytes, window)
    return PageGroup(stored, tuple(group.layer_names), page_tokens, page_bytes, pages)


def _window_tokens(kind: GroupKind, spec: Any) -> int:
    """How many of the tokens before the next one are read; 0 where all are."""
    if kind is GroupKind.SLIDING_WINDOW:
        kept = int(getattr(spec, "extra_retained_tokens", 0))
        # vLLM's window counts the next token too.
        return max(int(spec.sliding_window) - 1 + kept, 1)
    return int(spec.attention_chunk_size) if kind is GroupKind.CHUNKED_LOCAL else 0


def _page_bytes(spec: Any) -> int:
    """Of one layer, without what pads it to the pages of other groups."""
    return int(getattr(spec, "unpadded_page_size_bytes", spec.page_size_bytes))


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


def _fingerprint(config: VllmConfig, cache: KVCacheConfig) -> str:
    prints = [_layout(config, cache, group).fingerprint for group in cache.kv_cache_groups]
    if len(prints) == 1:
        return prints[0]
    return blake3.blake3(canonical_json(prints)).hexdigest()[:32]


def _layout(config: VllmConfig, cache: KVCacheConfig, group: Any) -> KvLayout:
    import vllm
    from vllm.platforms import current_platform

    spec = group.kv_cache_spec
    details = {
        "engine": "vllm " + ".".join(str(vllm.__version__).split(".")[:2]),
        "spec": type(spec).__name__,
        "page_tokens": str(spec.block_size),
        "page_bytes": str(_page_bytes(spec)),
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "kv_cache_layout": str(getattr(cache, "kv_cache_layout", None)),
        "device": str(current_platform.device_type),
    }
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(spec, name, None):
            details[name] = str(getattr(spec, name))
    if len(cache.kv_cache_groups) > 1:
        details["layer_names"] = ",".join(group.layer_names)
    if current_platform.is_cpu():
        details["isa"] = _cpu_isa(config, spec)
    else:
        details["device_name"] = str(current_platform.get_device_name())
        details["backend"] = str(getattr(config.attention_config, "backend", None))
    return KvLayout(
        str(spec.dtype).removeprefix("torch."),
        len(group.layer_names),
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
