"""Which namespace an SGLang engine's pages belong to.

Everything that changes the bytes of a page is in it: model and weights, dtypes, the host pool's
layout, page size, layers, ranks and SGLang's version. Page hashes carry tokens, salts and extra
keys; what neither carries is refused here, so that nothing is ever mixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blake3

from client_sdk.engine.weights import UnsupportedEngineError, directory_id, weights_id_of
from emberkv_proto.layout import Group, GroupKind, KvLayout, Namespace

SETTINGS_NAME = "--hicache-storage-backend-extra-config"
LAYOUTS: dict[str, tuple[str, ...]] = {
    "MHATokenToKVPoolHost": ("page_first", "page_first_direct", "page_head", "layer_first"),
    "AsymmetricMHATokenToKVPoolHost": ("page_first", "page_first_direct"),
    "MLATokenToKVPoolHost": ("page_first", "page_first_direct", "layer_first"),
}
"""Host pools whose pages we know the bytes of, and in which memory layouts."""
COMPUTED_BY = (
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "json_model_override_args",
    "load_format",
    "weight_version",
)
"""SGLang's own settings that change what a page holds, beside the weights."""


@dataclass(frozen=True, slots=True)
class PageShape:
    """How the engine's pages become blocks of the store."""

    namespace: Namespace
    part: int
    """This rank's part of each block."""
    page_tokens: int
    page_bytes: int
    is_writer: bool
    """Of ranks that hold the same bytes, one writes."""


def page_shape(
    config: Any, pool: Any, weights: str | None, args: Any, page_bytes: int
) -> PageShape:
    """The engine's pages and their namespace.

    Args:
        config: SGLang's HiCacheStorageConfig.
        pool: the host pool that holds the KV pages.
        weights: what the user says names the weights.
        args: SGLang's ServerArgs; None outside a server.
        page_bytes: of one page of this rank.

    Raises:
        UnsupportedEngineError: what we cannot tell apart, or do not know the bytes of.
    """
    refuse_split(config)
    _refuse_pool(pool)
    kind = GroupKind.MLA if config.is_mla_model else GroupKind.FULL
    namespace = Namespace(
        model=str(getattr(args, "model_path", None) or config.model_name or ""),
        weights_id=weights or _weights_of(args),
        kv_dtype=str(pool.dtype).removeprefix("torch."),
        layout_fingerprint=_layout(config, pool, args, page_bytes).fingerprint,
        block_tokens=int(pool.page_size),
        groups=(Group(kind, int(pool.layer_num), page_bytes),),
        shards=1 if config.is_mla_model else int(config.tp_size),
        engine_family="sglang",
    )
    return PageShape(
        namespace,
        0 if config.is_mla_model else int(config.tp_rank),
        int(pool.page_size),
        page_bytes,
        bool(config.is_storage_writer),
    )


def refuse_split(config: Any) -> None:
    """Raises UnsupportedEngineError for ranks that would hold other parts than we keep."""
    if int(getattr(config, "dcp_size", 1)) > 1:
        raise UnsupportedEngineError(
            f"decode context parallelism (dcp_size {config.dcp_size}) is not cached: a page is"
            " spread over its ranks"
        )
    lcm = getattr(config, "tp_lcm_size", None)
    if lcm and int(lcm) != int(config.tp_size):
        raise UnsupportedEngineError(
            f"tp_lcm_size {lcm} with {config.tp_size} tensor-parallel ranks is not cached: engines"
            f" of unequal ranks share no blocks here; leave it out of {SETTINGS_NAME}"
        )


def refuse_pools(names: Sequence[str]) -> None:
    """Raises UnsupportedEngineError when there are other pools than that of the KV pages."""
    others = sorted({name for name in names if name != "kv"})
    if others:
        raise UnsupportedEngineError(
            f"this engine keeps more than KV pages ({', '.join(others)}): hybrid models and draft"
            " models are not cached yet; start it without --hicache-storage-backend"
        )


def _refuse_pool(pool: Any) -> None:
    name, layout = type(pool).__name__, str(pool.layout)
    if layout not in LAYOUTS.get(name, ()):
        known = "; ".join(f"{pool}: {', '.join(layouts)}" for pool, layouts in LAYOUTS.items())
        raise UnsupportedEngineError(
            f"pages of a {name} with --hicache-mem-layout {layout} are not cached; known: {known}"
        )
    drafts = int(pool.layer_num) - int(getattr(pool, "target_layer_num", pool.layer_num))
    if drafts:
        raise UnsupportedEngineError(
            f"the pages hold {drafts} layers of a draft model: speculative decoding with packed"
            " draft layers is not cached yet"
        )


def _weights_of(args: Any) -> str:
    if args is None:
        raise UnsupportedEngineError(f'the weights have no id: set "weights_id" in {SETTINGS_NAME}')
    return weights_id_of(str(args.model_path), str(args.revision or ""), SETTINGS_NAME)


def _layout(config: Any, pool: Any, args: Any, page_bytes: int) -> KvLayout:
    import sglang

    details = {
        "engine": f"sglang {sglang.__version__}",
        "pool": type(pool).__name__,
        "format": str(getattr(pool, "storage_format_tag", None) or ""),
        "page_tokens": str(pool.page_size),
        "page_bytes": str(page_bytes),
        "first_layer": str(pool.start_layer),
        "end_layer": str(pool.end_layer),
        "value_dim": str(getattr(pool, "v_head_dim", "")),
        # A stage of a pipeline and a slice of a context have blocks of their own.
        "stage": f"{config.pp_rank}/{config.pp_size}",
        "slice": f"{config.attn_cp_rank}/{config.attn_cp_size}",
    }
    for name in COMPUTED_BY:
        details[name] = str(getattr(args, name, None) or "")
    details["scales"] = _file_id(getattr(args, "quantization_param_path", None))
    details["adapters"] = _adapters(args)
    return KvLayout(
        str(pool.dtype).removeprefix("torch."),
        int(pool.layer_num),
        int(getattr(pool, "head_num", 1)),
        int(getattr(pool, "head_dim", 0) or pool.kv_cache_dim),
        str(pool.layout),
        details,
    )


def _file_id(path: str | None) -> str:
    return blake3.blake3(Path(path).read_bytes()).hexdigest()[:32] if path else ""


def _adapters(args: Any) -> str:
    """Adapters named at the start: SGLang knows them by name and path only, not by their weights.

    Those that are loaded later get a number of their own each time, which is in the page hash.
    """
    found = []
    for adapter in getattr(args, "lora_paths", None) or ():
        path = Path(str(getattr(adapter, "lora_path", adapter)))
        if not path.is_dir():
            raise UnsupportedEngineError(f"the adapter {path} is no local directory")
        found.append(f"{path}\0{directory_id(path)}")
    return blake3.blake3("\0".join(sorted(found)).encode()).hexdigest()[:32] if found else ""
