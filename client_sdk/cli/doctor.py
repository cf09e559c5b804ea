"""Checks of this machine against a configuration: ok, warn or fail, each with the fix."""

from __future__ import annotations

import contextlib
import importlib.metadata
import mmap
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from client_sdk import faults
from client_sdk.cli.cluster_plan import LOOPBACK, MAX_SOCKET_PATH_BYTES, SHM
from client_sdk.cli.config_show import combined_settings
from client_sdk.settings import Settings, load_settings
from emberkv_proto.errors import ConfigError, PreflightError

MIB = 1 << 20
OLDEST_LINUX = (5, 10)
EXTRAS = {
    "daemon": ("grpcio", "rocksdict", "uvloop", "prometheus-client"),
    "router": (
        *("grpcio", "uvloop", "httptools", "aiohttp", "numba", "prometheus-client"),
        *("msgspec", "pyzmq"),
    ),
    "torch": ("torch", "aiohttp", "msgspec", "pyzmq"),
}
"""Distributions that an extra brings; the same as in pyproject.toml."""


class Verdict(str, Enum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check saw. `fix` is empty when there is nothing to do."""

    check: str
    verdict: Verdict
    seen: str
    fix: str = ""


def examine(path: Path | None, overrides: Sequence[str]) -> list[Finding]:
    """Run all checks. A configuration that cannot be read ends those that need it."""
    findings = [check_linux(platform.release()), *check_extras(_installed_version)]
    findings.append(check_hashes())
    findings.append(check_stale_pools(SHM, _is_alive))
    findings.append(check_faults(os.environ))
    try:
        settings = load_settings(combined_settings(), path, overrides)
    except ConfigError as error:
        return [*findings, Finding("config", Verdict.FAIL, str(error), "correct the key")]
    except ModuleNotFoundError as error:
        fix = "pip install 'emberkv[daemon,router]'"
        return [*findings, Finding("config", Verdict.FAIL, f"{error.name} is missing", fix)]
    findings.append(Finding("config", Verdict.OK, str(path or "defaults")))
    return [*findings, *_check_settings(settings)]


def _check_settings(settings: Settings) -> Iterator[Finding]:
    parts: dict[str, Any] = {name: getattr(settings, name) for name in type(settings).model_fields}
    daemon, dram, ssd = parts["daemon"], parts["dram"], parts["ssd"]
    cluster, router = parts["cluster"], parts["router"]
    wanted_bytes = dram.capacity_bytes * cluster.nodes
    yield check_free_space("dram space", dram.path, wanted_bytes, "dram.capacity_bytes")
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield check_memlock(limit, dram.capacity_bytes)
    for drive in ssd.drives:
        wanted_bytes = drive.capacity_bytes * cluster.nodes
        yield check_free_space("ssd space", drive.path, wanted_bytes, "ssd.capacity_bytes")
        yield check_direct_io(drive.path, ssd.direct_io)
    yield check_socket_path(daemon.socket_path)
    yield check_transport(parts["transport"])
    ports = {
        "daemon.grpc_port": daemon.grpc_port,
        "daemon.metrics_port": daemon.metrics_port,
        "router.port": router.port,
        "cluster.router_port": cluster.router_port,
        "cluster.index_port": cluster.index_port,
    }
    for name, port in ports.items():
        yield check_port(name, port)


def check_transport(section: Any) -> Finding:
    """What blocks will take between nodes; with UCX, after a real transfer on this machine."""
    from client_sdk.transport.agent_process import UCP_AGENT, UCX_AGENT
    from client_sdk.transport.ucx_settings import one_sided
    from store_daemon.transport.choice import TransportKind, choose, ucx_settings
    from store_daemon.transport.ucx_probe import probe_ucx

    try:
        kind = choose(section)
        if kind is TransportKind.TCP:
            return Finding("transport", Verdict.OK, "tcp")
        program = UCP_AGENT if kind is TransportKind.UCP else UCX_AGENT
        lanes = probe_ucx(ucx_settings(section), program)
    except PreflightError as error:
        return Finding("transport", Verdict.FAIL, str(error), "see docs/rdma.md")
    rdma = one_sided(lanes)
    if not rdma and section.rdma != "off":
        seen = f"{kind.value} without RDMA, over {' '.join(lanes)}"
        return Finding(
            "transport", Verdict.WARN, seen, "see docs/rdma.md, or use transport.kind tcp"
        )
    return Finding("transport", Verdict.OK, f"{kind.value} over {' '.join(rdma or lanes)}")


def check_linux(release: str) -> Finding:
    match = re.match(r"(\d+)\.(\d+)", release)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if platform.system() != "Linux" or version < OLDEST_LINUX:
        return Finding(
            "linux", Verdict.FAIL, f"{platform.system()} {release}", "use Linux 5.10 or newer"
        )
    return Finding("linux", Verdict.OK, release)


def check_extras(version_of: Callable[[str], str | None]) -> Iterator[Finding]:
    """One finding per extra. The engine's torch may be missing where another engine runs."""
    for extra, names in EXTRAS.items():
        versions = {name: version_of(name) for name in names}
        missing = [name for name, version in versions.items() if version is None]
        if missing:
            fix = f"pip install 'emberkv[{extra}]'"
            seen = f"missing: {', '.join(missing)}"
            yield Finding(f"extra {extra}", Verdict.WARN, seen, fix)
        else:
            seen = ", ".join(f"{name} {version}" for name, version in versions.items())
            yield Finding(f"extra {extra}", Verdict.OK, seen)


def _installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


_HASH_PROGRAM = """
from emberkv_proto.hashing import block_hashes, lora_key
from emberkv_proto.types import NamespaceId
keys = [lora_key("adapter", "1")]
space = NamespaceId(bytes(16))
print(block_hashes(space, list(range(256)), 16, salt=b"s", extra_keys=keys)[-1].hex())
"""


def check_hashes(seeds: Sequence[str] = ("0", "4242")) -> Finding:
    """Two processes with different PYTHONHASHSEED must build the same block hash."""
    seen = set()
    for seed in seeds:
        ran = subprocess.run(
            [sys.executable, "-c", _HASH_PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        if ran.returncode:
            return Finding("block hashes", Verdict.FAIL, ran.stderr.strip()[-300:], "reinstall")
        seen.add(ran.stdout.strip())
    if len(seen) > 1:
        fix = "report it: no two processes would share a block"
        return Finding("block hashes", Verdict.FAIL, f"differ between processes: {seen}", fix)
    return Finding("block hashes", Verdict.OK, f"equal in {len(seeds)} processes")


def check_faults(environ: Mapping[str, str]) -> Finding:
    """Faults by name belong in tests."""
    text = environ.get(faults.VARIABLE, "")
    if not text.strip():
        return Finding("faults", Verdict.OK, "none are made")
    try:
        faults.Faults.parse(text)
    except ConfigError as error:
        return Finding("faults", Verdict.FAIL, str(error), f"unset {faults.VARIABLE}")
    seen = f"servers started from here will make: {text}"
    return Finding("faults", Verdict.WARN, seen, f"unset {faults.VARIABLE}")


def check_stale_pools(shm: Path, is_alive: Callable[[Path], bool]) -> Finding:
    """Pools that no process maps: memory held for nothing, unless a daemon will come back."""
    stale: dict[Path, int] = {}
    for pool in sorted(shm.glob("emberkv-*")):
        if not is_alive(pool):
            with contextlib.suppress(FileNotFoundError):  # its daemon has just removed it
                stale[pool] = pool.stat().st_size
    if not stale:
        return Finding("left-over pools", Verdict.OK, "none")
    size = sum(stale.values())
    names = " ".join(str(pool) for pool in stale)
    fix = f"if no daemon will start on them again: rm {names}"
    seen = f"{len(stale)} files of {size / MIB:.0f} MiB that no process maps"
    return Finding("left-over pools", Verdict.WARN, seen, fix)


def _is_alive(pool: Path) -> bool:
    """Whether a process that we may look into maps the file."""
    return any(str(pool) in _read_maps(maps) for maps in Path("/proc").glob("[0-9]*/maps"))


def _read_maps(maps: Path) -> str:
    try:
        return maps.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""  # gone meanwhile, or another user's


def check_free_space(check: str, path: Path, wanted_bytes: int, key: str) -> Finding:
    directory = _existing(path)
    held = held_bytes(path)
    free = shutil.disk_usage(directory).free + held
    seen = f"{directory} has {free / MIB:.0f} MiB free, {wanted_bytes / MIB:.0f} MiB asked"
    if free < wanted_bytes:
        return Finding(check, Verdict.FAIL, seen, f"lower {key}, or make the file system larger")
    return Finding(check, Verdict.OK, seen)


def held_bytes(path: Path) -> int:
    """What a pool file, or a directory of segments, takes already."""
    if path.is_file():
        return path.stat().st_size
    if not path.is_dir() or not os.access(path, os.R_OK | os.X_OK):
        return 0
    return sum(entry.stat().st_blocks * 512 for entry in path.iterdir() if entry.is_file())


def check_memlock(limit_bytes: int, wanted_bytes: int) -> Finding:
    """Pinning the pool for a GPU needs it; without one it does not matter."""
    if limit_bytes == resource.RLIM_INFINITY:
        return Finding("memlock", Verdict.OK, "unlimited")
    seen = f"limit is {limit_bytes / MIB:.0f} MiB, the pool has {wanted_bytes / MIB:.0f} MiB"
    if limit_bytes < wanted_bytes:
        fix = "only for GPUs and RDMA: ulimit -l unlimited (LimitMEMLOCK=infinity in systemd)"
        return Finding("memlock", Verdict.WARN, seen, fix)
    return Finding("memlock", Verdict.OK, seen)


def check_direct_io(path: Path, wanted: bool) -> Finding:
    """Write and read one aligned page past the page cache, where segments will be."""
    if not wanted:
        return Finding("O_DIRECT", Verdict.WARN, "ssd.direct_io is off", "turn it on if it works")
    directory = _existing(path)
    probe = directory / f".emberkv-doctor-{os.getpid()}"
    page = mmap.mmap(-1, 4096)
    try:
        descriptor = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_DIRECT, 0o600)
    except OSError as error:
        probe.unlink(missing_ok=True)
        fix = "put ssd.path on a file system with O_DIRECT, or set ssd.direct_io: false"
        return Finding("O_DIRECT", Verdict.FAIL, f"{directory}: {error.strerror}", fix)
    try:
        page[:4] = b"warm"
        os.pwrite(descriptor, page, 0)
        back = mmap.mmap(-1, 4096)
        os.preadv(descriptor, [back], 0)
        same = back[:4] == b"warm"
        back.close()
    except OSError as error:
        fix = "put ssd.path on a file system with O_DIRECT, or set ssd.direct_io: false"
        return Finding("O_DIRECT", Verdict.FAIL, f"{directory}: {error.strerror}", fix)
    finally:
        os.close(descriptor)
        probe.unlink(missing_ok=True)
        page.close()
    if not same:
        return Finding(
            "O_DIRECT", Verdict.FAIL, f"{directory} reads back other bytes", "replace it"
        )
    return Finding("O_DIRECT", Verdict.OK, str(directory))


def check_socket_path(path: Path) -> Finding:
    length = len(str(path).encode())
    seen = f"{path} ({length} bytes)"
    if length > MAX_SOCKET_PATH_BYTES:
        fix = f"daemon.socket_path: at most {MAX_SOCKET_PATH_BYTES} bytes"
        return Finding("socket path", Verdict.FAIL, seen, fix)
    directory = _existing(path)
    if not os.access(directory, os.W_OK):
        fix = "create the directory for the daemon's user, or set daemon.socket_path"
        return Finding("socket path", Verdict.WARN, f"{directory} is not writable", fix)
    return Finding("socket path", Verdict.OK, seen)


def check_port(name: str, port: int) -> Finding:
    if port == 0:
        return Finding(name, Verdict.OK, "0: a free one is chosen")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            fix = f"stop what listens there, or set {name}"
            return Finding(name, Verdict.WARN, f"{LOOPBACK}:{port}: {error.strerror}", fix)
    return Finding(name, Verdict.OK, f"{LOOPBACK}:{port} is free")


def _existing(path: Path) -> Path:
    """The nearest directory that exists: where the path would be made."""
    for candidate in (path, *path.absolute().parents):
        if candidate.is_dir():
            return candidate
    return Path("/")


def findings_json(findings: Sequence[Finding]) -> list[dict[str, str]]:
    return [
        {"check": f.check, "verdict": f.verdict.value, "seen": f.seen, "fix": f.fix}
        for f in findings
    ]


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    colours = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "red"}
    table = Table(box=None, pad_edge=False)
    for heading in ("", "check", "seen", "fix"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        colour = colours[finding.verdict]
        verdict = f"[{colour}]{finding.verdict.value}[/]"
        table.add_row(verdict, finding.check, escape(finding.seen), escape(finding.fix))
    console.print(table)
