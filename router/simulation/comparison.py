"""One workload under several policies, each on a cluster of its own in the same setting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import get_args

from router.candidates import make_policy
from router.config import PolicyName, RouterSection
from router.health import BreakerLimits
from router.preferences import first_speeds, preferences_of
from router.simulation.cluster import ClusterShape, PolicyMaker, Simulation, Troubles
from router.simulation.outcome import Outcome
from router.simulation.rivals import DynamoPolicy
from router.simulation.store import NodeStore, StoreLimits
from router.simulation.workload import BLOCK_TOKENS, Workload, offered

POLICIES: tuple[str, ...] = (*get_args(PolicyName), "dynamo")
"""Ours, and Dynamo's published formula. `round_robin` with a pool is what needs no router."""


@dataclass(frozen=True, slots=True)
class Setting:
    """`load`: how much of the time the engines would work if one cache without bounds served all.

    `bound_seconds`: a request counts as good when its first token comes within it.
    """

    nodes: int = 8
    tokens_per_node: int = 3_000_000
    is_pooled: bool = True
    load: float = 0.87
    bound_seconds: float = 10.0
    seed: int = 1
    router: RouterSection = field(default_factory=RouterSection)
    troubles: Troubles = field(default_factory=Troubles)

    def shape(self) -> ClusterShape:
        cfg = self.router
        return ClusterShape(
            self.nodes,
            StoreLimits(self.tokens_per_node // BLOCK_TOKENS),
            self.is_pooled,
            first_speeds(cfg),
            predicted_seconds=cfg.predicted_seconds,
            breaker=BreakerLimits(cfg.breaker_failures, cfg.breaker_open_seconds),
            probe_seconds=cfg.health_interval_seconds,
            retries=cfg.retries,
            retry_share=cfg.retry_share,
        )


def at_load(workload: Workload, setting: Setting) -> Workload:
    """The workload, as quick as the setting's load says."""
    speed = setting.nodes * setting.router.prefill_tokens_per_second
    return offered(workload, setting.load, speed)


def one_store_hit_rate(workload: Workload, setting: Setting) -> float:
    """Hit tokens over all in one store as large as all nodes' together, which answers at once.

    What routing can come near to while stores forget the least recently used.
    """
    limits = setting.shape().store
    store = NodeStore(replace(limits, blocks=limits.blocks * setting.nodes))
    hits = 0
    for item in workload.arrivals:
        held = store.hit_blocks(item.keys)
        hits += min(held * BLOCK_TOKENS, item.prompt_tokens)
        store.serve(item.keys, held, 0, item.seconds)
    return hits / workload.prompt_tokens


def simulate(
    workload: Workload,
    setting: Setting,
    name: str,
    on_progress: Callable[[int], None] = lambda _: None,
) -> Outcome:
    """Play the workload, which is at the setting's load already, with the policy called `name`."""
    simulation = Simulation(
        setting.shape(), policy_maker(name, setting.router), setting.seed, setting.troubles
    )
    return simulation.run(workload, setting.bound_seconds, on_progress)


def policy_maker(name: str, cfg: RouterSection) -> PolicyMaker:
    """Of one of `POLICIES`, with the router's settings."""
    if name == "dynamo":
        return DynamoPolicy
    preferences = preferences_of(cfg)
    return lambda _: make_policy(name, preferences)
