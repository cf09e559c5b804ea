"""Prefill on one node, decode on another: same answers, blocks on the way while they are made, and
whatever dies in between, an answer."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from emberkv_proto.types import Tier
from tests.helpers.cluster import wait_until
from tests.helpers.split_site import MODEL, Completion, SplitSite
from tests.helpers.torch_engines import TINY, uncached_answers

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
BLOCK_TOKENS = int(TINY["block_tokens"])
ANSWER = 9


def prompt(number: int, tokens: int) -> list[int]:
    return [(7 * position * (number + 3) + number) % 251 for position in range(tokens)]


def test_prompt_is_prefilled_elsewhere_and_its_blocks_come_while_it_is(tmp_path: Path) -> None:
    first, short = prompt(1, 1201), prompt(2, 40)
    expected = uncached_answers([first, short], ANSWER, **MODEL)
    with SplitSite(tmp_path, prefill_step_tokens=16, decoders=1) as site:
        answer = site.complete(first, ANSWER)
        assert (answer.status, answer.token_ids) == (200, expected[0]), answer.text
        assert answer.engine == "decode-0"
        assert site.metric("splits_total", '{decided="remote"}') == 1
        assert site.metric("remote_prefills_total", '{outcome="done"}') == 1
        # Everything but the last token came from the prefill engine, much of it before its end.
        details = answer.usage["prompt_tokens_details"]
        assert details["dram_tokens"] + details["peer_tokens"] == 1200
        during = site.metric("handover_blocks_total", '{when="during"}')
        after = site.metric("handover_blocks_total", '{when="after"}')
        assert during + after == 300
        assert during > 100
        assert site.node_d.counter("pulled_blocks") >= 300
        assert site.node_d.counter("handovers") == 1
        assert site.metric("first_byte_seconds_count", '{prefill="remote"}') == 1
        # The prefill node keeps them too, on SSD a little later.
        wait_until(
            lambda: site.node_p.gauge(f'blocks{{tier="{Tier.SSD.name.lower()}"}}') >= 300,
            "the prefill node has written its blocks back",
        )

        # What little is left is prefilled where it is decoded.
        answer = site.complete(short, ANSWER)
        assert answer.token_ids == expected[1]
        assert site.metric("splits_total", '{decided="short"}') == 1

        # The next turn finds the answer's blocks at home: they were written back meanwhile.
        turn = [*first, *expected[0], *prompt(3, 30)]
        blocks = (len(first) + ANSWER - 1) // BLOCK_TOKENS
        wait_until(
            lambda: site.node_d.counter("committed_parts") >= blocks - 300,
            "the decode engine has saved the full blocks of its answer",
        )
        answer = site.complete(turn, ANSWER)
        assert (answer.token_ids,) == tuple(uncached_answers([turn], ANSWER, **MODEL))
        details = answer.usage["prompt_tokens_details"]
        assert details["cached_tokens"] >= blocks * BLOCK_TOKENS
        assert site.metric("splits_total", '{decided="remote"}') == 1


@pytest.mark.slow
def test_whatever_dies_while_blocks_travel_the_client_gets_its_answer(tmp_path: Path) -> None:
    prompts = [prompt(10 + number, 1601) for number in range(5)]
    expected = uncached_answers(prompts, ANSWER, **MODEL)
    with SplitSite(tmp_path, prefill_step_tokens=8) as site:

        def in_mid_transfer(number: int, act: Callable[[], None], what: str) -> Completion:
            before = site.node_d.counter("pulled_blocks")
            asked = site.ask(prompts[number], ANSWER)
            wait_until(
                lambda: site.node_d.counter("pulled_blocks") > before + 5,
                f"blocks travel before the end of {what} {number}",
                180,
            )
            act()
            answer = asked.answer()
            got = answer.status, answer.token_ids
            assert got == (200, expected[number]), f"{what}: {answer.text}"
            return answer

        fresh = itertools.count(100)

        def blocks_travel() -> bool:
            """What was dead is asked again only after a while, by each of those that know it."""
            before = site.node_d.counter("pulled_blocks")
            assert site.complete(prompt(next(fresh), 200), 1).status == 200
            return site.node_d.counter("pulled_blocks") > before

        for number, victim in enumerate((site.prefill, site.node_p, site.node_d)):
            in_mid_transfer(number, victim.kill, victim.name)
            site.start_again(victim)
            wait_until(blocks_travel, f"blocks travel again after the end of {victim.name}")
        in_mid_transfer(3, site.prefill.pause, "a prefill engine that stands still")
        site.prefill.resume()
        site.await_ready()
        wait_until(blocks_travel, "blocks travel again after the prefill engine stood still")
        answer = in_mid_transfer(4, site.decoders[0].kill, "decode engine")
        assert answer.engine == "decode-1"
        assert site.metric("remote_prefills_total", '{outcome="failed"}') >= 1
        assert site.metric("remote_prefills_total", '{outcome="cut"}') >= 1
        wait_until(lambda: site.node_p.gauge("leases") == 0, "no lease is left")
