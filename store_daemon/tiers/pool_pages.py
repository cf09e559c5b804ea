"""What pages a pool file's file system gives, and which of them are huge. Parsing is pure."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from emberkv_proto.shm_layout import POOL_HEADER_BYTES

MOUNTINFO = Path("/proc/self/mountinfo")
SMAPS = Path("/proc/self/smaps")
HUGE_PAGES = Path("/sys/kernel/mm/hugepages")
SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_HUGE_FIELDS = ("ShmemPmdMapped", "FilePmdMapped", "Shared_Hugetlb", "Private_Hugetlb")


@dataclass(frozen=True, slots=True)
class PoolFileSystem:
    """Where the pool file lies."""

    kind: str
    """Its type: "tmpfs", "hugetlbfs" or another; "unknown" where the mount is not to be seen."""
    mount_point: str
    page_bytes: int
    """The file's size is a multiple of it."""
    huge_option: str
    """Of tmpfs: the mount's `huge=`; "never" where it has none."""

    @property
    def is_hugetlbfs(self) -> bool:
        return self.kind == "hugetlbfs"

    def round_up(self, count: int) -> int:
        return -(-count // self.page_bytes) * self.page_bytes


@dataclass(frozen=True, slots=True)
class HugePageStock:
    """Huge pages of one size on this machine."""

    page_bytes: int
    total: int
    free: int
    reserved: int
    surplus_allowed: int
    """More that the kernel may make when asked (nr_overcommit_hugepages)."""

    @property
    def available(self) -> int:
        return self.free - self.reserved + self.surplus_allowed


def file_bytes(file_system: PoolFileSystem, extent_bytes: int, count: int) -> int:
    """Size of a pool file of so many extents there."""
    return file_system.round_up(POOL_HEADER_BYTES + count * extent_bytes)


def file_system_of(directory: Path, mountinfo: Path = MOUNTINFO) -> PoolFileSystem:
    """Raises OSError when the directory cannot be used."""
    status = directory.stat()
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    found = parse_mount(mountinfo.read_text(), device)
    kind = found.kind if found is not None else "unknown"
    page_bytes = os.statvfs(directory).f_bsize if kind == "hugetlbfs" else mmap.PAGESIZE
    if found is None:
        return PoolFileSystem(kind, os.fspath(directory), page_bytes, "never")
    return PoolFileSystem(kind, found.mount_point, page_bytes, found.huge_option)


@dataclass(frozen=True, slots=True)
class Mount:
    kind: str
    mount_point: str
    huge_option: str


def parse_mount(mountinfo: str, device: str) -> Mount | None:
    """The last mount of a device ("major:minor") in the text of /proc/self/mountinfo."""
    found: Mount | None = None
    for line in mountinfo.splitlines():
        before, dash, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if not dash or len(fields) < 5 or len(rest) < 3 or fields[2] != device:
            continue
        options = dict(option.partition("=")[::2] for option in rest[2].split(","))
        mount_point = fields[4].replace("\\040", " ")
        found = Mount(rest[0], mount_point, options.get("huge", "never"))
    return found


def huge_page_stock(page_bytes: int, root: Path = HUGE_PAGES) -> HugePageStock:
    """Raises OSError where the kernel has no such pages."""
    directory = root / f"hugepages-{page_bytes // 1024}kB"

    def number(name: str) -> int:
        return int((directory / name).read_text())

    surplus = number("nr_overcommit_hugepages") - number("surplus_hugepages")
    return HugePageStock(
        page_bytes,
        number("nr_hugepages"),
        number("free_hugepages"),
        number("resv_hugepages"),
        max(0, surplus),
    )


def chosen_word(text: str) -> str:
    """The word in brackets, as in "always [madvise] never"; "" when there is none."""
    _, _, rest = text.partition("[")
    return rest.partition("]")[0]


def shmem_policy(path: Path = SHMEM_ENABLED) -> str:
    """The kernel's word on huge pages in shared memory; "" on a kernel without them."""
    try:
        return chosen_word(path.read_text())
    except OSError:
        return ""


def may_be_huge(file_system: PoolFileSystem, policy: str) -> bool:
    """Whether pages of the file can become huge at all.

    A mounted tmpfs goes by its `huge=` option; the kernel's `force` and `deny` overrule it.
    """
    if file_system.is_hugetlbfs:
        return True
    if file_system.kind != "tmpfs" or policy in ("", "deny"):
        return False
    return policy == "force" or file_system.huge_option != "never"


def huge_pages_fix(file_system: PoolFileSystem) -> str:
    """What to do for a pool in huge pages, for error texts."""
    if file_system.kind == "tmpfs":
        return (
            f"mount -o remount,huge=within_size {file_system.mount_point} (now"
            f" huge={file_system.huge_option}), or put dram.path on hugetlbfs"
        )
    return f"put dram.path on hugetlbfs or on a tmpfs with huge= (it is on {file_system.kind})"


def huge_bytes(inode: int, smaps: Path = SMAPS) -> int:
    """How many mapped bytes of a file are really in huge pages.

    Walks the page tables: milliseconds for each mapped GiB of small pages.
    """
    return parse_huge_bytes(smaps.read_text(), inode)


def parse_huge_bytes(smaps: str, inode: int) -> int:
    """As `huge_bytes`, from the text of /proc/self/smaps."""
    total, is_ours = 0, False
    for line in smaps.splitlines():
        fields = line.split()
        if len(fields) >= 5 and "-" in fields[0] and not fields[0].endswith(":"):
            is_ours = fields[4] == str(inode)
        elif is_ours and fields and fields[0].rstrip(":") in _HUGE_FIELDS:
            total += int(fields[1]) * 1024
    return total
