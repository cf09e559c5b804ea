"""What only the memory index promises: its size, and kernels without a cache."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import global_index
from emberkv_proto.events import BlocksStored, EventBatch
from emberkv_proto.types import Incarnation, NodeId, Seq, Tier
from global_index import kernels, memory_index
from global_index.dict_index import DictIndex
from global_index.directory import MAX_NODES, NodeDirectory
from global_index.index import MAX_HOLDERS, BlockIndex, Holder
from global_index.membership import Membership
from global_index.memory_index import MemoryIndex

pytestmark = pytest.mark.timeout(400)
"""The first run compiles the kernels."""

PACKAGE = Path(global_index.__file__ or "").parent
USE_AN_INDEX = """
import numpy as np
from emberkv_proto.types import Tier
from global_index.index import Holder
from global_index.memory_index import MemoryIndex
index = MemoryIndex(1024)
keys = np.arange(1, 9, dtype=np.uint64)
index.apply_stored(Holder(0), Tier.DRAM, keys)
print(index.query(keys).hit_blocks[0])
"""


def random_keys(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(1, 1 << 63, count, dtype=np.uint64)


def test_warming_calls_every_kernel_that_a_query_or_an_event_may_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = Path(memory_index.__file__).read_text(encoding="utf-8")
    missed = {name: getattr(kernels, name) for name in re.findall(r"kernels\.(\w+)\(", text)}

    def noting(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            missed.pop(name, None)
            return kernel(*arguments)

        return call

    for name, kernel in [*missed.items()]:
        monkeypatch.setattr(kernels, name, noting(name, kernel))
    memory_index.warm_kernels()
    assert not missed


def test_a_thousand_nodes_that_come_and_go_leave_the_memory_as_it_was() -> None:
    index = MemoryIndex(1 << 20)
    directory = NodeDirectory(index, Membership(3.0, 30.0))
    rng = np.random.default_rng(1)
    shared = random_keys(rng, 500)

    def come(name: str) -> None:
        directory.add_source(name)
        directory.on_stream_started(name)
        events = tuple(BlocksStored(Tier.DRAM, keys) for keys in (shared, random_keys(rng, 500)))
        batch = EventBatch(NodeId(name), Incarnation(1), Seq(1), events, 0.0)
        directory.on_batch(name, batch, 0.0, 0.0)

    come("first")
    before = index.size()
    most, after = 0, []
    for number in range(0, 1000, 20):
        for n in range(number, number + 20):
            come(f"node-{n}")
        most = max(most, index.size().table_bytes)
        for n in range(number, number + 20):
            directory.remove_node(NodeId(f"node-{n}"))
        while directory.sweep():
            pass
        after.append(index.size().table_bytes)
    assert most > 3 * before.table_bytes
    assert index.size().blocks == before.blocks == 1000
    assert max(after) == after[-1] <= 4 * before.table_bytes, "a quarter of it is in use"
    assert [hit.hit_blocks for hit in directory.query(shared)] == [500]
    directory.check_integrity()


def test_table_that_shrank_and_grew_again_is_exact() -> None:
    index = MemoryIndex(1 << 20)
    rng = np.random.default_rng(2)
    chains = [random_keys(rng, 3000) for _ in range(12)]
    kept = chains[0][:700]
    for _ in range(3):
        for holder, chain in enumerate(chains):
            index.apply_stored(Holder(holder), Tier.DRAM, chain)
            index.apply_stored(Holder(20 + holder), Tier.SSD, kept)  # bitmap rows
        full = index.size().table_bytes
        for holder, chain in enumerate(chains[1:], 1):
            index.apply_removed(Holder(holder), Tier.DRAM, chain[::-1])
        index.apply_removed(Holder(0), Tier.DRAM, chains[0][700:][::-1])
        index.check_integrity()
        assert index.size().blocks == 700
        assert index.size().table_bytes < full / 4
        assert len(index.query(chains[0])) == 13
        assert set(index.query(chains[0]).hit_blocks) == {700}


@pytest.mark.parametrize("make", [MemoryIndex, DictIndex])
def test_every_holder_number_there_is_may_hold_one_block(make: type) -> None:
    index: BlockIndex = make(10_000)
    chain = np.arange(1, 9, dtype=np.uint64)
    for number in range(MAX_HOLDERS):
        index.apply_stored(Holder(number), Tier(1 + number % 3), chain[: 1 + number % 8])
    found = index.query(chain)
    hits = dict(zip(found.holders, found.hit_blocks, strict=True))
    assert hits == {number: 1 + number % 8 for number in range(MAX_HOLDERS)}
    assert MAX_NODES == 4096


@pytest.mark.parametrize(
    "form",
    [
        lambda keys: np.frombuffer(keys.tobytes(), np.uint64),
        lambda keys: np.frombuffer(b"1" + keys.tobytes(), np.uint64, offset=1),
        lambda keys: np.repeat(keys, 2)[::2],
        lambda keys: keys.astype(np.int64),
        lambda keys: keys.astype(">u8"),
    ],
    ids=["read-only", "unaligned", "strided", "signed", "big-endian"],
)
def test_kernels_get_the_words_of_any_array(form: Callable[[np.ndarray], np.ndarray]) -> None:
    keys = random_keys(np.random.default_rng(5), 3000)
    index = MemoryIndex(10_000)
    assert index.apply_stored(Holder(0), Tier.DRAM, form(keys)).changed == 3000
    index.check_integrity()
    assert index.query(form(keys)).hit_blocks == [3000]
    assert np.array_equal(index.rows(Holder(0), Tier.DRAM), keys)
    assert index.apply_removed(Holder(0), Tier.DRAM, form(keys)).changed == 3000
    index.check_integrity()


def test_full_index_refuses_ends_of_chains_and_never_their_heads() -> None:
    index = MemoryIndex(1024)
    chain = np.arange(1, 2001, dtype=np.uint64)
    for start in range(0, 2000, 100):
        index.apply_stored(Holder(1), Tier.DRAM, chain[start : start + 100])
    assert index.query(chain).hit_blocks == [1024]
    assert index.apply_stored(Holder(2), Tier.DRAM, chain[:1500]).changed == 1024
    index.apply_removed(Holder(1), Tier.DRAM, chain)
    index.apply_removed(Holder(2), Tier.DRAM, chain)
    assert index.apply_stored(Holder(1), Tier.DRAM, chain[1000:]).dropped == 0
    index.check_integrity()


@pytest.mark.slow
def test_kernels_work_where_no_cache_can_be_written_and_say_so(tmp_path: Path) -> None:
    """A file where the folder would be keeps even root from writing one."""
    shutil.copytree(
        PACKAGE, tmp_path / "global_index", ignore=shutil.ignore_patterns("__pycache__")
    )
    (tmp_path / "global_index" / "__pycache__").touch()
    nowhere = {"HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null"}
    environment = {**os.environ, **nowhere, "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("NUMBA_CACHE_DIR", None)
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", USE_AN_INDEX],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    assert done.stdout == "8\n"
    assert "NUMBA_CACHE_DIR" in done.stderr
