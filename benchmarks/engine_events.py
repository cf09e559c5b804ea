"""Engines' HBM events into rows of the index: decoding and hashing on one core, beside the hashes.

Messages as vLLM publishes them: a long prompt's blocks in one, or each block in one of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np

from benchmarks._figure import Figure, Options, main, medians_seconds
from emberkv_proto.hashing import block_hashes
from emberkv_proto.types import NamespaceId
from global_index.hbm.decoding import decode_message
from global_index.hbm.places import ChainForm
from global_index.hbm.rows import EngineRows

SPACE = NamespaceId(bytes(16))
BLOCKS = 4096
REFERENCE = "our hashes of the same blocks, from arrays"


@dataclass(frozen=True, slots=True)
class Shape:
    """Blocks of a message, tokens of the engine's block, and of ours."""

    blocks: int
    engine_block: int
    ours: int

    @property
    def name(self) -> str:
        return f"events_{self.blocks}x{self.engine_block}_to_{self.ours}"


SHAPES = (Shape(1, 16, 16), Shape(64, 16, 16), Shape(64, 16, 64), Shape(16, 64, 64))


def messages(shape: Shape, tokens: np.ndarray) -> list[bytes]:
    """Prompts of one message each, BLOCKS blocks together."""
    packed = []
    for number, prompt in enumerate(tokens.reshape(-1, shape.blocks * shape.engine_block)):
        first = (1 << 62) + number * shape.blocks
        event: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": list(range(first, first + shape.blocks)),
            "parent_block_hash": None,
            "token_ids": prompt.tolist(),
            "block_size": shape.engine_block,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None] * shape.blocks,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        packed.append(msgspec.msgpack.encode([time.time(), [event], 0]))
    return packed


def take(shape: Shape, packed: Sequence[bytes]) -> None:
    rows = EngineRows(ChainForm(SPACE, shape.ours))
    for payload in packed:
        rows.apply(decode_message(payload).events)
    assert rows.rows == BLOCKS * shape.engine_block // shape.ours


def hash_only(shape: Shape, prompts: np.ndarray) -> None:
    for prompt in prompts:
        block_hashes(SPACE, prompt, shape.ours)


def measure(options: Options) -> Sequence[Figure]:
    rng = np.random.default_rng(7)
    repeats = options.repeats(30, 7)
    figures = []
    for shape in SHAPES:
        tokens = rng.integers(0, 128_000, BLOCKS * shape.engine_block, dtype=np.uint32)
        prompts = tokens.reshape(-1, shape.blocks * shape.engine_block)
        work: list[Callable[[], None]] = [
            partial(take, shape, messages(shape, tokens)),
            partial(hash_only, shape, prompts),
        ]
        ours, bare = medians_seconds(work, repeats)
        figures.append(
            Figure(shape.name, BLOCKS / ours, "blocks/s", REFERENCE, BLOCKS / bare, repeats)
        )
    return figures


if __name__ == "__main__":
    main("engine_events", measure)
