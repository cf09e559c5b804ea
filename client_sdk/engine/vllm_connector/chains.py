"""The hash chain of a vLLM request, grown as tokens come."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from client_sdk.engine.weights import directory_id
from emberkv_proto.errors import EmberError
from emberkv_proto.hashing import ExtraKey, block_hashes, salt_id
from emberkv_proto.request_keys import adapter_key, media_key, salt_bytes
from emberkv_proto.types import BlockHash, NamespaceId

if TYPE_CHECKING:
    from vllm.v1.request import Request


class UncacheableRequestError(EmberError):
    """Something beside its tokens shapes the request's KV, and we have no key for it."""


class RequestChain:
    """Hashes of a request's full blocks. Raises UncacheableRequestError when it has none."""

    def __init__(self, request: Request, namespace_id: NamespaceId, block_tokens: int) -> None:
        _refuse_unknown(request)
        self._namespace_id = namespace_id
        self._block_tokens = block_tokens
        self._salt = salt_bytes(request.cache_salt)
        self.salt_id = salt_id(self._salt)
        self._adapter = _adapter_keys(request.lora_request)
        self._media = [
            (str(m.identifier), int(m.mm_position.offset), int(m.mm_position.length))
            for m in request.mm_features or ()
        ]
        self.hashes: list[BlockHash] = []

    def grow(self, tokens: Sequence[int]) -> list[BlockHash]:
        """All hashes of the full blocks of `tokens`, which only ever gets longer."""
        size = self._block_tokens
        known, full = len(self.hashes), len(tokens) // size
        if full > known:
            run = np.asarray(tokens[known * size : full * size], dtype=np.uint32)
            keys = {n: self._keys(known + n) for n in range(full - known)}
            self.hashes += block_hashes(
                self._namespace_id,
                run,
                size,
                salt=self._salt,
                extra_keys=keys if self._adapter or self._media else (),
                parent=self.hashes[-1] if known else None,
            )
        return self.hashes[:full]

    def _keys(self, block: int) -> list[ExtraKey]:
        start, end = block * self._block_tokens, (block + 1) * self._block_tokens
        media = [
            media_key(identifier, offset - start)
            for identifier, offset, length in self._media
            if offset < end and offset + length > start
        ]
        return [*self._adapter, *media]


def _refuse_unknown(request: Request) -> None:
    if request.prompt_embeds is not None:
        raise UncacheableRequestError("prompt embeddings")
    if not request.prompt_token_ids:
        raise UncacheableRequestError("no token ids")
    if getattr(request, "resumable", False):
        raise UncacheableRequestError("streaming input")


def _adapter_keys(lora: Any) -> list[ExtraKey]:
    if lora is None:
        return []
    path = Path(lora.lora_path)
    if not path.is_dir():
        raise UncacheableRequestError(f"adapter {lora.lora_name} is no local directory")
    return [adapter_key(str(lora.lora_name), f"{path}\0{directory_id(path)}")]
