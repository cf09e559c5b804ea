"""Traces as simulated requests: read, checked, and made to fit an offered load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from emberkv_proto.errors import ConfigError
from router.simulation.workload import (
    Workload,
    arrival,
    best_hit_rate,
    copies,
    offered,
    read_workload,
)

GOOD = {"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [0, 1]}


def written(path: Path, *lines: object) -> Path:
    file = path / "t.jsonl"
    file.write_text(
        "".join(line if isinstance(line, str) else f"{json.dumps(line)}\n" for line in lines)
    )
    return file


def test_a_line_is_a_request(tmp_path: Path) -> None:
    workload = read_workload(written(tmp_path, GOOD, GOOD | {"timestamp": 500, "hash_ids": [0, 2]}))
    first, second = workload.arrivals
    assert workload.name == "t"
    assert (first.seconds, second.seconds) == (0.5, 1.5), "in the order of their coming"
    assert (second.prompt_tokens, second.output_tokens) == (600, 7)
    assert first.keys[0] == second.keys[0]
    assert first.keys[1] != second.keys[1]
    assert second.array.tolist() == [*second.keys]
    assert 0 not in second.keys, "key 0 names no block"
    assert len(read_workload(tmp_path / "t.jsonl", 1).arrivals) == 1


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{]\n", "no request"),
        ("[1]\n", "no request"),
        ("\n", "no request"),
        ("[" * 100_000 + "\n", "no request"),
        ({"timestamp": 0}, "hash_ids"),
        (GOOD | {"hash_ids": [0, -1]}, "numbers below"),
        (GOOD | {"hash_ids": [0, "1"]}, "numbers below"),
        (GOOD | {"hash_ids": 3}, "numbers below"),
        (GOOD | {"hash_ids": [0, 1, 2]}, "600 tokens are not 3 blocks"),
        (GOOD | {"hash_ids": [], "input_length": 0}, "not 0 blocks"),
        (GOOD | {"input_length": True}, "lengths"),
        (GOOD | {"output_length": None}, "lengths"),
        (GOOD | {"timestamp": "x"}, "no request"),
        (GOOD | {"timestamp": -1}, "timestamp"),
        (GOOD | {"timestamp": float("nan")}, "timestamp"),
        (f'{{"x": "{"y" * (1 << 20)}"}}\n', "longer than"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, word: str) -> None:
    with pytest.raises(ConfigError, match=r"line 2\b.*") as caught:
        read_workload(written(tmp_path, GOOD, line))
    assert word in str(caught.value)


def test_a_trace_that_is_not_there_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_workload(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="is empty"):
        read_workload(written(tmp_path))


def test_the_oracle_hits_what_came_before_up_to_the_first_new_block() -> None:
    requests = [
        arrival(0, (1, 2, 3), 1500, 0),
        arrival(1, (1, 2, 4), 1500, 0),  # 1024 tokens
        arrival(2, (1, 2, 4), 1500, 0),  # all
        arrival(3, (9, 2), 1000, 0),  # nothing: its first block is new
    ]
    assert best_hit_rate(requests) == (1024 + 1500) / 5500


def test_at_an_offered_load_requests_come_so_much_quicker_and_in_the_same_rhythm() -> None:
    workload = Workload("w", [arrival(10 + n, (n,), 512, 0) for n in (0, 1, 4)])
    at = offered(workload, 0.5, 1024.0)  # 1536 tokens at 512 a second: three seconds
    assert [item.seconds for item in at.arrivals] == pytest.approx([0, 0.75, 3.0])
    assert at.seconds == pytest.approx(3.0)


def test_copies_share_nothing_with_each_other() -> None:
    workload = Workload("w", [arrival(float(n), (0, n + 1), 1024, 0) for n in range(20)])
    three = copies(workload, 3, seed=1)
    assert len(three.arrivals) == 60
    assert len({key for item in three.arrivals for key in item.keys}) == 3 * 21
    assert best_hit_rate(three.arrivals) == pytest.approx(best_hit_rate(workload.arrivals))
    seconds = [item.seconds for item in three.arrivals]
    assert seconds == sorted(seconds)
    assert all(item.array.tolist() == [*item.keys] for item in three.arrivals)
    assert three.seconds <= 1.1 * workload.seconds
