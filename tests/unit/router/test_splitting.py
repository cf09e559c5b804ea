"""When a prompt is prefilled on an engine of its own."""

from __future__ import annotations

from router.scoring import Estimate, Holding
from router.splitting import Split, SplitRules, judge

RULES = SplitRules(least_tokens=256, slowest_factor=3.0)


def takes(seconds: float, uncached_tokens: int = 1000) -> Estimate:
    return Estimate(0.0, 0.0, seconds, Holding(), uncached_tokens)


def test_long_rest_goes_to_a_prefill_engine() -> None:
    assert judge(takes(1.0, 256), takes(1.0), RULES) is Split.REMOTE


def test_short_rest_is_prefilled_where_it_is_decoded() -> None:
    assert judge(takes(1.0, 255), takes(0.1), RULES) is Split.SHORT
    assert judge(takes(1.0, 255), None, RULES) is Split.SHORT


def test_busy_prefill_engines_are_passed_over_beyond_the_factor() -> None:
    assert judge(takes(1.0), takes(3.0), RULES) is Split.REMOTE
    assert judge(takes(1.0), takes(3.1), RULES) is Split.SLOW


def test_without_a_prefill_engine_the_decode_engine_prefills() -> None:
    assert judge(takes(1.0), None, RULES) is Split.NO_ENGINE
