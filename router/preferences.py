"""What the router's choice takes from its configuration, for the router and for its simulation."""

from __future__ import annotations

from router.candidates import Preferences
from router.config import RouterSection
from router.scoring import Speeds


def preferences_of(cfg: RouterSection) -> Preferences:
    """What policies weigh by."""
    return Preferences(
        cfg.near_best_fraction,
        cfg.least_loaded_candidates,
        cfg.tie_seconds,
        cfg.tie_fraction,
        cfg.copy_factor,
    )


def first_speeds(cfg: RouterSection) -> Speeds:
    """What is assumed of an engine before anything was measured."""
    return Speeds(
        prefill_tokens_per_second=cfg.prefill_tokens_per_second,
        dram_tokens_per_second=cfg.dram_tokens_per_second,
        ssd_tokens_per_second=cfg.ssd_tokens_per_second,
        peer_tokens_per_second=cfg.peer_tokens_per_second,
        peer_setup_seconds=cfg.peer_setup_seconds,
        decode_request_seconds=cfg.decode_request_seconds,
        prefill_quadratic_seconds=cfg.prefill_quadratic_seconds,
    )
