"""Which namespace a vLLM engine's blocks belong to.

Everything that changes the bytes of a page is in it: model and weights, dtypes, the attention
backend's layout (on a CPU its instruction set too), block size, ranks and the engine's version.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    "MambaSpec": GroupKind.MAMBA,
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
    """1 for a state: of a block's pages the last one, as it is after the block's last token."""

    @property
    def is_state(self) -> bool:
        """Whether its pages hold no tokens but what all tokens before a page's end left behind."""
        return self.stored.kind is GroupKind.MAMBA

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
    stages: int = 1
    """Of a pipeline, each with layers of its own; the first `shards / stages` parts of a group are
    those of the first stage."""

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
    def loads_between_steps(self) -> bool:
        """Whether a step cannot wait for its loads.

        Only of others can vLLM be told that a hybrid request's pages are not filled, and steps of a
        pipeline are planned before those they follow have run.
        """
        return self.is_hybrid or self.stages > 1

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


def page_shape(
    config: VllmConfig, cache: KVCacheConfig, extra: dict[str, Any], stage: int = 0
) -> PageShape:
    """The engine's pages and their namespace.

    Args:
        cache: of one stage of the engine's pipeline; the scheduler knows the first one's.
        extra: `kv_connector_extra_config`; `weights_id` and `block_tokens` are read here.
        stage: whose layers `cache` has.

    Raises:
        UnsupportedEngineError: layers of an unknown kind, states that the engine keeps for no
            block, context parallelism, a pipeline of several groups, no known weights, a block size
            that does not fit.
    """
    parallel = config.parallel_config
    _refuse_split_tokens(parallel)
    stages = _layers_of_stages(config, cache, stage)
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
    groups = tuple(page_group(group, block_tokens, stages) for group in cache.kv_cache_groups)
    namespace = Namespace(
        model=str(config.model_config.model),
        weights_id=str(extra.get("weights_id") or weights_id(config.model_config)),
        kv_dtype="+".join(sorted({name for spec in specs for name in _dtype_names(spec)})),
        layout_fingerprint=_fingerprint(config, cache, stages),
        block_tokens=block_tokens,
        groups=tuple(group.stored for group in groups),
        shards=int(parallel.tensor_parallel_size) * max(len(stages), 1),
        engine_family="vllm",
    )
    shape = PageShape(namespace, groups, int(cache.num_blocks), max(len(stages), 1))
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


def page_group(group: Any, block_tokens: int, stages: Sequence[int] = ()) -> PageGroup:
    """One of vLLM's groups, as it is stored. Raises UnsupportedEngineError, see `page_shape`.

    Parts of all stages are as large as that of the stage with the most layers.
    """
    spec = group.kv_cache_spec
    kind = KINDS.get(type(spec).__name__)
    if kind is None:
        raise UnsupportedEngineError(f"layers of {type(spec).__name__} are not cached yet")
    page_tokens, page_bytes = int(spec.block_size), _page_bytes(spec)
    if kind is GroupKind.MAMBA:
        _refuse_states(spec)
    pages = 1 if kind is GroupKind.MAMBA else block_tokens // page_tokens
    layers = max(stages, default=len(group.layer_names))
    window = _window_tokens(kind, spec)
    crosses_chunks = kind is GroupKind.CHUNKED_LOCAL and window % block_tokens
    if window and pages > 1 and (window < block_tokens or crosses_chunks):
        raise UnsupportedEngineError(
            f"block_tokens {block_tokens} does not fit a window of {window} tokens: vLLM gives up"
            f" the first pages of such a block before its last is full; set it to {page_tokens}"
        )
    stored = Group(kind, layers, pages * layers * page_bytes, window)
    return PageGroup(stored, tuple(group.layer_names), page_tokens, page_bytes, pages)


def _refuse_states(spec: Any) -> None:
    """A state is stored where the engine tells of it: at the end of a block, in a page of its own.

    Raises UnsupportedEngineError where it keeps a running state only, which is at no such end.
    """
    from vllm.v1.core.sched import output

    if not hasattr(output, "KVConnectorBlockState"):
        raise UnsupportedEngineError("models with state layers need vLLM 0.32 or later")
    if spec.mamba_cache_mode != "align":
        raise UnsupportedEngineError(
            f"mamba_cache_mode is {spec.mamba_cache_mode!r}: the engine keeps the states of its"
            " layers for no block; start it with --enable-prefix-caching"
        )
    if spec.num_speculative_blocks:
        raise UnsupportedEngineError("speculation beside state layers is not cached yet")


def _window_tokens(kind: GroupKind, spec: Any) -> int:
    """How many of the tokens before the next one are read; 0 where all are."""
    if kind is GroupKind.SLIDING_WINDOW:
        kept = int(getattr(spec, "extra_retained_tokens", 0))
        # vLLM's window counts the next token too.
        return max(int(spec.sliding_window) - 1 + kept, 1)
    return int(spec.attention_chunk_size) if kind is GroupKind.CHUNKED_LOCAL else 0


def _page_bytes(spec: Any) -> int:
    """Of one layer, without what pads it to the pages of other groups."""
    if KINDS.get(type(spec).__name__) is GroupKind.MAMBA:
        return int(spec.state_content_size_bytes)
    return int(getattr(spec, "unpadded_page_size_bytes", spec.page_size_bytes))


def _dtype_names(spec: Any) -> list[str]:
    """Of what is in a page, in its order; a state has several tensors."""
    dtypes = spec.dtypes if hasattr(spec, "dtypes") else [spec.dtype]
    return [str(dtype).removeprefix("torch.") for dtype in dtypes]


def weights_id(model: Any) -> str:
    """See `weights_id_of`; takes vLLM's model configuration."""
    return weights_id_of(str(model.model), str(model.revision or ""), "kv_connector_extra_config")


def _refuse_split_tokens(parallel: Any) -> None:
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size != 1:
            raise UnsupportedEngineError(
                f"{name} is {size}: ranks that share a request's tokens are not cached yet; start"
                f" vLLM without --{name.replace('_', '-')} to use the store"
            )


def _layers_of_stages(config: VllmConfig, cache: KVCacheConfig, stage: int) -> tuple[int, ...]:
    """How many layers each stage of a pipeline has; nothing where there is one.

    Every rank and the scheduler have to come to the same numbers, or they would not share a
    namespace.
    """
    size = int(config.parallel_config.pipeline_parallel_size)
    if size == 1:
        return ()
    from vllm.distributed.utils import get_pp_indices

    groups = [len(group.layer_names) for group in cache.kv_cache_groups]
    total = int(config.model_config.get_total_num_hidden_layers())
    spans = [get_pp_indices(total, number, size) for number in range(size)]
    layers = tuple(end - begin for begin, end in spans)
    if groups != [layers[stage]]:
        raise UnsupportedEngineError(
            f"pipeline_parallel_size is {size} and stage {stage} has groups of {groups} layers:"
            " only pipelines of one kind of layers are cached yet; split the model with"
            " --tensor-parallel-size to use the store"
        )
    return layers


def _fingerprint(config: VllmConfig, cache: KVCacheConfig, stages: Sequence[int]) -> str:
    layouts = [_layout(config, cache, group, stages) for group in cache.kv_cache_groups]
    prints = [layout.fingerprint for layout in layouts]
    if len(prints) == 1:
        return prints[0]
    return blake3.blake3(canonical_json(prints)).hexdigest()[:32]


def _layout(
    config: VllmConfig, cache: KVCacheConfig, group: Any, stages: Sequence[int]
) -> KvLayout:
    import vllm
    from vllm.platforms import current_platform

    spec = group.kv_cache_spec
    is_state = KINDS[type(spec).__name__] is GroupKind.MAMBA
    details = {
        "engine": "vllm " + ".".join(str(vllm.__version__).split(".")[:2]),
        "spec": type(spec).__name__,
        "page_tokens": str(spec.block_size),
        "page_bytes": str(_page_bytes(spec)),
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "kv_cache_layout": _cache_layout(cache),
        "device": str(current_platform.device_type),
    }
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(spec, name, None):
            details[name] = str(getattr(spec, name))
    if len(cache.kv_cache_groups) > 1:
        details["layer_names"] = ",".join(group.layer_names)
    if stages:
        details["pipeline"] = "+".join(map(str, stages))
    if is_state:
        details |= _state_details(spec)
    if current_platform.is_cpu():
        details["isa"] = _cpu_features() if is_state else _cpu_isa(config, spec)
    else:
        details["device_name"] = str(current_platform.get_device_name())
        details["backend"] = str(getattr(config.attention_config, "backend", None))
    return KvLayout(
        "+".join(_dtype_names(spec)),
        max(stages, default=len(group.layer_names)),
        0 if is_state else int(spec.num_kv_heads),
        0 if is_state else int(spec.head_size),
        "layer.page.backend",
        details,
    )


def _cache_layout(cache: KVCacheConfig) -> str:
    """Before 0.29 what the operator asked for, as all ranks and the scheduler know it.

    What becomes of it there only workers know; it depends on device and backend, told beside it.
    """
    from vllm import envs

    if hasattr(cache, "kv_cache_layout"):
        return str(cache.kv_cache_layout)
    return str(envs.VLLM_KV_CACHE_LAYOUT)


def _state_details(spec: Any) -> dict[str, str]:
    """What a page of states is made of."""
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

    return {
        "shapes": str([list(shape) for shape in spec.shapes]),
        "mamba_type": str(getattr(spec.mamba_type, "name", spec.mamba_type)),
        "conv_state_layout": str(get_conv_state_layout()),
        "tp_replicated": str(getattr(spec, "tp_replicated", False)),
    }


def _cpu_features() -> str:
    """What vLLM chooses its kernels for states by; they may order a state for themselves."""
    import torch

    return f"{torch.backends.cpu.get_cpu_capability()} amx={torch.cpu._is_amx_tile_supported()}"


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
