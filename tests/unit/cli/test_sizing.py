"""What KV takes, what tiers keep, which hit rate that is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from client_sdk.cli.main import run_with
from client_sdk.cli.sizing import (
    CURVES,
    GIB,
    MAX_INDEX_BLOCKS,
    MIB,
    Curve,
    ModelShape,
    Sizing,
    shape_of,
)
from emberkv_proto.errors import InvalidRequestError
from global_index.config import IndexSection

ROOT = Path(__file__).parents[3]
LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("config", "token_bytes"),
    [
        (LLAMA, 131_072),
        ({**LLAMA, "num_key_value_heads": None}, 4 * 131_072),
        ({**LLAMA, "head_dim": 64}, 65_536),
        ({**LLAMA, "torch_dtype": "float32"}, 262_144),
        ({"text_config": LLAMA, "vision_config": {}}, 131_072),
        (
            {**LLAMA, "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
            70_272,
        ),
    ],
)
def test_bytes_of_a_token_come_from_the_model_s_config(
    config: dict[str, Any], token_bytes: int
) -> None:
    assert shape_of(config, "m").token_bytes == token_bytes
    assert not shape_of(config, "m").is_upper_bound


def test_a_kv_dtype_of_one_s_own_counts_and_windows_are_said() -> None:
    assert shape_of(LLAMA, "m", "fp8").token_bytes == 65_536
    mixed = {**LLAMA, "layer_types": ["full_attention", "sliding_attention"]}
    assert shape_of(mixed, "m").is_upper_bound


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_attention_heads": "many"}, "num_attention_heads"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"torch_dtype": "complex64"}, "complex64"),
    ],
)
def test_what_is_missing_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        shape_of({**LLAMA, **change}, "m")


def test_the_curves_are_the_tables_of_the_eviction_page() -> None:
    text = (ROOT / "docs/eviction.md").read_text()
    for curve in CURVES:
        rows = re.findall(rf"^\| {curve.trace}, .*\| *$", text, re.M)
        cells = [[cell.strip(" *") for cell in row.strip("|").split("|")] for row in rows]
        assert [float(row[1]) for row in cells] == [point.percent for point in curve.points]
        assert max(float(row[6]) for row in cells) == curve.most_percent


@given(st.sampled_from(CURVES), st.floats(0, 1e5), st.floats(0, 1e5))
def test_more_cache_never_finds_less(curve: Curve, one: float, other: float) -> None:
    less, more = sorted((one, other))
    assert 0 <= curve.percent(less) <= curve.percent(more) <= curve.most_percent


@given(st.sampled_from(CURVES), st.floats(0.1, 100))
def test_what_a_hit_rate_needs_gives_that_hit_rate(curve: Curve, percent: float) -> None:
    seconds = curve.seconds(percent)
    if seconds is None:
        assert percent > curve.points[-1].percent
    else:
        assert curve.percent(seconds) == pytest.approx(percent)


def test_the_measured_cache_gives_the_measured_rate() -> None:
    """64 GiB of 35,136 bytes a token, on the conversation trace's own traffic."""
    shape = ModelShape("m", 1, 17_568, 2)
    arriving = 288_500 * 512 / 3_537
    sizing = Sizing(shape, 512, 64 * GIB, 0, 1, arriving)
    rate = next(e for e in sizing.expected() if e.trace == "conversation")
    assert sizing.pool_blocks == 3_819
    assert rate.percent == pytest.approx(8.1, abs=0.01)
    needed = sizing.needed(8.1)["conversation"]
    assert needed == pytest.approx(64 * GIB, rel=0.001)


def test_what_is_in_dram_is_on_ssd_too_and_counts_once() -> None:
    shape = shape_of(LLAMA, "m")
    both = Sizing(shape, 64, 64 * GIB, 256 * GIB, 2, 1000.0)
    assert both.kept_tokens == 2 * both.ssd_blocks * 64
    values = both.values()
    assert values["store"]["pool"]["capacityMi"] == 65_536
    assert values["router"]["config"]["index"]["capacity_blocks"] == 2 * (8_192 + 32_768)


@pytest.mark.parametrize("nodes", [1, 512, 4096])
@pytest.mark.parametrize("ssd_gib", [0, 1000, 16_000])
def test_its_values_are_ones_that_our_settings_take_up_to_the_largest_fleet(
    nodes: int, ssd_gib: int
) -> None:
    sizing = Sizing(shape_of(LLAMA, "m"), 16, 512 * GIB, ssd_gib * GIB, nodes, 1000.0)
    values = sizing.values()
    section = IndexSection.model_validate(values["router"]["config"]["index"])
    kept = section.capacity_blocks * values["router"].get("replicas", 1)
    assert kept >= sizing.index_blocks
    assert sizing.is_shared is ("redis" in values)
    if sizing.is_shared:
        server = values["redis"]["server"]
        assert 3 <= server["replicas"] <= 64
        assert server["replicas"] * server["maxMemoryMi"] * MIB >= 130 * sizing.index_blocks
        assert sizing.routers > 1
    assert sizing.is_shared is (sizing.index_blocks > MAX_INDEX_BLOCKS)


def test_the_most_rows_of_a_router_are_what_its_settings_take() -> None:
    IndexSection(capacity_blocks=MAX_INDEX_BLOCKS)
    with pytest.raises(ValidationError):
        IndexSection(capacity_blocks=MAX_INDEX_BLOCKS + 1)


def test_the_command_prints_facts_and_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert run_with(["size", str(tmp_path), "--target", "30", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["token_bytes"] == 131_072
    assert shown["needed_bytes"].keys() == {"conversation", "synthetic"}
    assert run_with(["size", str(tmp_path), "--target", "30"]) == 0
    said = capsys.readouterr().out
    assert "131,072 bytes" in said
    assert "capacityMi: 65536" in said


def test_the_command_of_the_operations_page_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    text = (ROOT / "docs/operations.md").read_text()
    (line,) = re.findall(r"^emberkv (size .*)$", text, re.M)
    words = line.replace("/models/Qwen3-8B", str(tmp_path)).split()
    assert run_with(words) == 0
    assert "capacityMi: 131072" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["[]", "no json", "{}", "[" * 100_000])
def test_a_file_that_is_no_config_is_a_line_and_status_2(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(content)
    assert run_with(["size", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_pool_too_small_for_a_block_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert run_with(["size", str(tmp_path), "--pool-gib", "0.001"]) == 2
    assert "--pool-gib" in capsys.readouterr().err
