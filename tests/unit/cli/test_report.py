"""What makes the demo pass and fail."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from client_sdk.cli.openai_client import Answer
from client_sdk.cli.report import DemoReport, PhaseReport, print_report, write_json


def answer(tokens: tuple[int, ...] = (1, 2), ttft: float = 0.1, **hits: int) -> Answer:
    return Answer(tokens, "", 32, {"hbm": 0, "dram": 0, "ssd": 0, "peer": 0} | hits, ttft)


def test_an_empty_report_is_no_success() -> None:
    report = DemoReport()
    assert not report.ok
    report.expect_identical()
    assert not report.ok


def test_one_different_token_fails_the_demo_and_is_shown() -> None:
    phase = PhaseReport("chat")
    phase.add("turn 1", answer(), answer())
    phase.add("turn 2", answer((1, 3)), answer((1, 2)))
    report = DemoReport([phase])
    report.expect_identical()
    assert not report.ok
    assert "turn 2: [1, 3] != [1, 2]" in report.expectations[0].seen


def test_a_shorter_answer_is_a_difference() -> None:
    phase = PhaseReport("chat")
    phase.add("turn 1", answer((1,)), answer((1, 2)))
    assert phase.differences


def test_one_failed_expectation_fails_the_demo() -> None:
    report = DemoReport()
    report.expect("a", True, "")
    assert report.ok
    report.expect("b", False, "0 tokens")
    assert not report.ok


def test_only_requests_that_found_half_their_prompt_are_warm() -> None:
    phase = PhaseReport("trace")
    phase.add("1", answer(ttft=0.01, dram=16), answer(ttft=0.2))
    phase.add("2", answer(ttft=0.3, dram=15), answer(ttft=0.4))
    shown = phase.to_json()
    assert shown["ttft_p50_warm_seconds"] == 0.01
    assert shown["warm_requests"] == 1
    assert abs(shown["ttft_p50_cold_seconds"] - 0.3) < 1e-9
    assert shown["hit_tokens"] == {
        "hbm": 0,
        "dram": 31,
        "ssd": 0,
        "peer": 0,
        "untold": 0,
    }


def test_table_and_json_say_the_same(tmp_path: Path) -> None:
    phase = PhaseReport("engine A back")
    phase.add("1", answer(dram=16, ssd=16), answer())
    report = DemoReport([phase])
    report.expect("hits [come] from the daemon", True, "32 of 32")
    text = io.StringIO()
    print_report(Console(file=text, width=140), report)
    shown = text.getvalue()
    assert "engine A back" in shown
    assert "hits [come] from the daemon: 32 of 32" in shown
    assert "all held" in shown
    path = tmp_path / "demo.json"
    write_json(report, path)
    loaded = json.loads(path.read_text())
    assert loaded["ok"] is True
    assert loaded["phases"][0]["hit_tokens"]["ssd"] == 16
    assert loaded["phases"][0]["identical"] is True
