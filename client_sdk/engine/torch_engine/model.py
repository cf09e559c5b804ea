"""A small decoder-only transformer on the CPU: GQA, RoPE, RMSNorm, SwiGLU, seeded weights.

Computes in float64 and reads every key and value, also those of the current chunk, as the float32
that stands in the pages. So what an earlier step, another batch, another chunking or the store
put there cannot be told apart, and rounding noise (1e-16) is too small to turn an argmax.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import blake3
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from client_sdk.engine.torch_engine.config import EngineSection
from client_sdk.engine.torch_engine.scheduler import Chunk
from emberkv_proto.layout import canonical_json

SPOKEN = range(32, 127)  # what the model may say: printable ASCII; prompts may hold any id


class TinyTransformer:
    """Weights and the forward pass. Holds no state between calls; not thread-safe on one pool."""

    def __init__(self, cfg: EngineSection) -> None:
        self.cfg = cfg
        rng = np.random.default_rng(cfg.seed)
        digest = blake3.blake3(canonical_json(["ember-1", cfg.layers, cfg.d_model, cfg.heads]))

        def matrix(rows: int, columns: int, gain: float = 1.0) -> Tensor:
            values = rng.standard_normal((rows, columns)) * (gain / rows**0.5)
            digest.update(values.tobytes())
            return torch.from_numpy(values)

        width, kv_width = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
        self.embedding = matrix(cfg.vocab, cfg.d_model, cfg.vocab**0.5)
        self.layers = [
            {
                # Sharp attention: an answer hangs on single earlier tokens, so wrong KV shows.
                "q": matrix(cfg.d_model, width, 3.0),
                "k": matrix(cfg.d_model, kv_width),
                "v": matrix(cfg.d_model, kv_width),
                "o": matrix(width, cfg.d_model),
                "gate_up": matrix(cfg.d_model, 2 * cfg.ffn),
                "down": matrix(cfg.ffn, cfg.d_model),
            }
            for _ in range(cfg.layers)
        ]
        self.head = matrix(cfg.d_model, cfg.vocab)
        self.weights_id: str = digest.hexdigest()[:32]
        """Digest of the very weights: another seed, size or generator is another namespace."""
        inverse = 10000.0 ** (-torch.arange(0, cfg.head_dim, 2, dtype=torch.float64) / cfg.head_dim)
        angles = torch.outer(torch.arange(cfg.max_model_len, dtype=torch.float64), inverse)
        self.cos, self.sin = angles.cos()[:, None], angles.sin()[:, None]

    @torch.inference_mode()
    def forward(
        self, pages: Tensor, chunks: Sequence[Chunk], before_layer: Callable[[int], object]
    ) -> list[int]:
        """Compute all rows, write their KV into `pages`, return each chunk's next token.

        `pages` is [layers, 2, blocks, block_tokens, kv_heads, head_dim]. `before_layer(n)` is
        called before layer n reads or writes its pages.
        """
        cfg = self.cfg
        tables = [torch.tensor(chunk.blocks) for chunk in chunks]
        rows = [len(chunk.tokens) for chunk in chunks]
        places = [torch.arange(c.start, c.start + n) for c, n in zip(chunks, rows, strict=True)]
        blocks = torch.cat([t[p // cfg.block_tokens] for t, p in zip(tables, places, strict=True)])
        positions = torch.cat(places)
        offsets = positions % cfg.block_tokens
        cos, sin = self.cos[positions], self.sin[positions]
        x = self.embedding[torch.tensor([token for chunk in chunks for token in chunk.tokens])]
        for number, layer in enumerate(self.layers):
            before_layer(number)
            h = _rms_norm(x)
            q = _rotate((h @ layer["q"]).view(-1, cfg.heads, cfg.head_dim), cos, sin)
            k = _rotate((h @ layer["k"]).view(-1, cfg.kv_heads, cfg.head_dim), cos, sin)
            v = (h @ layer["v"]).view(-1, cfg.kv_heads, cfg.head_dim)
            pages[number, 0].index_put_((blocks, offsets), k.float())
            pages[number, 1].index_put_((blocks, offsets), v.float())
            heard = [
                self._attend(pages[number], part, chunk.start, table)
                for part, chunk, table in zip(torch.split(q, rows), chunks, tables, strict=True)
            ]
            x = x + torch.cat(heard) @ layer["o"]
            gate, up = (_rms_norm(x) @ layer["gate_up"]).chunk(2, dim=1)
            x = x + (F.silu(gate) * up) @ layer["down"]
        last = torch.tensor(rows).cumsum(0) - 1
        logits = _rms_norm(x[last]) @ self.head[:, SPOKEN.start : SPOKEN.stop]
        return [SPOKEN.start + choice for choice in logits.argmax(dim=1).tolist()]

    def _attend(self, pages: Tensor, q: Tensor, start: int, table: Tensor) -> Tensor:
        """Causal attention of rows start.. over everything up to them, read from the pages."""
        context = start + len(q)
        used = table[: -(-context // self.cfg.block_tokens)]
        kv = pages[:, used].flatten(1, 2)[:, :context].double().transpose(1, 2)
        mask = torch.ones(len(q), context, dtype=torch.bool).tril(start)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], kv[None, 0], kv[None, 1], attn_mask=mask, enable_gqa=True
        )
        return out[0].transpose(0, 1).flatten(1)


def _rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-6)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on (first half, second half) pairs of each head."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
