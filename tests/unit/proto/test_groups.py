from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkv_proto.errors import InvalidRequestError
from emberkv_proto.groups import needed_from, usable_blocks
from emberkv_proto.layout import WINDOWED, Group, GroupKind
from tests.helpers.naive_hits import is_needed, longest_hit

FULL = Group(GroupKind.FULL, 1, 1)
MAMBA = Group(GroupKind.MAMBA, 1, 1)


def window(tokens: int) -> Group:
    return Group(GroupKind.SLIDING_WINDOW, 1, 1, tokens)


def chunk(tokens: int) -> Group:
    return Group(GroupKind.CHUNKED_LOCAL, 1, 1, tokens)


def row(text: str) -> list[bool]:
    return [letter == "#" for letter in text]


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[Group], int, list[list[bool]]]:
    kinds = draw(st.lists(st.sampled_from(GroupKind), min_size=1, max_size=4))
    groups = [
        Group(kind, 1, 1, draw(st.integers(1, 20)) if kind in WINDOWED else 0) for kind in kinds
    ]
    length = draw(st.integers(0, 12))
    mostly = st.sampled_from([True, True, True, False])
    held = [draw(st.lists(mostly, min_size=length, max_size=length)) for _ in groups]
    return groups, draw(st.integers(1, 5)), held


@given(chains())
def test_the_longest_usable_length_is_the_naive_oracles(
    case: tuple[list[Group], int, list[list[bool]]],
) -> None:
    groups, block_tokens, held = case
    assert usable_blocks(groups, block_tokens, held) == longest_hit(groups, block_tokens, held)


@given(st.sampled_from(GroupKind), st.integers(1, 40), st.integers(1, 9), st.integers(0, 40))
def test_what_is_needed_begins_later_the_longer_the_hit(
    kind: GroupKind, tokens: int, block_tokens: int, length: int
) -> None:
    group = Group(kind, 1, 1, tokens)
    first = needed_from(group, block_tokens, length)
    for block in range(length):
        assert (block >= first) == is_needed(group, block_tokens, length, block)
    assert 0 <= first <= length
    assert first <= needed_from(group, block_tokens, length + 1)


@pytest.mark.parametrize(
    ("groups", "held", "usable"),
    [
        ([FULL], ["####."], 4),
        ([FULL], ["##.##"], 2),
        ([FULL, FULL], ["#####", "###.."], 3),
        ([FULL, window(8)], ["#####", "...##"], 5),
        ([FULL, window(9)], ["#####", "...##"], 0),
        ([FULL, window(8)], ["#####", "##.#."], 2),
        ([FULL, window(1)], ["#####", "..#.."], 3),
        ([FULL, window(100)], ["#####", "###.#"], 3),
        ([FULL, window(8)], ["###..", "..###"], 0),
        ([FULL, chunk(8)], ["#####", "....#"], 5),
        ([FULL, chunk(8)], ["####", "...."], 4),
        ([FULL, chunk(8)], ["#####", "....."], 4),
        ([FULL, chunk(6)], ["#####", "....."], 3),
        ([FULL, chunk(6)], ["#####", "....#"], 5),
        ([FULL, MAMBA], ["#####", "#..#."], 4),
        ([FULL, MAMBA], ["###..", "....#"], 0),
        ([MAMBA], [".....#"], 6),
        ([FULL, window(4), MAMBA], ["######", "##.###", "#..#.."], 4),
        ([FULL], [""], 0),
    ],
)
def test_golden_cases_of_four_token_blocks(
    groups: list[Group], held: list[str], usable: int
) -> None:
    assert usable_blocks(groups, 4, [row(text) for text in held]) == usable


def test_rows_must_fit_the_groups() -> None:
    for held in ([], [[True]], [[True], [True, False]]):
        with pytest.raises(InvalidRequestError):
            usable_blocks([FULL, MAMBA], 4, held)
