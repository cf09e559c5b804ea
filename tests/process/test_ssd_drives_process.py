"""A whole daemon on two drives, of which one goes away: while it serves, and before it starts."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from emberkv_proto.types import Tier
from tests.helpers.chains import chain_of, read_chain, write_chain
from tests.helpers.cluster import NodeProcess, wait_until

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]
CHAINS = range(1, 9)


class TwoDriveNode(NodeProcess):
    """DRAM for a few blocks, so that most must come from the drives."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, "node-a", 15, 64, {})
        self.drives = (directory / "drive-a", directory / "drive-b")

    def _settings(self) -> Mapping[str, Any]:
        settings = dict(super()._settings())
        del settings["ssd.path"]
        return {**settings, "ssd.paths": f"[{self.drives[0]}, {self.drives[1]}]"}

    def on_ssd(self) -> int:
        return int(self.gauge('blocks{tier="ssd"}'))

    def is_ok(self, drive: Path) -> bool:
        return self.gauge(f'ssd_drive_ok{{drive="{drive}"}}') == 1


def write_all(node: TwoDriveNode) -> None:
    with node.client() as client:
        for number in CHAINS:
            assert len(write_chain(client, chain_of(number, 6))) == 6
            wait_until(node.is_at_rest, "it is written back")


def read_all(node: TwoDriveNode) -> int:
    """Blocks that can be read, their bytes being right."""
    with node.client(10.0) as client:
        return sum(read_chain(client, chain_of(number, 6)) for number in CHAINS)


def test_a_drive_that_goes_away_costs_its_own_blocks_and_brings_them_back(tmp_path: Path) -> None:
    with TwoDriveNode(tmp_path) as node:
        write_all(node)
        assert node.on_ssd() == 48
        a, b = node.drives
        away = a.with_name("away")
        a.rename(away)
        a.mkdir()
        assert read_all(node) < 48
        wait_until(lambda: not node.is_ok(a), "the daemon notices")
        wait_until(node.is_at_rest, "what DRAM had is written to the other drive")
        assert node.is_ok(b)
        assert str(a) in node.tier_state(Tier.SSD)
        assert 0 < node.on_ssd() < 48
        node.check_integrity()
        assert list(a.iterdir()) == []

        a.rmdir()
        away.rename(a)
        wait_until(lambda: node.is_ok(a) and node.on_ssd() == 48, "the drive is taken back")
        assert node.tier_state(Tier.SSD) == "ok"
        assert read_all(node) == 48
        node.check_integrity()


def test_a_daemon_starts_without_one_of_its_drives_after_a_kill(tmp_path: Path) -> None:
    with TwoDriveNode(tmp_path) as node:
        write_all(node)
        node.kill()
        a, b = node.drives
        away = a.with_name("away")
        a.rename(away)
        node.start()
        assert not node.is_ok(a)
        assert node.is_ok(b)
        assert 0 < node.on_ssd() < 48
        read_all(node)
        node.kill()
        shutil.rmtree(a, ignore_errors=True)
        away.rename(a)
        node.start()
        assert node.is_ok(a)
        assert node.on_ssd() == 48
        assert read_all(node) == 48
        node.check_integrity()
