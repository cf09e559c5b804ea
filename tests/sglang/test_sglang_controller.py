"""SGLang's own controller saves pages with our backend, forgets them, and has them back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.daemon_process import MIB, DaemonProcess
from tests.helpers.sglang_process import run, run_together

pytestmark = pytest.mark.timeout(1200)
SCRIPT = Path(__file__).parent / "in_sglang_controller.py"
RANKS_SCRIPT = Path(__file__).parent / "in_sglang_ranks.py"
WANTED = (
    "mha:page_first",
    "mha:page_first_direct",
    "mha:page_head",
    "mha:layer_first",
    "mha:page_first:flat",
    "mha:layer_first:flat",
    "mla:page_first",
    "mla:page_first_direct",
    "mla:layer_first",
    "mla:layer_first:flat",
)
PAGES, PAGE_TOKENS = 300, 16


def test_pages_come_back_bit_by_bit_in_every_layout_and_by_both_kinds_of_calls(
    tmp_path: Path,
) -> None:
    with DaemonProcess(tmp_path, capacity_bytes=128 * MIB) as daemon:
        said = run(SCRIPT, str(daemon.socket_path), *WANTED)
        with daemon.operator() as operator:
            assert operator.check() == []
            assert operator.status().tiers[0].blocks == len(WANTED) * PAGES
    results = [json.loads(line) for line in said.splitlines() if line.startswith('{"wanted"')]
    assert [result["wanted"] for result in results] == list(WANTED)
    tokens = PAGES * PAGE_TOKENS
    for result in results:
        assert (result["before"], result["saved"], result["again"]) == (0, tokens, tokens), result
        assert (result["found"], result["came"]) == (tokens, tokens), result
        assert result["equal"], result
        assert result["crossed"], result
        assert result["moved_somewhere"], result
        # The last one is the page that was read alone.
        assert result["pages_in_stats"] == [PAGES + 1, PAGES], result
        counts = result["counts"]
        assert (counts["saved_pages"], counts["present_pages"]) == (PAGES, PAGES)
        assert counts["errors"] == counts["failed_pages"] == counts["lost_saves"] == 0


def test_two_ranks_have_their_own_parts_back_and_of_equal_ones_the_first_writes(
    tmp_path: Path,
) -> None:
    wanted = ("mha:page_first", "mla:page_first")
    with DaemonProcess(tmp_path, capacity_bytes=128 * MIB) as daemon:
        meeting, place = str(tmp_path / "meeting"), str(daemon.socket_path)
        each = [(str(rank), meeting, place, *wanted) for rank in (0, 1)]
        said = "".join(run_together(RANKS_SCRIPT, each, tmp_path))
        with daemon.operator() as operator:
            assert operator.check() == []
            assert operator.status().tiers[0].blocks == len(wanted) * PAGES
    tokens = PAGES * PAGE_TOKENS
    results = [json.loads(line) for line in said.splitlines() if line.startswith('{"rank"')]
    by_case = {(result["wanted"], result["rank"]): result for result in results}
    assert by_case.keys() == {(one, rank) for one in wanted for rank in (0, 1)}
    for (one, rank), result in by_case.items():
        is_mla = one.startswith("mla")
        # With one rank's part only there is no block; equal bytes are there once rank 0 wrote.
        assert result["found_between"] == (tokens if is_mla else 0), result
        assert result["saved"] == (0 if is_mla and rank else tokens), result
        assert (result["found"], result["came"], result["equal"]) == (tokens, tokens, True), result
        assert result["counts"]["saved_pages"] == (0 if is_mla and rank else PAGES), result
        assert result["counts"]["errors"] == result["counts"]["failed_pages"] == 0, result
