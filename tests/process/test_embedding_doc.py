"""The connector that docs/embedding.md shows is run as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.daemon_process import ROOT, DaemonProcess

pytestmark = pytest.mark.process
LAYERS, PAGES, PAGE_TOKENS, HEADS, DIM = 3, 12, 4, 2, 8
TOKENS = list(range(100, 100 + 5 * PAGE_TOKENS + 2))
OWN_PAGES = [7, 2, 11, 0, 5, 3]


def shown() -> list[str]:
    text = (ROOT / "docs" / "embedding.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


class Engine:
    """Its KV of a token depends on all tokens up to it, as attention's does."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.kv = torch.zeros(LAYERS, 2, PAGES, PAGE_TOKENS, HEADS, DIM, dtype=torch.bfloat16)
        self.prefilled = 0
        connector, use = shown()
        start, _, self._use = use.partition("\n\n")
        start = start.replace("/run/emberkv/daemon.sock", str(daemon.socket_path))
        assert str(daemon.socket_path) in start
        self.scope: dict[str, Any] = {"kv": self.kv, "prefill": self.prefill}
        exec(connector + start, self.scope)  # noqa: S102 - our own page

    def serve(self, tokens: list[int], pages: list[int]) -> int:
        """Run the page's lines for a request; returns how many tokens need not be computed."""
        self.scope |= {"token_ids": tokens, "pages": pages}
        exec(self._use, self.scope)  # noqa: S102
        return int(self.scope["computed"])

    def prefill(self, tokens: list[int], pages: list[int], computed: int) -> None:
        for place in range(computed, len(tokens)):
            self.prefilled += 1
            value = torch.full((LAYERS, 2, HEADS, DIM), float(sum(tokens[: place + 1]) % 251))
            page, row = pages[place // PAGE_TOKENS], place % PAGE_TOKENS
            self.kv[:, :, page, row] = value.to(torch.bfloat16)

    def pages_of(self, pages: list[int], tokens: int) -> torch.Tensor:
        full = self.kv[:, :, pages].flatten(2, 3)
        return full[:, :, :tokens].clone()

    def close(self) -> None:
        self.scope["store"].client.close()


def test_the_connector_of_the_page_stores_finds_and_survives_its_daemon(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path) as daemon:
        first, second = Engine(daemon), Engine(daemon)
        assert first.serve(TOKENS, OWN_PAGES) == 0
        first.close()
        # Another process' life: other pages, nothing in them.
        assert second.serve(TOKENS, OWN_PAGES[::-1]) == 5 * PAGE_TOKENS
        assert second.prefilled == 2
        count = len(TOKENS)
        assert torch.equal(
            first.pages_of(OWN_PAGES, count), second.pages_of(OWN_PAGES[::-1], count)
        )
        second.close()

        third = Engine(daemon)
        # A full last page: its last token is computed all the same, so it is not loaded.
        assert third.serve(TOKENS[: 5 * PAGE_TOKENS], OWN_PAGES) == 4 * PAGE_TOKENS
        assert third.serve([1], OWN_PAGES) == 0, "shorter than a page"
        store = third.scope["store"]
        assert store.load(TOKENS, OWN_PAGES, salt=b"another tenant") == 0
        daemon.kill()
        assert store.load(TOKENS, OWN_PAGES) == 0
        assert store.save(TOKENS, OWN_PAGES) == 0
        daemon.start()
        third.close()
        fourth = Engine(daemon)
        assert fourth.serve(TOKENS, OWN_PAGES) == 5 * PAGE_TOKENS, "kept over the daemon's end"
        fourth.close()


def test_the_connector_is_as_short_as_the_page_says() -> None:
    connector, use = shown()
    code = [line for line in (connector + use).splitlines() if line.strip()]
    assert len(code) <= 55
