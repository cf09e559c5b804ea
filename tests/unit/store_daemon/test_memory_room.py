from __future__ import annotations

from pathlib import Path

import pytest

from emberkv_proto.errors import PreflightError
from store_daemon.memory_room import MemoryRoom, memory_rooms
from store_daemon.preflight import check_memory

GIB = 1 << 30


def write(root: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


def rooms(root: Path) -> dict[str, int]:
    found = memory_rooms(root / "proc", root / "cg")
    return {room.limited_by.partition(" (")[0]: room.free_bytes for room in found}


def test_the_machine_leaves_what_the_kernel_says_is_available(tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   2048 kB"})
    assert rooms(tmp_path) == {"this machine": 2048 * 1024}


def test_each_limited_group_above_counts_and_its_file_cache_does_not(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pods/one",
            "cg/pods/one/memory.max": "max",
            "cg/pods/one/memory.current": 7 * GIB,
            "cg/pods/memory.max": 10 * GIB,
            "cg/pods/memory.current": 8 * GIB,
            "cg/pods/memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file {GIB}",
        },
    )
    assert rooms(tmp_path) == {f"the control group {tmp_path}/cg/pods": 4 * GIB}


def test_groups_of_version_one(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/a\n0::/",
            "cg/memory/docker/a/memory.limit_in_bytes": 2 * GIB,
            "cg/memory/docker/a/memory.usage_in_bytes": GIB,
            "cg/memory/docker/a/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}",
            "cg/memory/memory.limit_in_bytes": 9223372036854771712,
            "cg/memory/memory.usage_in_bytes": GIB,
        },
    )
    assert rooms(tmp_path) == {f"the control group {tmp_path}/cg/memory/docker/a": 3 * GIB // 2}


def test_in_a_container_the_root_is_the_own_group(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../../pod",
            "cg/memory.max": GIB,
            "cg/memory.current": 0,
        },
    )
    assert rooms(tmp_path) == {f"the control group {tmp_path}/cg": GIB}


def test_nothing_to_be_seen_limits_nothing(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "nonsense\n0::"})
    assert rooms(tmp_path) == {}


def test_a_pool_beyond_a_limit_is_refused_with_numbers_and_the_fix() -> None:
    room = MemoryRoom(GIB, "the control group /x (limit 5 bytes)", "raise its memory limit")
    check_memory(GIB, [room])
    with pytest.raises(
        PreflightError,
        match=r"needs 2 GiB more memory, the control group /x .* leaves 1 GiB; raise",
    ):
        check_memory(2 * GIB, [room])
