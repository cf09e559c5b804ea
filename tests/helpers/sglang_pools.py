"""SGLang's host pools and storage configuration as far as our backend looks at them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


class MHATokenToKVPoolHost:
    """Named as SGLang's, since names are looked at. Pages of two layers, two heads of four."""

    layer_num = target_layer_num = 2
    start_layer, end_layer = 0, 2
    head_num, head_dim, v_head_dim = 2, 4, 4
    dtype = torch.bfloat16

    def __init__(self, pages: int = 8, page_size: int = 4, layout: str = "page_first") -> None:
        self.page_size, self.layout, self.size = page_size, layout, pages * page_size
        axes = (self.size, 2) if layout != "layer_first" else (2, self.size)
        self.kv_buffer = torch.zeros((2, *axes, 2, 4), dtype=torch.bfloat16)
        self._bytes = self.kv_buffer.view(torch.uint8)
        self._base = self.kv_buffer.data_ptr()

    @property
    def page_bytes(self) -> int:
        return 2 * 2 * self.page_size * 2 * 4 * 2

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        token = 2 * 4 * 2
        side = 2 * self.size * token
        addresses = []
        for index in indices.tolist()[:: self.page_size]:
            if self.layout == "layer_first":
                for layer in range(2):
                    key = self._base + (layer * self.size + index) * token
                    addresses += [key, key + side]
            else:
                key = self._base + index * 2 * token
                addresses += [key, key + side]
        length = self.page_bytes * len(indices) // self.page_size // len(addresses)
        return addresses, [length] * len(addresses)

    def page(self, number: int) -> bytes:
        """A page as SGLang itself flattens it."""
        tokens = slice(number * self.page_size, (number + 1) * self.page_size)
        buffer = self.kv_buffer
        found = buffer[:, :, tokens] if self.layout == "layer_first" else buffer[:, tokens]
        return found.contiguous().view(torch.uint8).numpy().tobytes()

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randint(0, 256, self._bytes.shape, generator=generator, dtype=torch.uint8)
        self._bytes.copy_(noise)


class MHAUnknownPoolHost(MHATokenToKVPoolHost):
    """One of which nobody has told us."""


def storage_config(**changes: Any) -> Any:
    plain = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "is_storage_writer": True,
        "enable_storage_metrics": False,
        "model_name": "tiny",
        "tp_lcm_size": None,
        "dcp_size": 1,
        "extra_config": {},
    }
    return SimpleNamespace(**{**plain, **changes})
