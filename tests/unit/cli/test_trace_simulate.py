"""`emberkv trace simulate` as a user meets it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from client_sdk.cli import trace_plot
from client_sdk.cli.main import run_with
from client_sdk.cli.trace import default_trace_path

TRACE = str(default_trace_path())
QUICK = ("trace", "simulate", TRACE, "--requests", "40", "--nodes", "3")


def shown(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    assert run_with([*QUICK, "--json", *more]) == 0
    loaded: dict[str, Any] = json.loads(capsys.readouterr().out)
    return loaded


def test_it_tells_of_every_policy(capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(capsys)
    (trace,) = found["traces"]
    names = {"cost", "least_load", "round_robin", "max_hit", "consistent_hash", "lmetric", "dynamo"}
    assert trace["outcomes"].keys() == names
    assert {item["requests"] for item in trace["outcomes"].values()} == {40}
    assert 0 < trace["one_store_hit_rate"] == trace["oracle_hit_rate"] < 1
    assert run_with(QUICK[:3]) == 0
    text = capsys.readouterr().out
    assert "150 requests" in text
    assert all(name in text for name in names)


def test_what_is_asked_for_is_what_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    plain = shown(capsys, "--policy", "cost")
    assert plain["traces"][0]["outcomes"].keys() == {"cost"}
    quick = plain["traces"][0]["outcomes"]["cost"]
    slow = shown(capsys, "--policy", "cost", "--load", "0.2", "--slo", "60")
    assert slow["traces"][0]["seconds"] > 4 * plain["traces"][0]["seconds"]
    calm = slow["traces"][0]["outcomes"]["cost"]
    assert calm["mean_seconds"] < quick["mean_seconds"]
    assert calm["good_share"] == 1
    troubled = shown(
        capsys, "--policy", "cost", "--lose", "1@2-9", "--lose", "2@5", "--index-delay", "4",
        "--speed-error", "2", "--copies", "2", "--no-pool", "--set", "router.tie_fraction=0",
    )  # fmt: skip
    assert [outage["ends"] for outage in troubled["outages"]] == [9, None]
    outcome = troubled["traces"][0]["outcomes"]["cost"]
    assert outcome["requests"] == 80
    assert outcome["pulled_share"] == 0
    assert outcome["retried"] + outcome["cut_short"] > 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--policy", "best"), "--policy best: there are cost, "),
        (("--lose", "one"), "write NODE@SECOND or NODE@FROM-TO"),
        (("--lose", "3@1"), "nodes are 0 to 2"),
        (("--lose", "1@9-9"), "ends before it begins"),
        (("--set", "router.tie_fraction=7"), "tie_fraction"),
        (("--tokens-per-node", "5120"), "no node can hold"),
        (("--plot", "picture.jpg"), "name a .png file"),
        (("--plot", "/nowhere/at/all.png"), "no directory"),
    ],
)
def test_a_mistake_gets_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str
) -> None:
    assert run_with([*QUICK, *arguments]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert "Traceback" not in said


def test_a_bad_trace_is_told_by_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"timestamp": 0, "input_length": 5, "hash_ids": [1]}\nnonsense\n')
    assert run_with(["trace", "simulate", str(bad)]) == 2
    assert "bad.jsonl line 2 is no request" in capsys.readouterr().err
    assert run_with(["trace", "simulate", str(tmp_path / "none.jsonl")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_without_matplotlib_it_says_what_to_install_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec

    def none(name: str, package: str | None = None) -> Any:
        return None if name == "matplotlib" else found(name, package)

    monkeypatch.setattr(trace_plot.importlib.util, "find_spec", none)
    picture = tmp_path / "p.png"
    assert run_with([*QUICK, "--plot", str(picture)]) == 2
    assert "pip install 'emberkv[plot]'" in capsys.readouterr().err
    assert not picture.exists()


def test_a_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "p.png"
    shown(capsys, "--plot", str(picture), "--policy", "cost", "--policy", "lmetric")
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert 5_000 < len(data) < 200_000


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_with(["trace", "simulate", "--help"]) == 0
    assert "emberkv trace simulate" in capsys.readouterr().out
