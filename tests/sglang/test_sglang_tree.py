"""SGLang's own radix tree, fixtures and assertions, with our backend below them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.daemon_process import MIB, DaemonProcess
from tests.helpers.sglang_process import run

pytestmark = pytest.mark.timeout(600)
SCRIPT = Path(__file__).parent / "in_sglang_tree.py"


def test_the_fixtures_of_sglang_hold_with_our_backend(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, capacity_bytes=128 * MIB) as daemon:
        run(SCRIPT, str(daemon.socket_path))
        with daemon.operator() as operator:
            assert operator.check() == []
