"""Directories and small files that must outlive a crash."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from emberkv_proto.errors import PreflightError


class DirectoryLock:
    """Exclusive use of a directory by this process; ends with `release()` or with the process."""

    def __init__(self, directory: Path, setting: str) -> None:
        """Create `directory` (0700) if needed and lock it; `setting` is named in the message.

        Raises:
            PreflightError: another process holds it, or it cannot be created or written.
        """
        self._path = directory / "lock"
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise PreflightError(
                f"{directory} cannot be used: {error.strerror}; make it writable for uid"
                f" {os.geteuid()} or set {setting} to another directory"
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, b"%d\n" % os.getpid(), 0)
        except BlockingIOError:
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()
            os.close(self._fd)
            raise PreflightError(
                f"{directory} is in use by the daemon with pid {holder or 'unknown'};"
                f" stop that one or set {setting} to another directory"
            ) from None
        except OSError as error:
            os.close(self._fd)
            raise PreflightError(f"{self._path} cannot be locked: {error.strerror}") from error

    def release(self) -> None:
        os.close(self._fd)


def write_durably(path: Path, content: bytes) -> None:
    """Replace `path` in one step: after a crash it holds the old content or the new one.

    Raises:
        OSError: nothing was replaced.
    """
    partial = path.with_name(path.name + ".partial")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        written = 0
        while written < len(content):
            written += os.write(fd, content[written:])
        os.fsync(fd)
    finally:
        os.close(fd)
    partial.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the creation, renaming and removal of files in `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
