"""One configuration, one precedence; `config show` over the sections of all parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from client_sdk.cli.config_show import ShownValue, combined_settings, config_json, show_config
from client_sdk.settings import KNOWN_SECTIONS, Section, Settings, load_settings, load_with_origins
from emberkv_proto.errors import ConfigError

EXAMPLE = Path(__file__).parents[3] / "deploy" / "example.yaml"


class Engine(Section):
    model: str = "from default"
    layers: int = 4


class Parts(Settings):
    engine: Engine = Engine()


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "emberkv.yaml"
    path.write_text(text)
    return path


def test_flags_beat_environment_beats_file_beats_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "engine: {model: from file}")
    environ = {"EMBERKV_ENGINE__MODEL": "from environment"}
    flags = ("engine.model=from flag",)
    models = [
        load_settings(Parts, None, (), {}).engine.model,
        load_settings(Parts, path, (), {}).engine.model,
        load_settings(Parts, path, (), environ).engine.model,
        load_settings(Parts, path, flags, environ).engine.model,
    ]
    assert models == ["from default", "from file", "from environment", "from flag"]


def test_each_value_knows_where_it_came_from(tmp_path: Path) -> None:
    path = write(tmp_path, "engine: {layers: 6, model: x}")
    _, origins = load_with_origins(Parts, path, ("engine.model=y",), {})
    assert origins == {"engine.layers": f"file {path}", "engine.model": "--set engine.model"}


def test_an_unknown_key_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"engine\.modle .*did you mean 'model'"):
        load_settings(Parts, None, ("engine.modle=x",), {})


def test_an_unknown_section_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'engin'.*did you mean 'engine'"):
        load_settings(Parts, write(tmp_path, "engin: {model: x}"), (), {})


def test_an_unknown_section_is_refused_even_when_it_is_empty(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'engine'"):
        load_settings(Parts, write(tmp_path, "enigne: {}"), (), {})


def test_an_unknown_name_in_the_environment_is_refused_by_that_name() -> None:
    with pytest.raises(ConfigError, match="EMBERKV_ENGINE__MODLE"):
        load_settings(Parts, None, (), {"EMBERKV_ENGINE__MODLE": "x"})


def test_a_name_in_the_environment_that_lacks_an_underscore_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"EMBERKV_ENGINE_MODEL .*'EMBERKV_ENGINE__MODEL'"):
        load_settings(Parts, None, (), {"EMBERKV_ENGINE_MODEL": "x"})
    kubernetes = {"EMBERKV_ENGINE_MODEL": "tcp://10.0.0.1:80", "EMBERKV_ENGINE_SERVICE_HOST": "x"}
    load_settings(Parts, None, (), kubernetes)


@pytest.mark.parametrize("name", ["17", "on", "1e3", "0x1f", "null", "2026-11-30"])
def test_a_name_that_looks_like_another_kind_of_value_stays_text(name: str) -> None:
    assert load_settings(Parts, None, (), {"EMBERKV_ENGINE__MODEL": name}).engine.model == name
    assert load_settings(Parts, None, (f"engine.model={name}",), {}).engine.model == name


def test_sections_of_other_parts_are_left_alone(tmp_path: Path) -> None:
    path = write(tmp_path, "dram: {capacity_bytes: 1}\nengine: {layers: 2}")
    assert load_settings(Parts, path, (), {}).engine.layers == 2


def test_a_wrong_value_is_refused_with_its_key_and_origin() -> None:
    with pytest.raises(ConfigError, match=r"engine\.layers.*'many'.*--set engine\.layers"):
        load_settings(Parts, None, ("engine.layers=many",), {})


@pytest.mark.parametrize("text", ["- a\n- b", "engine: 3", "engine: [1]", "a: b: c"])
def test_a_file_that_is_no_sections_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="config file"):
        load_settings(Parts, write(tmp_path, text), (), {})


@pytest.mark.parametrize("flag", ["engine", "engine.model", "model=x"])
def test_a_flag_without_section_key_or_value_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match="wanted section"):
        load_settings(Parts, None, (flag,), {})


def test_the_combined_schema_has_every_known_section() -> None:
    assert set(combined_settings().model_fields) == set(KNOWN_SECTIONS)


def test_config_show_says_value_and_origin_of_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBERKV_ENGINE__LAYERS", "2")
    shown = show_config(EXAMPLE, ("dram.extent_bytes=4194304",))
    found = {(item.section, item.key): item for item in shown}
    assert found["engine", "layers"] == ShownValue(
        "engine", "layers", 2, "environment EMBERKV_ENGINE__LAYERS"
    )
    assert found["dram", "extent_bytes"].origin == "--set dram.extent_bytes"
    assert found["cluster", "nodes"].origin == f"file {EXAMPLE}"
    assert found["dram", "populate"].origin == "default"
    as_json = config_json(shown)
    assert json.loads(json.dumps(as_json))["engine"]["layers"]["value"] == 2


def test_the_example_config_sets_only_what_some_part_knows() -> None:
    settings = load_settings(combined_settings(), EXAMPLE, (), {})
    assert settings.model_dump()["cluster"]["nodes"] == 2
