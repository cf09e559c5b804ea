"""How long and how much pulls may take of anybody, and what is counted of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from emberkv_proto.types import NodeId
from store_daemon.pull_plan import PullCosts


@dataclass(frozen=True, slots=True)
class PullLimits:
    index_seconds: float = 0.1
    nodes_seconds: float = 1.0
    """How long the nodes' addresses are believed."""
    acquire_seconds: float = 2.0
    guess_seconds: float = 0.25
    """For the answer of a node that is asked before the index is."""
    release_seconds: float = 1.0
    lease_margin_seconds: float = 2.0
    lease_seconds: float = 10.0
    """For one window, unless it is expected to take a good part of that: so long a node that died
    while it pulled keeps blocks of the owner's from eviction."""
    lease_times_expected: float = 5.0
    blame_seconds: float = 0.1
    """A peer that let a shorter deadline pass is not held to have failed."""
    blocks_per_pull: int = 4096
    lease_bytes: int = 64 << 20
    """What one lease is for, between the next two numbers of blocks: the owner brings so much from
    its drive before the first byte travels, and then the next as much meanwhile."""
    least_lease_blocks: int = 8
    most_lease_blocks: int = 256
    longest_wait_seconds: float = 0.5
    """For the next block of a node that is followed; then it is asked again."""
    owners_per_pull: int = 8
    """After so many owners a pull is over."""
    costs: PullCosts = field(default_factory=PullCosts)
    failed_block_seconds: float = 2.0
    """A peer that did not give a block is not asked for it again: its event is on the way."""
    failed_peer_seconds: float = 1.0
    """One that could not be reached is not asked for anything; then its breaker decides."""


@dataclass(slots=True)
class PullCounters:
    pulls: int = 0
    """Pulls that went to a peer."""
    pulled_blocks: int = 0
    pulled_bytes: int = 0
    unheld: int = 0
    """Pulls for which no peer that may be asked holds the first block."""
    guesses: int = 0
    """Nodes that were asked before the index was."""
    wrong_guesses: int = 0
    """Of them, those that lent nothing."""
    shared_blocks: int = 0
    """Blocks that were wanted while another pull was bringing them."""
    followed_blocks: int = 0
    """Of the pulled ones, those that came from a node while it computed them."""
    from_peer: Counter[NodeId] = field(default_factory=Counter)
    """Pulled bytes by owner."""
    failures: Counter[str] = field(default_factory=Counter)
    """By reason; see `failure_reason`, and too_slow, no_room, stale_index and index."""
