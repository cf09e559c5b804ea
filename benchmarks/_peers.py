"""The peers: what each needs, and a venv of its own for it outside the tree.

Versions are pinned: figures of other versions are other figures.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

INSTALL_SECONDS = 900.0
PROBE_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class Peer:
    """A system to be compared with."""

    name: str
    requirements: tuple[str, ...]
    probe: str
    """Python that fails in its venv when the peer cannot run here."""
    hint: str
    """What usually helps then."""


MOONCAKE = Peer(
    "mooncake",
    ("mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy==2.4.6"),
    "import mooncake.store",
    "Debian: apt-get install libibverbs1 librdmacm1 libnuma1",
)
LMCACHE = Peer(
    "lmcache",
    ("lmcache==0.5.6", "torch==2.13.0"),
    "from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient",
    "it needs torch; a CPU build will do",
)
REDIS = Peer(
    "redis",
    ("redis==8.1.0", "hiredis==3.5.0", "numpy==2.4.6"),
    "import redis, hiredis, shutil, sys; sys.exit(not shutil.which('redis-server'))",
    "redis-server must be on the PATH; Debian: apt-get install redis-server",
)
KVCACHE_SIMULATOR = Peer(
    "kvcache-simulator",
    ("kvcache-simulator==0.1.3",),
    "import kvcache_sim",
    "it needs Python 3.10 or newer",
)

DYNAMO = Peer(
    "dynamo",
    ("ai-dynamo-runtime==1.6.1", "numpy==2.4.6"),
    "from dynamo.llm import RadixTree; RadixTree()",
    "its wheels are for x86-64 and aarch64 with glibc 2.28 or newer",
)
SGLANG_ROUTER = Peer(
    "sglang-router",
    ("sglang-router==0.3.2",),
    "import sglang_router.launch_router",
    "its wheels are for x86-64 and aarch64 with glibc 2.17 or newer",
)
VLLM_ROUTER = Peer(
    "vllm-router",
    ("vllm-router==0.1.17",),
    "import vllm_router.launch_router",
    "its wheels are for x86-64 and aarch64 with glibc 2.28 or newer",
)
SMG = Peer(
    "smg",
    ("smg==1.13.0",),
    "import smg",
    "its wheels are for x86-64 and aarch64 with glibc 2.17 or newer",
)


class PeerUnavailableError(Exception):
    """Why a peer cannot be measured here."""


def installed(peer: Peer, directory: Path) -> Path:
    """The folder of programs of the peer's venv, made first if it is not there.

    What pip says goes to stderr. Raises PeerUnavailableError.
    """
    digest = hashlib.sha256("\n".join((sys.version, *peer.requirements)).encode()).hexdigest()[:12]
    venv = directory.expanduser().resolve() / f"{peer.name}-{digest}"
    mark = venv / ".installed"
    if not mark.exists():
        _install(peer, venv)
        mark.touch()
    _run(peer, "try", [str(venv / "bin" / "python"), "-c", peer.probe], PROBE_SECONDS)
    return venv / "bin"


def _install(peer: Peer, venv: Path) -> None:
    print(f"{peer.name}: installing into {venv}", file=sys.stderr, flush=True)
    deadline = time.monotonic() + INSTALL_SECONDS
    if venv.exists():
        shutil.rmtree(venv)  # what an installation left that did not come to its end
    venv.parent.mkdir(parents=True, exist_ok=True)
    _run(peer, "make a venv for", [sys.executable, "-m", "venv", str(venv)], INSTALL_SECONDS)
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    left_seconds = max(deadline - time.monotonic(), 1.0)
    _run(peer, "install", [*pip, *peer.requirements], left_seconds)


def _run(peer: Peer, what: str, command: list[str], timeout_seconds: float) -> None:
    begun = time.monotonic()
    try:
        done = subprocess.run(command, stdout=sys.stderr, timeout=timeout_seconds, check=False)
    except subprocess.TimeoutExpired:
        raise PeerUnavailableError(
            f"could not {what} {peer.name} within {timeout_seconds:.0f} s; {peer.hint}"
        ) from None
    except OSError as error:
        raise PeerUnavailableError(f"could not {what} {peer.name}: {error}") from None
    if done.returncode:
        raise PeerUnavailableError(
            f"could not {what} {peer.name}: exit code {done.returncode} after"
            f" {time.monotonic() - begun:.0f} s, see above; {peer.hint}"
        )
