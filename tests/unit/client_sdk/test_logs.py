"""Log lines as a collector reads them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from client_sdk import logs
from client_sdk.logs import LogStyle

log = logging.getLogger("emberkv.test")


@pytest.fixture(autouse=True)
def level_as_before() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    logs.unconfigure()
    logging.getLogger().setLevel(level)


def test_json_lines_carry_the_message_its_facts_and_the_process(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.configure(LogStyle("info", "json"))
    logs.describe_process(node="n1", incarnation=7)
    log.info("lent %d blocks", 3, extra={"session": 9})
    log.debug("not at this level")
    (line,) = capsys.readouterr().err.splitlines()
    read = json.loads(line)
    assert read.pop("time").endswith("+00:00")
    assert read == {
        "level": "info",
        "logger": "emberkv.test",
        "message": "lent 3 blocks",
        "node": "n1",
        "incarnation": 7,
        "session": 9,
    }


def test_an_error_with_its_trace_and_a_line_break_stay_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.configure(LogStyle("info", "json"))
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("a\nb")
    (line,) = capsys.readouterr().err.splitlines()
    read = json.loads(line)
    assert read["message"] == "a\nb"
    assert "ValueError: two\nlines" in read["exception"]


def test_facts_cannot_take_the_place_of_the_lines_own_fields(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.configure(LogStyle("info", "json"))
    log.info("true", extra={"level": "forged", "time": "never", "odd": {1, 2}})
    read = json.loads(capsys.readouterr().err)
    assert read["level"] == "info"
    assert read["time"] != "never"
    assert read["odd"] == "{1, 2}"


def test_a_new_style_replaces_the_old_while_the_process_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.configure(LogStyle("warning", "text"))
    logs.describe_process(node="n1")
    log.info("unheard")
    logs.configure(LogStyle("info", "json"))
    log.info("heard")
    logs.configure(LogStyle("info", "text"))
    log.info("text again")
    first, second = capsys.readouterr().err.splitlines()
    assert json.loads(first)["node"] == "n1"
    assert second.endswith("INFO emberkv.test: text again")
