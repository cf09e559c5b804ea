"""Settings of the reference engine, and the namespace they make."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from client_sdk.settings import Section, Settings
from emberkv_proto.layout import Group, GroupKind, KvLayout, Namespace

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
KV_BYTES = 4  # KV is kept as float32


class EngineSection(Section):
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000  # 0 picks a free one
    advertised_url: str = ""  # where routers reach this engine; empty: http://host:port
    endpoint_file: Path | None = None  # gets the URL as JSON once the port is open
    engine_id: Annotated[str, Field(min_length=1, max_length=253)] = "engine"
    socket_path: str = ""  # of the store daemon; empty: no store
    role: Literal["both", "prefill", "decode"] = "both"  # what routers send here
    model: Annotated[str, Field(min_length=1)] = "ember-tiny"
    seed: int = 0
    layers: Count = 4
    d_model: Count = 256
    heads: Count = 8
    kv_heads: Count = 2
    head_dim: Count = 32
    ffn: Count = 704
    vocab: Annotated[int, Field(ge=260)] = 512
    block_tokens: Count = 16
    num_blocks: Annotated[int, Field(ge=2)] = 1024  # of the paged KV pool
    max_model_len: Annotated[int, Field(ge=2)] = 8192
    max_batch_tokens: Count = 256  # computed in one step; a longer prompt takes several
    max_running: Count = 16
    prefix_cache: bool = True  # keep the blocks of finished requests for later ones
    publishes_events: bool = False  # of the prefix cache, on ZMQ in vLLM's format
    events_port: Annotated[int, Field(ge=0, le=65534)] = 0  # the next one for replays; 0: free ones
    load_patience_seconds: Seconds = 0.05  # a load may take as long as recomputing, or this
    store_timeout_seconds: Seconds = 1.0
    save_queue_blocks: Count = 512  # when so many wait, a save is put off or skipped
    drain_seconds: Seconds = 5.0

    @model_validator(mode="after")
    def _consistent(self) -> EngineSection:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even (RoPE turns pairs)")
        return self

    @property
    def max_tokens(self) -> int:
        """Longest request, prompt and answer together, that the model and the pool can hold."""
        return min(self.max_model_len, self.num_blocks * self.block_tokens)

    def namespace(self, weights_id: str) -> Namespace:
        """Identity of this engine's blocks: one full-attention group, one shard."""
        layout = KvLayout("float32", self.layers, self.kv_heads, self.head_dim)
        part_bytes = self.layers * 2 * self.block_tokens * self.kv_heads * self.head_dim * KV_BYTES
        groups = (Group(GroupKind.FULL, self.layers, part_bytes),)
        identity = self.model, weights_id, "float32", layout.fingerprint
        return Namespace(*identity, self.block_tokens, groups)


class EngineSettings(Settings):
    engine: EngineSection = EngineSection()
