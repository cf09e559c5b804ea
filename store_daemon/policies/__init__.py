"""Orders in which blocks go. The leaf-first rule and pins are `eviction`'s, not a policy's."""

from __future__ import annotations

from store_daemon.policies.arc import ArcPolicy
from store_daemon.policies.base import EvictionPolicy as EvictionPolicy
from store_daemon.policies.cost import CostPolicy
from store_daemon.policies.lru import LruPolicy
from store_daemon.policies.reuse import ReusePolicy
from store_daemon.policies.s3fifo import S3FifoPolicy

POLICIES: dict[str, type[EvictionPolicy]] = {
    "lru": LruPolicy,
    "s3fifo": S3FifoPolicy,
    "arc": ArcPolicy,
    "cost": CostPolicy,
    "reuse": ReusePolicy,
}
"""By the name that `dram.policy` uses."""
