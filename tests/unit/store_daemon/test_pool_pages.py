from __future__ import annotations

from pathlib import Path

import pytest

from store_daemon.tiers.pool_pages import (
    HugePageStock,
    PoolFileSystem,
    chosen_word,
    file_bytes,
    file_system_of,
    huge_page_stock,
    huge_pages_fix,
    may_be_huge,
    parse_huge_bytes,
    parse_mount,
)

MIB = 1 << 20
MOUNTS = """\
22 27 0:20 / /proc rw,nosuid - proc proc rw
26 23 0:23 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs tmpfs rw,size=1024k,huge=within_size
27 23 0:24 / /mnt/two\\040words rw - hugetlbfs nodev rw,pagesize=2M
30 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
broken line
31 1 0:30 / /plain rw - tmpfs none rw
"""
SMAPS = """\
7f0000000000-7f0000400000 rw-s 00000000 00:17 42                         /dev/shm/pool
Size:               4096 kB
ShmemPmdMapped:     2048 kB
FilePmdMapped:         0 kB
Shared_Hugetlb:        0 kB
VmFlags: rd wr sh mr mw me ms hg
7f0000400000-7f0000800000 rw-s 00000000 00:17 43                         /dev/shm/other
ShmemPmdMapped:     4096 kB
7f0000800000-7f0000a00000 rw-s 00400000 00:17 42                         /dev/shm/pool
ShmemPmdMapped:        0 kB
Private_Hugetlb:    2048 kB
7ffe00000000-7ffe00001000 rw-p 00000000 00:00 0                          [stack]
ShmemPmdMapped:     8192 kB
"""


def tmpfs(huge: str) -> PoolFileSystem:
    return PoolFileSystem("tmpfs", "/dev/shm", 4096, huge)


def test_mounts_are_found_by_device() -> None:
    shm, huge, plain = (parse_mount(MOUNTS, device) for device in ("0:23", "0:24", "0:30"))
    assert shm is not None
    assert (shm.kind, shm.mount_point, shm.huge_option) == ("tmpfs", "/dev/shm", "within_size")
    assert huge is not None
    assert (huge.kind, huge.mount_point) == ("hugetlbfs", "/mnt/two words")
    assert plain is not None
    assert plain.huge_option == "never", "a tmpfs without the option has no huge pages"
    assert parse_mount(MOUNTS, "9:9") is None


def test_a_directory_of_this_machine_has_a_file_system(tmp_path: Path) -> None:
    found = file_system_of(tmp_path)
    assert found.kind not in ("", "hugetlbfs")
    assert found.page_bytes == 4096
    hidden = tmp_path / "mounts"
    hidden.write_text("")
    assert file_system_of(tmp_path, hidden).kind == "unknown"


def test_a_file_is_whole_pages() -> None:
    huge = PoolFileSystem("hugetlbfs", "/h", 2 * MIB, "never")
    assert file_bytes(huge, MIB, 3) == 4 * MIB
    assert file_bytes(tmpfs("never"), MIB, 3) == 3 * MIB + 4096


def test_only_mapped_bytes_of_the_file_in_huge_pages_count() -> None:
    assert parse_huge_bytes(SMAPS, 42) == 4 * MIB
    assert parse_huge_bytes(SMAPS, 43) == 4 * MIB
    assert parse_huge_bytes(SMAPS, 44) == 0


@pytest.mark.parametrize(
    ("huge", "policy", "is_possible"),
    [
        ("never", "never", False),
        ("never", "always", False),
        ("never", "force", True),
        ("within_size", "never", True),
        ("advise", "advise", True),
        ("always", "deny", False),
        ("always", "", False),
    ],
)
def test_a_mount_goes_by_its_option_unless_the_kernel_overrules_it(
    huge: str, policy: str, is_possible: bool
) -> None:
    assert may_be_huge(tmpfs(huge), policy) == is_possible


def test_a_disk_has_no_huge_pages_and_hugetlbfs_nothing_else() -> None:
    disk = PoolFileSystem("ext4", "/", 4096, "never")
    assert not may_be_huge(disk, "force")
    assert may_be_huge(PoolFileSystem("hugetlbfs", "/h", 2 * MIB, "never"), "deny")
    assert "hugetlbfs" in huge_pages_fix(disk)
    assert "remount,huge=within_size /dev/shm" in huge_pages_fix(tmpfs("never"))


def test_the_chosen_word_stands_in_brackets() -> None:
    assert chosen_word("always within_size [never] deny\n") == "never"
    assert chosen_word("nothing chosen") == ""


def test_huge_pages_are_counted_with_what_is_set_aside(tmp_path: Path) -> None:
    directory = tmp_path / "hugepages-2048kB"
    directory.mkdir()
    numbers = {
        "nr_hugepages": 10,
        "free_hugepages": 6,
        "resv_hugepages": 2,
        "nr_overcommit_hugepages": 5,
        "surplus_hugepages": 1,
    }
    for name, number in numbers.items():
        (directory / name).write_text(f"{number}\n")
    stock = huge_page_stock(2 * MIB, tmp_path)
    assert stock == HugePageStock(2 * MIB, 10, 6, 2, 4)
    assert stock.available == 8
    with pytest.raises(OSError, match="hugepages-1048576kB"):
        huge_page_stock(1 << 30, tmp_path)
