"""Which memory layout of its cache vLLM is asked for.

Where blocks come before layers, a block is one run of bytes over all layers, and one copy takes it.
Attention kernels do not see it: they read one layer's page at a time, which looks the same. vLLM
drops a wish that its backend does not support; what else could end an engine is not wished for.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BACKENDS = frozenset({"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"})
"""That take blocks before layers, by what vLLM 0.32 says of them."""
UNSPLIT_PAGE_TOKENS = frozenset({16, 32, 64})
"""Pages that their kernels take whole; of larger ones some split, and vLLM then refuses to start
where other layers' pages lie between a page and the next."""
UNSPLIT_HEAD_SIZE = 128
"""Kernels for larger heads may take pages of other sizes."""
_OTHERS = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"


def wanted_layout(config: VllmConfig) -> str | None:
    """The layout to ask for; None: whatever vLLM would take.

    Never for models with several groups of layers, latent attention or quantised caches, nor
    beside other connectors: two different wishes end the engine.
    """
    from vllm.platforms import current_platform

    try:
        from vllm.v1.kv_cache_layout import KVCacheLayout
    except ImportError:  # before 0.29: one run for each layer, whichever is asked for
        return None
    model, cache, attention = config.model_config, config.cache_config, config.attention_config
    if model is None or not current_platform.is_cuda() or _OTHERS in sys.modules:
        return None
    if model.use_mla or model.is_hybrid or model.get_sliding_window() is not None:
        return None
    if cache.cache_dtype not in ("auto", "float16", "bfloat16"):
        return None
    if cache.block_size not in UNSPLIT_PAGE_TOKENS or model.get_head_size() > UNSPLIT_HEAD_SIZE:
        return None
    if attention.backend_per_kind or (
        attention.backend is not None and attention.backend.name not in BACKENDS
    ):
        return None
    capability = current_platform.get_device_capability()
    # Within a block as vLLM's own default has it: FlashInfer's kernels for Blackwell take heads
    # first only, elsewhere all take tokens first.
    is_blackwell = capability is not None and capability.major == 10
    return str((KVCacheLayout.BLHNC if is_blackwell else KVCacheLayout.BLNHC).name)
