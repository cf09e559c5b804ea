"""Policies of others, for comparison in simulation only."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from router.candidates import Asked, Candidate
from router.simulation.workload import BLOCK_TOKENS

OWN_CREDIT = 1.0
ELSEWHERE_CREDIT = 0.5


class DynamoPolicy:
    """The published cost of Dynamo's KV router with its defaults (1.6, `scheduling/selector.rs`).

    Prefill blocks queued there and of the request, less the cached ones, plus the blocks of all
    requests that the engine would decode; lowest wins, ties by chance. What the node holds counts
    as its device's (credit 1), the kindest reading; what others hold as its shared tier (0.5), and
    nothing where there is no pool. Decay and temperature are 0, as they are by default.

    Args:
        decode_blocks: what each engine's requests hold now, by URL.
    """

    def __init__(self, decode_blocks: Mapping[str, int]) -> None:
        self._decode_blocks = decode_blocks

    def pick(self, asked: Asked, candidates: Sequence[Candidate], rng: random.Random) -> Candidate:
        own = -(-asked.prompt_tokens // BLOCK_TOKENS)
        costs = [self._cost(item, asked.prompt_tokens, own) for item in candidates]
        least = min(costs)
        return rng.choice(
            [item for item, cost in zip(candidates, costs, strict=True) if cost == least]
        )

    def _cost(self, item: Candidate, prompt_tokens: int, own_blocks: int) -> float:
        holding = item.holding
        credit = OWN_CREDIT * holding.node_tokens + ELSEWHERE_CREDIT * holding.peer_tokens
        prefill = (item.load.queued_prefill_tokens + prompt_tokens - credit) / BLOCK_TOKENS
        return max(0.0, prefill) + self._decode_blocks.get(item.url, 0) + own_blocks

    def routed(self, url: str) -> None:
        """Its load is the ledger's."""
