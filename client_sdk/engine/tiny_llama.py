"""Writes a tiny Llama with seeded weights, a byte-level tokenizer and an adapter for it.

Runs in vLLM's environment: `python -m client_sdk.engine.tiny_llama DIR`. Weights are seeded, not
vLLM's dummy ones: with those the output would stay the same whatever the cache holds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 512
HIDDEN = 256
LAYERS = 4
SPECIALS = ("<s>", "</s>", "<pad>")


def write_tokenizer(directory: Path) -> dict[str, int]:
    """Byte-level, with a chat template. Returns the ids that a model's config names."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIALS]
    words += [f"<unused{n}>" for n in range(VOCABULARY - len(words))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **dict(zip(("bos_token", "eos_token", "pad_token"), SPECIALS, strict=True)),
    )
    fast.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[assistant] "
    )
    fast.save_pretrained(directory)
    ids = (vocabulary[word] for word in SPECIALS)
    return dict(zip(("bos_token_id", "eos_token_id", "pad_token_id"), ids, strict=True))


def write_model(directory: Path) -> None:
    ids = write_tokenizer(directory)
    torch.manual_seed(20)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        initializer_range=0.08,  # wide enough that the output depends on every cached byte
        tie_word_embeddings=False,
        **ids,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(directory)


def write_adapter(directory: Path, seed: int) -> None:
    """A LoRA adapter of rank 8 on the query projections."""
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        stem = f"base_model.model.model.layers.{layer}.self_attn.v_proj"
        weights[f"{stem}.lora_A.weight"] = torch.randn(8, HIDDEN, generator=generator)
        weights[f"{stem}.lora_B.weight"] = torch.randn(128, 8, generator=generator)
    save_file(weights, directory / "adapter_model.safetensors")
    about = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["v_proj"],
        "base_model_name_or_path": "tiny",
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (directory / "adapter_config.json").write_text(json.dumps(about))


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    write_model(target)
    for number, name in enumerate(("adapter_a", "adapter_b")):
        write_adapter(target.parent / name, 7 + number)
