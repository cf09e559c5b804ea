"""Two vLLM servers on two nodes behind our router: requests follow their cache, also to a peer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks._vllm import PAGE_TOKENS
from tests.helpers.vllm_site import VllmSite

pytestmark = pytest.mark.timeout(900)
CONVERSATIONS = 6
FIRST_TOKENS = 300


def test_a_follow_up_goes_where_its_prefix_is_and_moves_with_its_cache(
    model: Path, tmp_path: Path
) -> None:
    with VllmSite(tmp_path, model) as site:
        url = site.router_url
        rng = random.Random(12)
        talks = [[rng.randrange(250) for _ in range(FIRST_TOKENS)] for _ in range(CONVERSATIONS)]
        homes = []
        for talk in talks:
            answer = site.complete(url, talk)
            homes.append(answer.engine)
            talk += answer.tokens
        assert len(set(homes)) == 2, "all went to one engine: no proof"
        site.settle()
        for turn in range(2):
            for talk, home in zip(talks, homes, strict=True):
                known = len(talk) // PAGE_TOKENS * PAGE_TOKENS
                talk += [rng.randrange(250) for _ in range(40)]
                answer = site.complete(url, talk)
                assert answer.engine == home, f"turn {turn} left its prefix"
                assert answer.cached >= known - PAGE_TOKENS
                talk += answer.tokens
            site.settle()

        site.servers[0].kill()
        moved = [talk for talk, home in zip(talks, homes, strict=True) if home == "vllm-0"]
        assert moved
        for talk in moved:  # what the dead engine's node has is one pull away
            talk += [rng.randrange(250) for _ in range(40)]
            answer = site.complete(url, talk)
            assert answer.engine == "vllm-1"
            assert answer.cached >= FIRST_TOKENS, site.daemons[1].log
