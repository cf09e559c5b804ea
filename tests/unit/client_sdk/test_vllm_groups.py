"""Which pages of a hybrid model's groups become blocks, and which are held; without a vLLM."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from client_sdk.engine.vllm_connector.holds import PageHolds
from client_sdk.engine.vllm_connector.identity import PageGroup, PageShape, page_group
from client_sdk.engine.weights import UnsupportedEngineError
from emberkv_proto.layout import GroupKind, Namespace

PAGE = 16


class FullAttentionSpec(SimpleNamespace):
    """vLLM's specs are known by the names of their classes."""


class SlidingWindowSpec(SimpleNamespace):
    pass


class ChunkedLocalAttentionSpec(SimpleNamespace):
    pass


class MambaSpec(SimpleNamespace):
    pass


class SinkSpec(SimpleNamespace):
    pass


def group(kind: type[SimpleNamespace], **fields: Any) -> Any:
    spec = kind(**{"block_size": PAGE, "page_size_bytes": 1000, **fields})
    return SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "b"])


def window(tokens: int, **fields: Any) -> Any:
    return group(SlidingWindowSpec, sliding_window=tokens, **fields)


def chunk(tokens: int) -> Any:
    return group(ChunkedLocalAttentionSpec, attention_chunk_size=tokens)


def shape_of(block_tokens: int, *groups: PageGroup) -> PageShape:
    namespace = Namespace("m", "w", "bf16", "f", block_tokens, tuple(g.stored for g in groups))
    return PageShape(namespace, groups, 10)


def test_a_group_is_a_part_of_the_bytes_of_its_layers_without_their_padding() -> None:
    made = page_group(group(FullAttentionSpec, unpadded_page_size_bytes=900), 4 * PAGE)
    assert (made.stored.kind, made.stored.window_tokens) == (GroupKind.FULL, 0)
    assert (made.pages_per_block, made.page_bytes, made.stored.part_bytes) == (4, 900, 7200)


def vllm_skips(spec: Any, computed: int) -> int:
    """Tokens that vLLM needs no more, as its managers count them."""
    if isinstance(spec, SlidingWindowSpec):
        return max(0, computed - int(spec.sliding_window) + 1 - int(spec.extra_retained_tokens))
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return computed // int(spec.attention_chunk_size) * int(spec.attention_chunk_size)
    return 0


@pytest.mark.parametrize(
    "made",
    [
        group(FullAttentionSpec),
        *(window(n, extra_retained_tokens=k) for n in (2, 16, 17, 50) for k in (0, 3)),
        *(chunk(n) for n in (16, 24, 64)),
    ],
    ids=str,
)
def test_pages_are_live_as_long_as_vllm_keeps_them(made: Any) -> None:
    pages = page_group(made, PAGE)
    for computed in range(200):
        assert pages.live_from(computed) == vllm_skips(made.kv_cache_spec, computed) // PAGE


def test_blocks_of_several_pages_fit_into_the_window() -> None:
    assert page_group(window(5), PAGE).pages_per_block == 1
    assert page_group(window(33), 2 * PAGE).stored.window_tokens == 32
    for made in (window(32), chunk(24), chunk(48)):
        with pytest.raises(UnsupportedEngineError, match="set it to 16"):
            page_group(made, 2 * PAGE)


@pytest.fixture
def tells_of_states(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """A vLLM whose scheduler tells of states at the ends of blocks, or an older one."""

    def be(told: bool) -> None:
        scheduler = ModuleType("vllm.v1.core.sched")
        known = {"KVConnectorBlockState": object} if told else {}
        scheduler.output = SimpleNamespace(**known)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, scheduler.__name__, scheduler)

    return be


def states(**fields: Any) -> Any:
    kept = {
        "mamba_cache_mode": "align",
        "num_speculative_blocks": 0,
        "state_content_size_bytes": 700,
    }
    return group(MambaSpec, **{**kept, **fields})


def test_a_state_is_one_page_of_a_block_whatever_the_block_s_length(
    tells_of_states: Callable[[bool], None],
) -> None:
    tells_of_states(True)
    made = page_group(states(), 4 * PAGE)
    assert (made.stored.kind, made.is_state, made.needs_all) == (GroupKind.MAMBA, True, False)
    assert (made.pages_per_block, made.page_tokens, made.stored.part_bytes) == (1, PAGE, 1400)
    assert not page_group(group(FullAttentionSpec), PAGE).is_state


@pytest.mark.parametrize(
    ("fields", "fix"),
    [
        ({"mamba_cache_mode": "none"}, "start it with --enable-prefix-caching"),
        ({"num_speculative_blocks": 1}, "speculation beside state layers"),
    ],
)
def test_states_that_are_kept_for_no_block_are_refused_with_the_fix(
    tells_of_states: Callable[[bool], None], fields: dict[str, Any], fix: str
) -> None:
    tells_of_states(True)
    with pytest.raises(UnsupportedEngineError, match=fix):
        page_group(states(**fields), PAGE)


def test_states_of_an_engine_that_does_not_tell_of_them_are_refused(
    tells_of_states: Callable[[bool], None],
) -> None:
    tells_of_states(False)
    with pytest.raises(UnsupportedEngineError, match=r"need vLLM 0\.32 or later"):
        page_group(states(), PAGE)


def test_layers_of_an_unknown_kind_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedEngineError, match="layers of SinkSpec are not cached"):
        page_group(group(SinkSpec), PAGE)


def test_parts_of_all_stages_are_as_large_as_the_largest() -> None:
    made = page_group(group(FullAttentionSpec), 2 * PAGE, (2, 3))
    assert (made.layer_names, made.stored.layers) == (("a", "b"), 3)
    assert made.stored.part_bytes == 3 * 2 * 1000


def test_only_one_group_that_keeps_all_pages_has_shorter_hits() -> None:
    full, near = page_group(group(FullAttentionSpec), PAGE), page_group(window(40), PAGE)
    assert not shape_of(PAGE, full).is_hybrid
    assert shape_of(PAGE, near).is_hybrid
    assert shape_of(PAGE, full, full).is_hybrid
    assert shape_of(PAGE, near, full).told_group is full


def test_parts_of_chains_begin_where_chunks_do() -> None:
    full, near = page_group(group(FullAttentionSpec), PAGE), page_group(window(40), PAGE)
    assert shape_of(PAGE, full, near).lookup_step == 1
    assert shape_of(PAGE, full, page_group(chunk(64), PAGE)).lookup_step == 4
    assert shape_of(PAGE, full, page_group(chunk(24), PAGE)).lookup_step == 3


@dataclass(eq=False)
class Page:
    number: int
    ref_cnt: int = 0


@dataclass
class Pool:
    """Counts users as vLLM's pool does."""

    blocks: list[Page] = field(default_factory=lambda: [Page(n) for n in range(9)])
    freed: list[int] = field(default_factory=list)

    def touch(self, pages: list[Page]) -> None:
        for page in pages:
            page.ref_cnt += 1

    def free_blocks(self, pages: list[Page]) -> None:
        for page in pages:
            page.ref_cnt -= 1
            self.freed.append(page.number)


def test_held_pages_are_in_use_until_their_save_has_ended() -> None:
    pool, holds = Pool(), PageHolds()
    holds.bind(pool)
    holds.hold(1, [3, 4])
    holds.hold(2, [4, 5])
    holds.check_integrity([1, 2, 3])
    assert [page.ref_cnt for page in pool.blocks[3:6]] == [1, 2, 1]
    holds.release(1)
    holds.release(1)
    holds.release(7)
    assert pool.freed == [4, 3]
    assert not holds.is_empty
    holds.release(2)
    assert holds.is_empty
    assert not any(page.ref_cnt for page in pool.blocks)
    holds.check_integrity([])
