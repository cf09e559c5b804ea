"""Settings of the router. Sizes in bytes, times in seconds, speeds in tokens a second."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from client_sdk.logs import LogFormat, LogLevel
from client_sdk.settings import Section, Settings
from global_index.config import IndexSection

MIB = 1 << 20
Bytes = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]
Speed = Annotated[float, Field(gt=0)]
PolicyName = Literal["cost", "least_load", "round_robin", "max_hit", "consistent_hash", "lmetric"]
Port = Annotated[int, Field(ge=0, le=65535)]


class StaticEngine(BaseModel):
    """An engine named in the file; one that a daemon announces under the same URL completes it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    """http://host:port; a path prefix is refused."""
    node_id: str = ""
    """Node whose daemon the engine shares; empty means unknown, so only its load counts."""
    model: str = ""
    """Model it serves; empty means what its /v1/models says."""

    @field_validator("url")
    @classmethod
    def _plain(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.path.strip("/") or parts.query:
            raise ValueError(f"{url!r} must look like http://host:port")
        return url.rstrip("/")


class RouterSection(Section):
    host: str = "127.0.0.1"
    port: Port = 8000
    """Where clients send requests. 0 picks a free port."""
    endpoint_file: Path | None = None
    """JSON with url, index_address and pid, written whole once the router serves."""
    engines: tuple[StaticEngine, ...] = ()
    """Engines known from the start, beside those that daemons announce through the index."""
    ext_proc_port: Port | None = None
    """Where Envoys ask for an endpoint (gRPC, in the clear); None: not served. 0 picks a port."""
    ext_proc_fallbacks: Annotated[int, Field(ge=0, le=15)] = 2
    """Further endpoints named to Envoy, in order; 0 for a cluster that takes only one."""
    policy: PolicyName = "cost"
    """All but cost are for comparison. Switched live by POST /admin/policy."""

    ui: bool = True
    """Serve the page /ui. Its data is for whoever may call /admin."""
    operator_token_file: Path | None = None
    """Secret that calls of /admin from other machines send; without it only loopback may call."""

    key_file: Path | None = None
    """API keys and tenants, written by `emberkv router-key`; without it everybody may call."""
    tenant_secret_file: Path | None = None
    """Secret of the cluster, of which tenants' cache salts are made; the same for all routers."""

    prefill_tokens_per_second: Speed = 5000.0
    """First guess of an engine's prefill speed. It and the next four are learned from answers."""
    prefill_quadratic_seconds: Annotated[float, Field(ge=0, le=1e-5)] = 0.0
    """What each computed token costs besides, per token of context before it."""
    dram_tokens_per_second: Speed = 200_000.0
    """Tokens' KV that go from the node's pool into the engine."""
    ssd_tokens_per_second: Speed = 40_000.0
    peer_tokens_per_second: Speed = 30_000.0
    peer_setup_seconds: Annotated[float, Field(ge=0)] = 0.003
    """Once for each pull from another node."""
    decode_request_seconds: Annotated[float, Field(ge=0)] = 0.02
    """What each active request adds to an engine's queue."""
    learned_seconds: Seconds = 600.0
    """How long a measured speed counts; an engine without newer ones is taken for the median."""
    near_best_fraction: Annotated[float, Field(gt=0, le=1)] = 0.8
    """An engine is a candidate when it holds this part of the best hit."""
    least_loaded_candidates: Annotated[int, Field(ge=1)] = 2
    """And so are this many engines with the shortest queues."""
    tie_seconds: Annotated[float, Field(ge=0)] = 0.001
    """Estimates this close are equal: less to compute decides, then fewer requests, then chance."""
    tie_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """And so are those within this part of the best one."""
    copy_factor: Annotated[float, Field(ge=0, le=10)] = 1.0
    """What a second copy of a block costs in the choice, in times of computing it: it displaces
    another one. 0: only the first token counts. Lower keeps short prompts' waits even, higher
    keeps more of what fits (docs/simulation.md)."""
    predicted_seconds: Seconds = 3.0
    """How long a routed chain counts as present on its engine before any event says so."""

    prefetch_hints: bool = True
    """Tell the chosen node's daemon to bring what is on its SSD or elsewhere while a request waits
    for its engine; ends with the request."""
    prefetch_queue_seconds: Annotated[float, Field(ge=0)] = 0.02
    """A request that waits for less, by the estimate, gets no hint."""
    remote_prefill_tokens: Annotated[int, Field(ge=1)] = 256
    """A decode engine that has less than this left to compute prefills itself."""
    remote_prefill_factor: Annotated[float, Field(gt=0)] = 3.0
    """So does one whose prefill engines would take so many times as long."""
    handover_patience_seconds: Annotated[float, Field(gt=0, le=600)] = 5.0
    """How long the decode node waits for the prefill node's next block, beyond what the prefill is
    estimated to take."""
    handover_seconds: Seconds = 1.0
    """How long a decode engine is kept waiting for the last blocks once the prefill is over."""

    retries: Annotated[int, Field(ge=0, le=16)] = 2
    """Further engines tried when one fails before the first byte of its response."""
    retry_share: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Of all requests, how many may be retries; a hundred may come at once."""
    connect_seconds: Seconds = 2.0
    response_seconds: Seconds = 600.0
    """From request to response head; a prefill may take long."""
    idle_seconds: Seconds = 600.0
    """Between two pieces of a response body."""
    max_inflight_per_engine: Annotated[int, Field(ge=1)] = 256
    max_queued_tokens_per_engine: Annotated[int, Field(ge=1)] = 2_000_000
    """An engine with so many tokens sent to it and not yet prefilled is full."""
    queue_requests: Annotated[int, Field(ge=0)] = 256
    """Requests that may wait while all engines of their model are full; 0 refuses them at once."""
    queue_seconds: Seconds = 10.0
    """How long one waits at most."""
    retry_after_seconds: Annotated[int, Field(ge=1)] = 1
    """Said with 503 (no engine healthy), and the least said with 429 (all full)."""
    max_retry_after_seconds: Annotated[int, Field(ge=1)] = 60
    """The most said with 429, whatever the line looks like."""
    pooled_connections: Annotated[int, Field(ge=0)] = 64
    """Idle connections kept per engine."""
    pooled_seconds: Seconds = 4.0
    """Below the keep-alive time of common engine servers (5 s), so that few go stale."""

    tokenizers: dict[str, Path] = Field(default_factory=dict)
    """Model -> directory with its tokenizer.json and chat template: its prompts' tokens are made
    here; the first ones and some later ones are compared with the engine's."""
    tokenize_seconds: Seconds = 0.5
    """Deadline of an engine's /tokenize; after it the request goes by load."""
    tokenize_cache_tokens: Annotated[int, Field(ge=0)] = 16_000_000
    """Token ids kept (4 bytes each); what a prompt costs beside them counts too."""
    hash_cache_blocks: Annotated[int, Field(ge=0)] = 500_000
    """Blocks whose hashes are kept for prompts that go on from them (some 90 bytes each)."""

    health_interval_seconds: Seconds = 1.0
    health_timeout_seconds: Seconds = 1.0
    breaker_failures: Annotated[int, Field(ge=1)] = 3
    breaker_open_seconds: Seconds = 2.0
    forget_seconds: Seconds = 60.0
    """An announced engine that is neither healthy nor announced for so long is dropped."""
    sync_seconds: Seconds = 0.25
    """How often the engines that daemons announce are read from the index."""

    max_body_bytes: Bytes = 16 * MIB
    max_header_bytes: Bytes = 32 * 1024
    client_idle_seconds: Seconds = 75.0
    """A client connection without a request, or with half a one, is closed after it."""
    drain_seconds: Annotated[float, Field(ge=0)] = 20.0
    """On SIGTERM, how long requests in flight may go on."""
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    """text for people, json (a line each) for a log collector."""

    @model_validator(mode="after")
    def _keys_need_a_secret(self) -> RouterSection:
        if self.key_file is not None and self.tenant_secret_file is None:
            raise ValueError("key_file needs tenant_secret_file, of which cache salts are made")
        return self


class RouterSettings(Settings):
    router: RouterSection = RouterSection()
    index: IndexSection = IndexSection()
