"""Writes a tiny Gemma 3 with seeded weights: two layers with a window for each one without.

Runs in vLLM's environment: `python -m client_sdk.engine.tiny_gemma DIR`. vLLM makes three groups of
its layers, two of them with a window.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from client_sdk.engine.tiny_llama import HIDDEN, VOCABULARY, write_tokenizer

WINDOW_TOKENS = 80
"""With the token itself. No multiple of a page, so that windows begin inside of one."""
LAYERS = ("sliding_attention", "sliding_attention", "full_attention") * 2


def write_model(directory: Path) -> None:
    ids = write_tokenizer(directory)
    torch.manual_seed(21)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=len(LAYERS),
        layer_types=list(LAYERS),
        sliding_window=WINDOW_TOKENS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        max_position_embeddings=8192,
        initializer_range=0.08,
        tie_word_embeddings=False,
        **ids,
    )
    Gemma3ForCausalLM(config).to(torch.float32).save_pretrained(directory)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    write_model(target)
