from __future__ import annotations

import mmap
from pathlib import Path
from unittest import mock

import pytest

from emberkv_proto.errors import PreflightError
from store_daemon.tiers import numa
from store_daemon.tiers.memory_calls import MPOL_BIND, MPOL_INTERLEAVE, address_of, bind


def tree(root: Path, has_memory: str) -> Path:
    (root / "has_memory").write_text(has_memory)
    return root


@pytest.mark.parametrize(
    ("text", "nodes"),
    [("0\n", (0,)), ("0-1\n", (0, 1)), ("0-2,5,8-9\n", (0, 1, 2, 5, 8, 9)), ("\n", ())],
)
def test_nodes_with_memory_are_read(tmp_path: Path, text: str, nodes: tuple[int, ...]) -> None:
    assert numa.memory_nodes(tree(tmp_path, text)) == nodes


def test_a_tree_that_says_nothing_has_no_nodes(tmp_path: Path) -> None:
    assert numa.memory_nodes(tmp_path) == ()
    assert numa.memory_nodes(tree(tmp_path, "0-x\n")) == ()


@pytest.mark.parametrize(
    ("wanted", "nodes", "chosen"),
    [
        ("auto", (0,), ()),
        ("auto", (), ()),
        ("auto", (0, 1), (0, 1)),
        ("interleave", (0, 2), (0, 2)),
        ("interleave", (0,), ()),
        (1, (0, 1), (1,)),
        (0, (0,), ()),
    ],
)
def test_one_node_needs_no_binding_and_several_are_spread_over(
    wanted: str | int, nodes: tuple[int, ...], chosen: tuple[int, ...]
) -> None:
    assert numa.chosen_nodes(wanted, nodes) == chosen


def test_a_node_without_memory_is_refused_with_those_that_have_some() -> None:
    with pytest.raises(PreflightError, match=r"numa_node 3 has no memory.*0, 1"):
        numa.chosen_nodes(3, (0, 1))


def test_the_policy_follows_from_the_nodes() -> None:
    calls: list[tuple[object, ...]] = []
    with mock.patch.object(numa, "bind", lambda *args: calls.append(args)):
        numa.place(4096, 8192, "auto", ())
        numa.place(4096, 8192, "auto", (0, 1))
        numa.place(4096, 8192, 1, (1,))
    assert calls == [
        (4096, 8192, MPOL_INTERLEAVE, (0, 1)),
        (4096, 8192, MPOL_BIND, (1,)),
    ]


def test_a_refusal_ends_the_start_only_when_the_binding_was_asked_for() -> None:
    with mock.patch.object(numa, "bind", side_effect=PermissionError(1, "not permitted")):
        numa.place(4096, 8192, "auto", (0, 1))
        with pytest.raises(PreflightError, match=r"cpuset.mems and seccomp"):
            numa.place(4096, 8192, "interleave", (0, 1))


def test_the_call_itself_binds_to_the_only_node_and_refuses_one_that_is_not_there() -> None:
    if 0 not in numa.memory_nodes():
        pytest.skip("this kernel tells of no memory nodes")
    with mmap.mmap(-1, 1 << 20) as mapping, address_of(mapping) as address:
        bind(address, 1 << 20, MPOL_BIND, (0,))
        bind(address, 1 << 20, MPOL_INTERLEAVE, (0,))
        with pytest.raises(OSError, match="mbind"):
            bind(address, 1 << 20, MPOL_BIND, (900,))
