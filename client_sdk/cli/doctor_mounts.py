"""Checks, inside a daemon's pod, that its directories are the node's and outlive the pod."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from client_sdk.cli.doctor import Finding, Verdict, check_free_space, held_bytes
from emberkv_proto.errors import ConfigError

OF_THE_POD = ("kubernetes.io~empty-dir", "/overlay", "kubernetes.io~projected")
MEMORY = Path("/sys/fs/cgroup/memory.max")
UNLIMITED = 1 << 62
LEAST_FREE = 0.15
"""kubelet's default is to collect images at 15 % free, and to evict pods at 10 %."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of mountinfo: `root` is the part of the file system that is mounted."""

    root: str
    target: str
    kind: str
    is_read_only: bool


def parse_mounts(mountinfo: str) -> list[Mount]:
    """Lines that do not look like any are left out."""
    mounts = []
    for line in mountinfo.splitlines():
        fields, _, rest = line.partition(" - ")
        words, kinds = fields.split(), rest.split()
        if len(words) >= 6 and kinds:
            options = words[5].split(",")
            mounts.append(Mount(words[3], words[4], kinds[0], "ro" in options))
    return mounts


def mount_of(path: Path, mounts: Sequence[Mount]) -> Mount | None:
    """The last of those with the longest target above the path."""
    above = [m for m in mounts if path.is_relative_to(m.target)]
    return max(above, key=lambda m: len(Path(m.target).parts), default=None) if above else None


def examine_mounts(config: Path) -> list[Finding]:
    """Raises nothing: what cannot be looked at is a finding."""
    try:
        from client_sdk.settings import load_settings
        from store_daemon.config import DaemonSettings

        settings = load_settings(DaemonSettings, config)
        mounts = parse_mounts(Path("/proc/self/mountinfo").read_text(encoding="utf-8"))
    except ConfigError as error:
        return [Finding("config", Verdict.FAIL, str(error), "correct the key")]
    except OSError as error:
        return [Finding("mounts", Verdict.WARN, str(error), "run it in the daemon's pod")]
    directories = {
        "pool": settings.dram.path.parent,
        "socket": settings.daemon.socket_path.parent,
        "data": settings.daemon.data_dir,
        **{f"ssd {n}": drive.path for n, drive in enumerate(settings.ssd.drives)},
    }
    findings = [check_mount(name, path, mounts) for name, path in directories.items()]
    for number, drive in enumerate(settings.ssd.drives):
        key = "store.ssd.capacityMi"
        space = check_free_space(f"ssd {number} space", drive.path, drive.capacity_bytes, key)
        findings.append(space)
        if space.verdict is Verdict.OK:
            findings += check_pressure(f"ssd {number} pressure", drive.path, drive.capacity_bytes)
    pool = mount_of(settings.dram.path, mounts)
    is_huge = pool is not None and pool.kind == "hugetlbfs"
    findings += check_memory(_memory_limit(), settings.dram.capacity_bytes, is_huge)
    return findings


def check_mount(name: str, path: Path, mounts: Sequence[Mount]) -> Finding:
    """A directory in the container's root or an emptyDir goes with the pod, and the cache in it."""
    mount = mount_of(path, mounts)
    fix = f"mount a hostPath at {path}: the chart does"
    if mount is None or mount.target == "/":
        return Finding(f"{name} directory", Verdict.FAIL, f"{path} is the container's own", fix)
    if any(word in mount.root or word in f"/{mount.kind}" for word in OF_THE_POD):
        return Finding(f"{name} directory", Verdict.FAIL, f"{path} is the pod's own", fix)
    if mount.is_read_only:
        return Finding(f"{name} directory", Verdict.FAIL, f"{path} is read-only", fix)
    if name == "pool" and mount.kind not in ("tmpfs", "hugetlbfs"):
        seen = f"{path} is on {mount.kind}, which is no memory"
        return Finding("pool directory", Verdict.FAIL, seen, "store.pool.hostPath: /dev/shm/...")
    return Finding(f"{name} directory", Verdict.OK, f"{path}: {mount.root} of {mount.kind}")


def check_pressure(check: str, path: Path, capacity_bytes: int) -> Iterator[Finding]:
    """Whether a full tier leaves so little of its file system that kubelet would evict pods."""
    try:
        system = os.statvfs(path)
    except OSError as error:
        yield Finding(check, Verdict.WARN, str(error), "run it in the daemon's pod")
        return
    left = system.f_bavail * system.f_frsize - max(0, capacity_bytes - held_bytes(path))
    share = left / max(1, system.f_blocks * system.f_frsize)
    seen = f"{share:.0%} of {path}'s file system is left when the tier is full"
    if share < LEAST_FREE:
        fix = "lower store.ssd.capacityMi or give it a disk of its own: where it is the node's own"
        yield Finding(check, Verdict.WARN, seen, f"{fix} disk, kubelet evicts pods below 10 %")
    else:
        yield Finding(check, Verdict.OK, seen)


def check_memory(limit: int, pool_bytes: int, is_huge: bool) -> Iterator[Finding]:
    """Pages of a tmpfs pool count against the pod that first touches them."""
    wanted = 0 if is_huge else pool_bytes
    if limit >= UNLIMITED:
        yield Finding("memory limit", Verdict.WARN, "none", "set one: pool and store.overheadMi")
        return
    seen = f"{limit >> 20} MiB for a pool of {wanted >> 20} MiB"
    if limit - wanted < 256 << 20:
        fix = "raise store.overheadMi: the kernel would end the daemon"
        yield Finding("memory limit", Verdict.FAIL, seen, fix)
        return
    yield Finding("memory limit", Verdict.OK, seen)


def _memory_limit() -> int:
    try:
        text = MEMORY.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return UNLIMITED
    return int(text) if text.isdigit() else UNLIMITED
