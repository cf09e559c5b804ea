"""Two vLLM engines share a namespace only where their pages are made of the same bytes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from client_sdk.engine.vllm_connector.identity import page_shape
from client_sdk.engine.weights import UnsupportedEngineError

LAYERS = ("layers.0", "layers.1")
WINDOWS = (("layers.2", 80), ("layers.3", 80))
"""Layers with a window of tokens, each a group of its own."""


class FullAttentionSpec(SimpleNamespace):
    """As vLLM's, which is known by its name."""


class SlidingWindowSpec(SimpleNamespace):
    pass


def engine(**changed: Any) -> tuple[Any, Any, dict[str, Any]]:
    """The configuration of an engine: vLLM's, its cache's, and ours."""
    at = {
        "version": "0.32.0",
        "device": "cpu",
        "isa": "amx",
        "model": "m",
        "dtype": "bfloat16",
        "cache_dtype": "auto",
        "cache_layout": None,
        "ranks": 1,
        "page_tokens": 32,
        "heads": 2,
        "head_size": 64,
        "windows": (),
        "fails_by_request": True,
        "extra": {"weights_id": "w"},
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        **changed,
    }
    page_bytes = at["page_tokens"] * at["heads"] * at["head_size"] * 4
    fields = {
        "block_size": at["page_tokens"],
        "page_size_bytes": page_bytes,
        "dtype": f"torch.{at['dtype']}",
        "num_kv_heads": at["heads"],
        "head_size": at["head_size"],
    }
    groups = [(list(LAYERS), FullAttentionSpec(**fields))]
    groups += [([name], SlidingWindowSpec(sliding_window=n, **fields)) for name, n in at["windows"]]
    parallel = {name: size for name, size in at.items() if name.endswith("_parallel_size")}
    config = SimpleNamespace(
        model_config=SimpleNamespace(model=at["model"], revision="", dtype=at["dtype"]),
        parallel_config=SimpleNamespace(tensor_parallel_size=at["ranks"], **parallel),
        cache_config=SimpleNamespace(cache_dtype=at["cache_dtype"]),
        attention_config=SimpleNamespace(backend="FLASH_ATTN"),
        made_of=at,
    )
    cache = SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(layer_names=names, kv_cache_spec=spec, is_eagle_group=False)
            for names, spec in groups
        ],
        kv_cache_layout=at["cache_layout"],
        num_blocks=100,
    )
    return config, cache, at["extra"]


@pytest.fixture
def namespace_id(monkeypatch: pytest.MonkeyPatch) -> Callable[..., bytes]:
    """The namespace of an engine, with a vLLM that has nothing but a version and a platform."""

    def of(**changed: Any) -> bytes:
        config, cache, extra = engine(**changed)
        at = config.made_of
        vllm, platforms = ModuleType("vllm"), ModuleType("vllm.platforms")
        attention = ModuleType("vllm.v1.attention.backends.cpu_attn")
        vllm.__version__ = at["version"]  # type: ignore[attr-defined]
        platforms.current_platform = SimpleNamespace(  # type: ignore[attr-defined]
            device_type=at["device"],
            is_cpu=lambda: at["device"] == "cpu",
            get_device_name=lambda: at["device"],
        )
        attention._get_attn_isa = lambda *_: at["isa"]  # type: ignore[attr-defined]
        connectors = ModuleType("vllm.distributed.kv_transfer.kv_connector.v1")
        results = {"KVConnectorTransferResults": object} if at["fails_by_request"] else {}
        connectors.base = SimpleNamespace(**results)  # type: ignore[attr-defined]
        for module in (vllm, platforms, attention, connectors):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        return bytes(page_shape(config, cache, extra).namespace.id)

    return of


@pytest.mark.parametrize(
    "changed",
    [
        {"version": "0.33.0"},
        {"version": "1.32.0"},
        {"device": "cuda"},
        {"isa": "vec"},
        {"model": "n"},
        {"dtype": "float32"},
        {"cache_dtype": "fp8"},
        {"cache_layout": "LBHNC"},
        {"ranks": 2},
        {"page_tokens": 64},
        {"heads": 4},
        {"head_size": 128},
        {"extra": {"weights_id": "v"}},
        {"extra": {"weights_id": "w", "block_tokens": 64}},
        {"windows": WINDOWS},
    ],
    ids=str,
)
def test_whatever_shapes_the_bytes_is_part_of_the_namespace(
    namespace_id: Callable[..., bytes], changed: dict[str, Any]
) -> None:
    assert namespace_id(**changed) != namespace_id()


def test_a_patch_release_keeps_the_cache(namespace_id: Callable[..., bytes]) -> None:
    assert namespace_id(version="0.32.1+cpu") == namespace_id()


@pytest.mark.parametrize(
    "split",
    [
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ],
)
def test_an_engine_that_splits_otherwise_than_by_heads_is_refused(
    namespace_id: Callable[..., bytes], split: str
) -> None:
    with pytest.raises(UnsupportedEngineError, match=f"{split} 2"):
        namespace_id(**{split: 2})


@pytest.mark.parametrize("block_tokens", [16, 48])
def test_a_block_that_is_no_multiple_of_the_engine_s_is_refused(
    namespace_id: Callable[..., bytes], block_tokens: int
) -> None:
    with pytest.raises(UnsupportedEngineError, match="multiple of the engine's block size 32"):
        namespace_id(extra={"weights_id": "w", "block_tokens": block_tokens})


@pytest.mark.parametrize(
    "windows",
    [WINDOWS[:1], WINDOWS[::-1], (*WINDOWS[:1], ("layers.3", 96))],
    ids=["fewer", "other order", "other window"],
)
def test_groups_of_layers_are_part_of_the_namespace(
    namespace_id: Callable[..., bytes], windows: tuple[tuple[str, int], ...]
) -> None:
    assert namespace_id(windows=windows) != namespace_id(windows=WINDOWS)


def test_an_engine_that_takes_no_failed_requests_keeps_no_windows(
    namespace_id: Callable[..., bytes],
) -> None:
    with pytest.raises(UnsupportedEngineError, match="disable-hybrid-kv-cache-manager"):
        namespace_id(windows=WINDOWS, fails_by_request=False)
    assert namespace_id(fails_by_request=False) == namespace_id()
