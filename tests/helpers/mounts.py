"""File systems for pools, mounted for one test where that is allowed; otherwise it is skipped."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

NR_HUGEPAGES = Path("/proc/sys/vm/nr_hugepages")


@contextlib.contextmanager
def mounted(kind: str, options: str, at: Path) -> Iterator[Path]:
    """A mount that is gone after the block."""
    at.mkdir()
    command = ["mount", "-t", kind, *(["-o", options] if options else []), "none", os.fspath(at)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    if done.returncode != 0:
        pytest.skip(f"cannot mount {kind}: {done.stderr.strip()}")
    try:
        yield at
    finally:
        subprocess.run(["umount", os.fspath(at)], timeout=90, check=True)


@contextlib.contextmanager
def huge_pages(count: int) -> Iterator[None]:
    """So many more pages of 2 MiB, for the block."""
    try:
        before = int(NR_HUGEPAGES.read_text())
        NR_HUGEPAGES.write_text(f"{before + count}\n")
    except OSError as error:
        pytest.skip(f"huge pages cannot be set aside: {error}")
    try:
        if int(NR_HUGEPAGES.read_text()) < before + count:
            pytest.skip("the kernel finds no memory for huge pages")
        yield
    finally:
        NR_HUGEPAGES.write_text(f"{before}\n")
