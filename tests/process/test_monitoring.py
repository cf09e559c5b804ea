"""Rules and dashboards ask for what the servers export; each alert has its line in the docs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.daemon_process import ROOT, DaemonProcess
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.router_client import request
from tests.helpers.router_process import router_process

pytestmark = pytest.mark.process
RULES = ROOT / "deploy/prometheus/emberkv.rules.yaml"
CASES = ROOT / "deploy/prometheus/emberkv.rules.test.yaml"
DASHBOARDS = sorted((ROOT / "deploy/grafana").glob("*.json"))
_NAME = re.compile(r"\bemberkv_[a-z0-9_]+")
_SELECTOR = re.compile(r"\b(emberkv_[a-z0-9_]+)\{([^}]*)\}")
TARGET_LABELS = {"instance", "job", "namespace", "le"}
"""Which Prometheus adds, and buckets' own."""


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["panels"]
    return found


def expressions() -> list[str]:
    shown = [t["expr"] for path in DASHBOARDS for p in panels(path) for t in p["targets"]]
    assert len(shown) > 40
    return [rule["expr"] for rule in rules()] + shown


def exported(page: str) -> set[str]:
    """Names that a query may ask for, by the exposition's TYPE lines."""
    names = set()
    for line in page.splitlines():
        match line.split():
            case ["#", "TYPE", name, "histogram"]:
                names |= {f"{name}_{end}" for end in ("bucket", "sum", "count")}
            case ["#", "TYPE", name, _]:
                names.add(name)
    return names


async def test_every_metric_asked_for_is_exported(tmp_path: Path) -> None:
    # With every part that has metrics: SSD, peers (nobody answers there), an engine, Envoys.
    settings = {"daemon.metrics_port": 0, "daemon.index_address": "127.0.0.1:1"}
    async with FakeEngine().serving() as engine:
        with DaemonProcess(tmp_path, ssd_bytes=64 << 20, settings=settings) as daemon:
            port = int(daemon.endpoints["metrics_address"].rpartition(":")[2])
            known = exported((await request(port, "/metrics")).body.decode())
            engines = f'router.engines=[{{"url":"{engine.url}"}}]'
            async with router_process(tmp_path, engines, "router.ext_proc_port=0") as router:
                got = await request(router.port, "/metrics")
                known |= exported(got.body.decode())
    asked = {name for text in expressions() for name in _NAME.findall(text)}
    assert len(asked) > 40
    missing = sorted(asked - known)
    assert not missing


async def test_labels_that_are_asked_for_are_those_of_the_router(tmp_path: Path) -> None:
    """A misspelled label gives an empty panel, and an alert that never fires."""
    async with FakeEngine().serving() as engine:
        engines = f'router.engines=[{{"url":"{engine.url}"}}]'
        async with router_process(tmp_path, engines, "router.ext_proc_port=0") as router:
            body = {"model": "m", "prompt": [1, 2, 3]}
            await request(router.port, "/v1/completions", body)
            page = (await request(router.port, "/metrics")).body.decode()
    labels: dict[str, set[str]] = {}
    for name, inside in _SELECTOR.findall(page):
        labels.setdefault(name, set()).update(re.findall(r"(\w+)=", inside))
    seen = 0
    for text in expressions():
        for name, inside in _SELECTOR.findall(text):
            if name in labels:
                seen += 1
                assert set(re.findall(r"(\w+)[=!]", inside)) <= labels[name] | TARGET_LABELS, text
    assert seen > 10


def test_each_alert_has_a_line_and_each_line_an_alert() -> None:
    text = (ROOT / "docs/alerts.md").read_text()
    lines = re.findall(r"^\| (EmberKV\w+) \| (.+) \|$", text, re.MULTILINE)
    assert [name for name, _ in lines] == [rule["alert"] for rule in rules()]
    assert all(rule["labels"]["severity"] for rule in rules())
    assert all(rule["annotations"]["summary"] for rule in rules())


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_dashboards_are_whole(path: Path) -> None:
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in panels(path)]
    assert len(set(ids)) == len(ids)
    for panel in panels(path):
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "${datasource}"
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, f"{panel['title']} lies over another panel"
        taken |= cells


def promtool() -> str:
    found = os.environ.get("EMBERKV_PROMTOOL") or shutil.which("promtool")
    if found is None:
        pytest.skip("NOT CHECKED: there is no promtool (Debian's package prometheus has it)")
    return found


@pytest.mark.parametrize("command", [("check", "rules", RULES), ("test", "rules", CASES)])
def test_promtool_accepts_the_rules_and_plays_them(command: tuple[str, str, Path]) -> None:
    done = subprocess.run(
        [promtool(), *map(str, command)],
        cwd=RULES.parent,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_test_names_every_alert_of_the_router() -> None:
    named = set(re.findall(r"EmberKV\w+", CASES.read_text()))
    own = {rule["alert"] for rule in rules() if "emberkv_router_" in rule["expr"]}
    assert len(own) >= 11
    assert own == named
