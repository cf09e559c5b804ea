"""t(i): how many seconds until engine i would give the first token. Pure.

`t(i) = queue(i) + fetch(blocks by tier, peer) + prefill(rest)`. The leading blocks come nearest
first: in HBM, told or predicted (free), the node's own DRAM and SSD, then another node's. A prefix
can be used only from its start, so the choice is where to stop fetching: each further stretch is
taken when fetching it costs less than computing it.

Values here are never changed; those made for each request are not frozen, since that takes three
times as long.
"""

from __future__ import annotations

from dataclasses import dataclass

from emberkv_proto.types import EngineHit, NodeHit


@dataclass(frozen=True, slots=True)
class Speeds:
    """What the estimate multiplies with."""

    prefill_tokens_per_second: float
    dram_tokens_per_second: float
    ssd_tokens_per_second: float
    peer_tokens_per_second: float
    peer_setup_seconds: float
    decode_request_seconds: float
    prefill_quadratic_seconds: float = 0.0
    """For each computed token, per token that it attends to."""

    def work_seconds(self, tokens: int, pairs: int) -> float:
        """How long prefilling so many tokens takes; `pairs`: see `attention_pairs`."""
        return tokens / self.prefill_tokens_per_second + pairs * self.prefill_quadratic_seconds


def attention_pairs(computed_tokens: int, prompt_tokens: int) -> int:
    """Computed tokens times their mean context, when they are the last ones of the prompt."""
    return computed_tokens * (prompt_tokens - computed_tokens // 2)


@dataclass(slots=True)
class Load:
    """What an engine still has to do, as this router knows it."""

    active_requests: int = 0
    queued_prefill_tokens: int = 0
    queued_attention_pairs: int = 0
    first_tokens: int = 0
    """Of the queued ones, those of the request that is prefilled first."""
    first_attention_pairs: int = 0
    first_seconds: float = 0.0
    """How long the engine may have worked on it."""


@dataclass(slots=True)
class Holding:
    """Leading tokens of a chain by where one engine finds them; they follow each other."""

    hbm_tokens: int = 0
    dram_tokens: int = 0
    ssd_tokens: int = 0
    peer_tokens: int = 0

    @property
    def node_tokens(self) -> int:
        """What is here without asking another node."""
        return self.hbm_tokens + self.dram_tokens + self.ssd_tokens


@dataclass(slots=True)
class Estimate:
    """The terms of t(i). `used` is the part of the holding worth fetching."""

    queue_seconds: float
    fetch_seconds: float
    prefill_seconds: float
    used: Holding
    uncached_tokens: int

    @property
    def total_seconds(self) -> float:
        return self.queue_seconds + self.fetch_seconds + self.prefill_seconds


NOTHING = Holding()


@dataclass(slots=True)
class OwnHit:
    """What an engine finds without asking another node; blocks in no order of their tiers."""

    hit_blocks: int = 0
    hbm_blocks: int = 0
    dram_blocks: int = 0


def own_hit(node: NodeHit | None, engine: EngineHit | None) -> OwnHit:
    """What the index knows of an engine: of its node, and of itself if it publishes its events.

    An engine's hit has its node's blocks in it already, unless its node is followed elsewhere.
    """
    hit = engine.hit_blocks if engine else 0
    hbm = engine.hbm_blocks if engine else 0
    if node is None or hit >= node.hit_blocks:
        return OwnHit(hit, hbm, engine.dram_blocks if engine else 0)
    return OwnHit(node.hit_blocks, hbm, max(0, node.dram_blocks - hbm))


def holding_from(
    own: OwnHit, best_other_blocks: int, predicted_blocks: int, block_tokens: int
) -> Holding:
    """Lay what is told of an engine, what is predicted, and the best other node one over another.

    A prediction fills what events have not told yet: those blocks are being brought to HBM, and
    are taken off the DRAM part first.
    """
    hbm = max(own.hbm_blocks, predicted_blocks)
    beyond = max(0, own.hit_blocks - hbm)
    dram = min(beyond, max(0, own.dram_blocks - (hbm - own.hbm_blocks)))
    peer = max(0, best_other_blocks - max(predicted_blocks, own.hit_blocks))
    return Holding(
        hbm * block_tokens,
        dram * block_tokens,
        (beyond - dram) * block_tokens,
        peer * block_tokens,
    )


def queue_seconds(load: Load, speeds: Speeds) -> float:
    """Seconds of work ahead of a request that comes now.

    Of the first queued request, what the time since it could begin has done is taken off; no more,
    so that an engine that has stopped does not look idle.
    """
    seconds = load.active_requests * speeds.decode_request_seconds
    if load.queued_prefill_tokens:
        # As work_seconds would say; written out, since it is asked for every engine twice.
        token, pair = speeds.prefill_tokens_per_second, speeds.prefill_quadratic_seconds
        first = load.first_tokens / token + load.first_attention_pairs * pair
        queued = load.queued_prefill_tokens / token + load.queued_attention_pairs * pair
        seconds += queued - min(load.first_seconds, first)
    return seconds


def estimate(prompt_tokens: int, holding: Holding, load: Load, speeds: Speeds) -> Estimate:
    """Return the terms with the best stopping point. At least one token is always computed."""
    queue = queue_seconds(load, speeds)
    if not (holding.dram_tokens or holding.ssd_tokens or holding.peer_tokens):
        rest = max(1, prompt_tokens - holding.hbm_tokens)
        prefill = speeds.work_seconds(rest, attention_pairs(rest, prompt_tokens))
        return Estimate(queue, 0.0, prefill, holding, rest)
    local = holding.dram_tokens / speeds.dram_tokens_per_second
    local += holding.ssd_tokens / speeds.ssd_tokens_per_second
    peer = holding.peer_tokens / speeds.peer_tokens_per_second
    stops = [(0.0, Holding(holding.hbm_tokens))]
    if holding.dram_tokens or holding.ssd_tokens:
        here = Holding(holding.hbm_tokens, holding.dram_tokens, holding.ssd_tokens)
        stops.append((local, here))
    if holding.peer_tokens:
        stops.append((local + peer + speeds.peer_setup_seconds, holding))
    best: Estimate | None = None
    for fetch, used in stops:
        rest = max(1, prompt_tokens - used.node_tokens - used.peer_tokens)
        prefill = speeds.work_seconds(rest, attention_pairs(rest, prompt_tokens))
        option = Estimate(queue, fetch, prefill, used, rest)
        if best is None or option.total_seconds < best.total_seconds:
            best = option
    assert best is not None
    return best
