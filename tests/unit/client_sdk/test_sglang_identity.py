"""What makes two SGLang engines' pages the same, without an SGLang."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from client_sdk.engine.sglang_backend.announcement import engine_info, event_endpoints
from client_sdk.engine.sglang_backend.identity import PageShape, page_shape, refuse_pools
from client_sdk.engine.sglang_backend.settings import BackendSettings
from client_sdk.engine.weights import UnsupportedEngineError
from emberkv_proto.errors import ConfigError
from emberkv_proto.types import HashScheme
from tests.helpers.sglang_pools import (
    MHATokenToKVPoolHost,
    MHAUnknownPoolHost,
    storage_config,
)

ARGS = {"model_path": "/models/tiny", "revision": None, "dtype": "bfloat16"}


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("sglang")
    module.__version__ = "0.5.23"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang", module)
    return module


def shape(pool: Any = None, args: dict[str, Any] | None = None, **config: Any) -> PageShape:
    pool = MHATokenToKVPoolHost() if pool is None else pool
    made = SimpleNamespace(**{**ARGS, **(args or {})})
    return page_shape(storage_config(**config), pool, "w", made, pool.page_bytes)


def test_everything_that_shapes_a_page_makes_a_namespace_of_its_own(tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"
    scales.write_text("{}")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    wider = MHATokenToKVPoolHost()
    wider.start_layer, wider.end_layer = 2, 4
    tagged = MHATokenToKVPoolHost()
    tagged.storage_format_tag = "packed"  # type: ignore[attr-defined]
    shapes = [
        shape(),
        shape(MHATokenToKVPoolHost(page_size=8)),
        shape(MHATokenToKVPoolHost(layout="layer_first")),
        shape(MHATokenToKVPoolHost(layout="page_head")),
        shape(wider),
        shape(tagged),
        shape(args={"dtype": "float16"}),
        shape(args={"kv_cache_dtype": "fp8_e4m3"}),
        shape(args={"quantization": "fp8"}),
        shape(args={"json_model_override_args": '{"rope_theta": 1}'}),
        shape(args={"load_format": "dummy"}),
        shape(args={"weight_version": "2"}),
        shape(args={"quantization_param_path": str(scales)}),
        shape(args={"lora_paths": [SimpleNamespace(lora_path=str(adapter))]}),
        shape(args={"model_path": "/models/other"}),
        shape(tp_size=2),
        shape(pp_size=2),
        shape(pp_size=2, pp_rank=1),
        shape(attn_cp_size=2),
        shape(attn_cp_size=2, attn_cp_rank=1),
        shape(is_mla_model=True),
    ]
    ids = [one.namespace.id for one in shapes]
    assert len(set(ids)) == len(ids)
    assert shape().namespace == shape().namespace
    assert {one.namespace.engine_family for one in shapes} == {"sglang"}


def test_an_adapter_whose_files_change_makes_another_namespace(tmp_path: Path) -> None:
    adapter = {"lora_paths": [SimpleNamespace(lora_path=str(tmp_path))]}
    (tmp_path / "adapter_config.json").write_text("{}")
    first = shape(args=adapter).namespace.id
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    assert shape(args=adapter).namespace.id != first
    with pytest.raises(UnsupportedEngineError, match="no local directory"):
        shape(args={"lora_paths": [SimpleNamespace(lora_path="org/adapter")]})


def test_a_version_of_sglang_does_not_read_what_another_wrote(sglang: ModuleType) -> None:
    first = shape().namespace.id
    sglang.__version__ = "0.5.24"  # type: ignore[attr-defined]
    assert shape().namespace.id != first


def test_tensor_parallel_ranks_have_parts_and_ranks_of_equal_bytes_have_one_writer() -> None:
    second = shape(tp_size=2, tp_rank=1)
    assert (second.part, second.namespace.shards, second.is_writer) == (1, 2, True)
    replica = shape(is_mla_model=True, tp_size=2, tp_rank=1, is_storage_writer=False)
    writer = shape(is_mla_model=True, tp_size=4)
    assert (replica.part, replica.namespace.shards, replica.is_writer) == (0, 1, False)
    assert replica.namespace == writer.namespace, "replicas of other engines hold the same bytes"


def test_what_cannot_be_told_apart_is_refused() -> None:
    packed = MHATokenToKVPoolHost()
    packed.layer_num = 3
    for broken, match in (
        (lambda: shape(dcp_size=2), "decode context"),
        (lambda: shape(tp_lcm_size=4, tp_size=2), "tp_lcm_size"),
        (lambda: shape(MHAUnknownPoolHost()), "MHAUnknownPoolHost"),
        (lambda: shape(MHATokenToKVPoolHost(layout="page_unified")), "page_unified"),
        (lambda: shape(packed), "draft"),
        (lambda: refuse_pools(["kv", "mamba", "swa"]), "mamba, swa"),
    ):
        with pytest.raises(UnsupportedEngineError, match=match):
            broken()
    refuse_pools(["kv"])
    assert shape(tp_lcm_size=2, tp_size=2)


def test_weights_without_an_id_are_refused(tmp_path: Path) -> None:
    pool = MHATokenToKVPoolHost()
    for args in (None, SimpleNamespace(model_path="org/name", revision="main")):
        with pytest.raises(UnsupportedEngineError, match="weights_id"):
            page_shape(storage_config(), pool, None, args, pool.page_bytes)
    (tmp_path / "model.safetensors").write_bytes(b"w")
    args = SimpleNamespace(model_path=str(tmp_path), revision=None)
    assert page_shape(storage_config(), pool, None, args, pool.page_bytes).namespace.weights_id


def test_settings_have_defaults_and_wrong_ones_name_the_fix() -> None:
    own = {"backend_name": "emberkv", "module_path": "m", "class_name": "c", "interface_v1": 1}
    assert BackendSettings.of(own) == BackendSettings()
    assert BackendSettings.of({**own, "load_seconds": 2}).load_seconds == 2
    for extra, match in (
        ({"socket_pth": "/x"}, "did you mean socket_path"),
        ({"nonsense": 1}, "known: "),
        ({"load_seconds": "5"}, "load_seconds must be float or int"),
        ({"load_seconds": True}, "load_seconds must be"),
        ({"verify": 1}, "verify must be bool"),
        ({"timeout_seconds": -1.0}, "not in"),
        ({"timeout_seconds": float("nan")}, "not in"),
    ):
        with pytest.raises(ConfigError, match=match):
            BackendSettings.of({**own, **extra})


def test_one_rank_announces_the_engine_with_the_hashes_it_is_known_by() -> None:
    args = SimpleNamespace(
        served_model_name="tiny",
        kv_events_config='{"publisher": "zmq", "replay_endpoint": "tcp://*:5657"}',
    )
    url = "http://10.0.0.6:30000"
    info = engine_info(shape(), storage_config(), args, url, 2)
    assert info is not None
    assert (info.url, info.model, info.dp_rank) == (url, "tiny", 2)
    assert info.namespace_id == shape().namespace.id
    assert info.hash_scheme is HashScheme.SGLANG
    assert info.block_tokens == info.engine_block_tokens == 4
    assert (info.events_endpoint, info.replay_endpoint) == (
        "tcp://10.0.0.6:5559",
        "tcp://10.0.0.6:5659",
    )
    for silent in ({"tp_rank": 1}, {"pp_rank": 1}, {"attn_cp_rank": 1}):
        assert engine_info(shape(), storage_config(**silent), args, url, 0) is None
    assert engine_info(shape(), storage_config(), args, "", 0) is None
    alone = engine_info(shape(), storage_config(), None, url, 0)
    assert alone is not None
    assert (alone.model, alone.events_endpoint) == ("tiny", "")


@pytest.mark.parametrize(
    ("text", "events"),
    [
        (None, ""),
        ("{}", ""),
        ('{"publisher": "null"}', ""),
        ('{"publisher": "zmq"}', "tcp://h:5557"),
        ('{"publisher": "zmq", "endpoint": "tcp://0.0.0.0:1"}', "tcp://h:1"),
        ('{"publisher": "zmq", "endpoint": "tcp://collector:1"}', ""),
        ('{"publisher": "zmq", "endpoint": "tcp://10.0.0.7:1", "bind": true}', "tcp://10.0.0.7:1"),
        ('{"publisher": "zmq", "endpoint": "tcp://*:1", "bind": false}', ""),
        ('{"publisher": "zmq", "endpoint": "ipc:///tmp/x"}', ""),
    ],
)
def test_routers_are_told_where_sglang_binds(text: str | None, events: str) -> None:
    assert event_endpoints(text, "http://h:30000", 0).events == events
