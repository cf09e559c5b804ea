"""The trace as prompts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from client_sdk.cli.trace import (
    TokenRange,
    TraceRequest,
    block_token_ids,
    default_trace_path,
    load_trace,
    prompt_token_ids,
)
from emberkv_proto.errors import ConfigError

ALL = TokenRange(0, 4096)


def test_the_excerpt_has_150_requests_whose_lengths_fit_their_blocks() -> None:
    requests = load_trace(default_trace_path(), 1000)
    assert len(requests) == 150
    assert requests[0].input_tokens == 6758
    assert requests[0].block_ids == tuple(range(14))
    assert all(1 <= request.last_block_tokens <= 512 for request in requests)


def test_equal_block_ids_give_equal_tokens_and_different_ones_do_not() -> None:
    assert block_token_ids(7, 16, ALL) == block_token_ids(7, 16, ALL)
    assert block_token_ids(7, 16, ALL) != block_token_ids(8, 16, ALL)


def test_tokens_are_the_same_in_another_process_with_another_hash_seed() -> None:
    program = (
        "from client_sdk.cli.trace import *;print(block_token_ids(7, 16, TokenRange(0, 4096)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    assert ran.stdout.strip() == str(block_token_ids(7, 16, ALL))


def test_tokens_stay_in_their_range() -> None:
    ids = block_token_ids(3, 1000, TokenRange(10, 13))
    assert set(ids) == {10, 11, 12}


@pytest.mark.parametrize(
    ("input_tokens", "blocks", "wanted"),
    [(512, 1, 16), (1, 1, 1), (513, 2, 17), (544, 2, 17), (545, 2, 18), (1023, 2, 32)],
)
def test_the_last_block_is_scaled_like_the_others(
    input_tokens: int, blocks: int, wanted: int
) -> None:
    request = TraceRequest(0, input_tokens, tuple(range(blocks)))
    assert len(prompt_token_ids(request, 16, ALL)) == wanted


def test_requests_with_a_common_prefix_have_prompts_with_a_common_prefix() -> None:
    one = prompt_token_ids(TraceRequest(0, 1536, (0, 1, 2)), 16, ALL)
    two = prompt_token_ids(TraceRequest(1, 1536, (0, 1, 9)), 16, ALL)
    assert one[:32] == two[:32]
    assert one[32:] != two[32:]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("{", "line 1"),
        ('{"input_length": 5}', "hash_ids"),
        (
            '{"input_length": 1, "hash_ids": [1]}\n{"input_length": 512, "hash_ids": [1, 2]}',
            "line 2",
        ),
        ('{"input_length": 513, "hash_ids": [1]}', "do not fit"),
        ('{"input_length": 0, "hash_ids": []}', "do not fit"),
    ],
)
def test_a_broken_trace_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_trace(path, 10)


def test_a_missing_trace_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl"):
        load_trace(tmp_path / "nowhere.jsonl", 10)


def test_an_empty_token_range_is_refused() -> None:
    with pytest.raises(ConfigError):
        TokenRange(5, 5)
