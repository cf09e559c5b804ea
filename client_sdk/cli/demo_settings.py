"""What the demo sends and how small it makes the tiers, so that each of them has to work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from client_sdk.cli.cluster_plan import ClusterPlan, choose_port
from client_sdk.cli.openai_client import UNTOLD
from client_sdk.cli.process import ProcessSpec
from client_sdk.cli.trace import TokenRange, TraceRequest, load_trace, prompt_token_ids

MAX_TOKENS = 8
REFERENCE = "reference"
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class DemoEngine:
    """What the demo must know of the engines it runs."""

    model: str
    block_tokens: int
    vocab: int
    """Prompts are made of token ids below it."""
    store_sources: tuple[str, ...]
    """Where its answers say that tokens came from which its node's daemon had."""
    peer_sources: tuple[str, ...]

    @property
    def tells_sources(self) -> bool:
        """Whether its answers tell what it found in its own cache from what the store had."""
        return self.store_sources != (UNTOLD,)


TORCH_ENGINE = DemoEngine("ember-demo", 16, 4096, ("dram", "ssd"), ("peer",))


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """A prompt of the trace."""

    name: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DemoSize:
    """How much is sent, and how small the tiers are, so that each of them has to work."""

    requests: int
    longest_blocks: int
    """Longer requests of the trace are left out."""
    engine_blocks: int
    dram_bytes: int


FULL = DemoSize(requests=150, longest_blocks=1000, engine_blocks=320, dram_bytes=20 * MIB)
QUICK = DemoSize(requests=24, longest_blocks=20, engine_blocks=40, dram_bytes=2 * MIB)


def read_prompts(path: Path, size: DemoSize, engine: DemoEngine) -> list[DemoPrompt]:
    requests = load_trace(path, 10 * size.requests)
    fitting = [r for r in requests if len(r.block_ids) <= size.longest_blocks]
    return [_prompt(request, engine) for request in fitting[: size.requests]]


def _prompt(request: TraceRequest, engine: DemoEngine) -> DemoPrompt:
    tokens = prompt_token_ids(request, engine.block_tokens, TokenRange(0, engine.vocab))
    return DemoPrompt(f"trace request {request.number}", tuple(tokens))


def torch_engine_settings(size: DemoSize) -> tuple[str, ...]:
    """Of the reference engine."""
    return (
        f"engine.model={TORCH_ENGINE.model}",
        f"engine.vocab={TORCH_ENGINE.vocab}",
        f"engine.block_tokens={TORCH_ENGINE.block_tokens}",
        "engine.ffn=256",
        "engine.seed=1",
        f"engine.num_blocks={size.engine_blocks}",
        # A busy machine must not turn hits into misses.
        "engine.load_patience_seconds=10.0",
        "engine.store_timeout_seconds=10.0",
    )


def store_settings(size: DemoSize) -> tuple[str, ...]:
    """Small tiers: HBM holds less than DRAM, DRAM less than the trace, SSD all of it."""
    return (
        f"dram.capacity_bytes={size.dram_bytes}",
        f"dram.extent_bytes={MIB}",
        f"ssd.capacity_bytes={512 * MIB}",
        f"ssd.segment_bytes={8 * MIB}",
        "index.capacity_blocks=65536",
    )


def with_reference(plan: ClusterPlan) -> ClusterPlan:
    """Add the engine without any cache: no store, and no blocks kept for later requests."""
    node = plan.nodes[0].engine
    endpoint = plan.run_dir / f"{REFERENCE}.json"
    own = (
        f"engine.engine_id={REFERENCE}",
        "engine.socket_path=''",
        "engine.prefix_cache=false",
        f"engine.port={choose_port()}",
        f"engine.endpoint_file={endpoint}",
    )
    arguments = list(node.arguments)
    for override in own:
        arguments += ["--set", override]
    log = plan.log_dir / f"{REFERENCE}.log"
    spec: ProcessSpec = replace(
        node, name=REFERENCE, arguments=tuple(arguments), endpoint_file=endpoint, log_file=log
    )
    return replace(plan, extras=(spec,))
