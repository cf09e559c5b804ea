"""SGLang's own controller saves pages with our backend, forgets them, and has them back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.daemon_process import MIB, DaemonProcess
from tests.helpers.sglang_process import run

pytestmark = pytest.mark.timeout(600)
SCRIPT = Path(__file__).parent / "in_sglang_controller.py"
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
