"""Writes a tiny Qwen3-Next with seeded weights: a layer with a state for each one with attention.

Runs in vLLM's environment: `python -m client_sdk.engine.tiny_qwen DIR`. On a CPU vLLM runs its
states (gated delta nets) in bfloat16 only, and makes its pages so long that a state fits into one:
96 or 160 tokens, by the CPU's instructions.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from client_sdk.engine.tiny_llama import HIDDEN, VOCABULARY, write_tokenizer

LAYERS = ("linear_attention", "full_attention") * 2


def write_model(directory: Path) -> None:
    ids = write_tokenizer(directory)
    torch.manual_seed(22)
    config = Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=len(LAYERS),
        layer_types=list(LAYERS),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        max_position_embeddings=8192,
        initializer_range=0.08,
        tie_word_embeddings=False,
        **ids,
    )
    Qwen3NextForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    write_model(target)
