"""Block hashing of a 128k-token prompt, beside bare BLAKE3 calls over the same bytes."""

from __future__ import annotations

from collections.abc import Sequence

import blake3
import numpy as np

from benchmarks._figure import Figure, Options, main, medians_seconds
from emberkv_proto.hashing import block_hashes
from emberkv_proto.types import NamespaceId

TOKENS = 128 * 1024
BLOCK_TOKENS = 64


def measure(options: Options) -> Sequence[Figure]:
    tokens = np.random.default_rng(7).integers(0, 100_000, TOKENS, dtype=np.uint32)
    namespace = NamespaceId(bytes(16))
    packed = tokens.tobytes()
    step = 4 * BLOCK_TOKENS
    pieces = [bytes(32) + packed[i : i + step] for i in range(0, len(packed), step)]

    def bare() -> None:
        for piece in pieces:
            blake3.blake3(piece).digest()

    repeats = options.repeats(200, 40)
    ours, reference = medians_seconds(
        [lambda: block_hashes(namespace, tokens, BLOCK_TOKENS), bare], repeats
    )
    return [
        Figure(
            "hash_128k_tokens",
            ours * 1e3,
            "ms",
            "bare blake3 over the same bytes, unchained",
            reference * 1e3,
            repeats,
            at_most=2.0,
        )
    ]


if __name__ == "__main__":
    main("hashing", measure)
