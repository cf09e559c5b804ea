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


class MambaSpec(SimpleNamespace):
    pass


STATES = (("layers.4", ((3, 4), (2, 6))),)
"""Layers with a state, and what it is made of."""


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
        "has_cache_layout": True,
        "wished_layout": None,
        "ranks": 1,
        "page_tokens": 32,
        "heads": 2,
        "head_size": 64,
        "windows": (),
        "fails_by_request": True,
        "extra": {"weights_id": "w"},
        "states": (),
        "hidden_layers": 2,
        "stage": 0,
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
    groups: list[tuple[list[str], Any]] = [(list(LAYERS), FullAttentionSpec(**fields))]
    groups += [([name], SlidingWindowSpec(sliding_window=n, **fields)) for name, n in at["windows"]]
    groups += [
        (
            [name],
            MambaSpec(
                block_size=at["page_tokens"],
                page_size_bytes=page_bytes,
                state_content_size_bytes=96,
                shapes=shapes,
                dtypes=["torch.float32"],
                mamba_type=SimpleNamespace(name="GDN"),
                mamba_cache_mode="align",
                num_speculative_blocks=0,
            ),
        )
        for name, shapes in at["states"]
    ]
    parallel = {name: size for name, size in at.items() if name.endswith("_parallel_size")}
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model=at["model"],
            revision="",
            dtype=at["dtype"],
            get_total_num_hidden_layers=lambda: at["hidden_layers"],
        ),
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
        num_blocks=100,
    )
    if at["has_cache_layout"]:
        cache.kv_cache_layout = at["cache_layout"]
    return config, cache, at["extra"]


def stage_layers(layers: int, stage: int, stages: int) -> tuple[int, int]:
    """As vLLM splits them: the first stages have what is left over."""
    each, more = divmod(layers, stages)
    begin = stage * each + min(stage, more)
    return begin, begin + each + (stage < more)


@pytest.fixture
def namespace_id(monkeypatch: pytest.MonkeyPatch) -> Callable[..., bytes]:
    """The namespace of an engine, with a vLLM that has nothing but a version and a platform."""

    def of(**changed: Any) -> bytes:
        config, cache, extra = engine(**changed)
        at = config.made_of
        vllm, platforms = ModuleType("vllm"), ModuleType("vllm.platforms")
        attention = ModuleType("vllm.v1.attention.backends.cpu_attn")
        vllm.__version__ = at["version"]  # type: ignore[attr-defined]
        vllm.envs = SimpleNamespace(VLLM_KV_CACHE_LAYOUT=at["wished_layout"])  # type: ignore[attr-defined]
        platforms.current_platform = SimpleNamespace(  # type: ignore[attr-defined]
            device_type=at["device"],
            is_cpu=lambda: at["device"] == "cpu",
            get_device_name=lambda: at["device"],
        )
        attention._get_attn_isa = lambda *_: at["isa"]  # type: ignore[attr-defined]
        connectors = ModuleType("vllm.distributed.kv_transfer.kv_connector.v1")
        results = {"KVConnectorTransferResults": object} if at["fails_by_request"] else {}
        connectors.base = SimpleNamespace(**results)  # type: ignore[attr-defined]
        scheduler = ModuleType("vllm.v1.core.sched")
        scheduler.output = SimpleNamespace(KVConnectorBlockState=object)  # type: ignore[attr-defined]
        mamba = ModuleType("vllm.model_executor.layers.mamba.mamba_utils")
        mamba.get_conv_state_layout = lambda: "SD"  # type: ignore[attr-defined]
        pipeline = ModuleType("vllm.distributed.utils")
        pipeline.get_pp_indices = stage_layers  # type: ignore[attr-defined]
        for module in (vllm, platforms, attention, connectors, scheduler, mamba, pipeline):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        return bytes(page_shape(config, cache, extra, at["stage"]).namespace.id)

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
        {"pipeline_parallel_size": 2, "hidden_layers": 4},
        {"states": STATES},
    ],
    ids=str,
)
def test_whatever_shapes_the_bytes_is_part_of_the_namespace(
    namespace_id: Callable[..., bytes], changed: dict[str, Any]
) -> None:
    assert namespace_id(**changed) != namespace_id()


def test_a_patch_release_keeps_the_cache(namespace_id: Callable[..., bytes]) -> None:
    assert namespace_id(version="0.32.1+cpu") == namespace_id()


def test_the_layout_is_told_by_the_cache_or_before_that_by_the_operator(
    namespace_id: Callable[..., bytes],
) -> None:
    layouts = [None, "NHD", "HND"]
    old = {namespace_id(has_cache_layout=False, wished_layout=layout) for layout in layouts}
    assert len(old) == len(layouts)
    told = {namespace_id(cache_layout="LBNHC", wished_layout=layout) for layout in layouts}
    assert len(told) == 1, "a wish that was dropped"


@pytest.mark.parametrize("split", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_an_engine_whose_ranks_share_a_request_s_tokens_is_refused_with_the_fix(
    namespace_id: Callable[..., bytes], split: str
) -> None:
    option = split.replace("_", "-")
    with pytest.raises(UnsupportedEngineError, match=f"{split} is 2.* without --{option}"):
        namespace_id(**{split: 2})


def test_all_stages_of_a_pipeline_share_a_namespace_of_their_own(
    namespace_id: Callable[..., bytes],
) -> None:
    pipeline = {"pipeline_parallel_size": 2, "hidden_layers": 4}
    first, second = (namespace_id(**pipeline, stage=stage) for stage in (0, 1))
    assert first == second
    assert first != namespace_id(ranks=2)
    assert first != namespace_id(ranks=2, **pipeline)
    assert first != namespace_id(pipeline_parallel_size=2, hidden_layers=3)


@pytest.mark.parametrize(
    "changed",
    [{"hidden_layers": 6}, {"hidden_layers": 3, "stage": 1}, {"windows": WINDOWS}],
    ids=str,
)
def test_a_pipeline_of_other_than_equal_layers_is_refused_with_the_fix(
    namespace_id: Callable[..., bytes], changed: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedEngineError, match="split the model with --tensor-parallel-size"):
        namespace_id(**{"pipeline_parallel_size": 2, "hidden_layers": 4, **changed})


def test_what_a_state_is_made_of_is_part_of_the_namespace(
    namespace_id: Callable[..., bytes],
) -> None:
    other = ((STATES[0][0], ((4, 3), (2, 6))),)
    assert namespace_id(states=STATES) != namespace_id(states=other)


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
