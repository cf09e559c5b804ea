"""Small files beside the segments: whose drive this is, and how much was ever written to it.

The drive's id travels with the drive, so that drives mounted in another order are understood and
an empty mount point is not taken for the drive that belongs there.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from emberkv_proto import __version__
from emberkv_proto.errors import PreflightError
from store_daemon.files import write_durably
from store_daemon.marker import UNKNOWN_WRITER, format_refusal
from store_daemon.tiers.segments import FORMAT_VERSION, segment_format, segment_number

MARKER_FORMAT = 2
"""Of the directory: it grows when the segments' format does."""
MARKER_NAME = "drive.json"
WEAR_NAME = "written-bytes"
ADOPT_NAME = "adopt"
"""An empty file of this name lets a new drive take the place of one that is missing."""
_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class DriveMarker:
    drive_id: str
    node_id: str


@dataclass(frozen=True, slots=True)
class KnownDrive:
    """What the local index remembers of a drive."""

    path: Path
    """Where it was last."""
    has_rows: bool
    """Whether the index holds its rows. Those of a drive that went missing are dropped, and read
    from its segments again when it is back."""

    def to_bytes(self) -> bytes:
        return json.dumps({"path": str(self.path), "has_rows": self.has_rows}).encode()

    @staticmethod
    def from_bytes(raw: bytes) -> KnownDrive | None:
        """None if `raw` is not such an entry."""
        try:
            content = json.loads(raw)
            path, has_rows = content["path"], content["has_rows"]
        except (ValueError, KeyError, TypeError):
            return None
        if not (isinstance(path, str) and isinstance(has_rows, bool)):
            return None
        return KnownDrive(Path(path), has_rows)


def read_marker(directory: Path) -> DriveMarker | None:
    """None if the directory has none.

    Raises:
        PreflightError: it is not a marker of ours, or of another format.
        OSError: the directory cannot be read.
    """
    path = directory / MARKER_NAME
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        content = json.loads(raw)
        drive_id, node_id, version = content["drive_id"], content["node_id"], content["format"]
        if not (isinstance(drive_id, str) and _ID.fullmatch(drive_id)):
            raise ValueError("drive_id is not 32 hexadecimal digits")
        if not isinstance(node_id, str):
            raise ValueError("node_id is not text")
    except (ValueError, KeyError, TypeError) as error:
        raise PreflightError(
            f"{path} is not a marker of ours ({error}); remove it if the directory belongs to this"
            " node, or set ssd.path to another one"
        ) from error
    if version != MARKER_FORMAT:
        writer = str(content.get("version", UNKNOWN_WRITER))
        raise PreflightError(
            format_refusal(str(directory), writer, version, MARKER_FORMAT, "ssd.path")
        )
    return DriveMarker(drive_id, node_id)


def create_marker(directory: Path, node_id: str) -> DriveMarker:
    """Mark a directory as a drive of this node, durably.

    Raises:
        PreflightError: segments of another format lie there.
        OSError: it cannot be written.
    """
    _refuse_other_segments(directory)
    marker = DriveMarker(secrets.token_hex(16), node_id)
    content = {
        "drive_id": marker.drive_id,
        "format": MARKER_FORMAT,
        "node_id": node_id,
        "version": __version__,
    }
    write_durably(directory / MARKER_NAME, json.dumps(content, sort_keys=True).encode())
    (directory / ADOPT_NAME).unlink(missing_ok=True)
    return marker


def read_wear(directory: Path) -> int:
    """Bytes ever written to the drive; 0 if that is not known. Raises OSError."""
    try:
        text = (directory / WEAR_NAME).read_text("ascii")
        return max(0, int(text))
    except (FileNotFoundError, ValueError):
        return 0


def write_wear(directory: Path, written_bytes: int) -> None:
    """Raises OSError; the earlier count then stays."""
    write_durably(directory / WEAR_NAME, b"%d\n" % written_bytes)


def _refuse_other_segments(directory: Path) -> None:
    """A directory that lost its marker may still hold another version's segments."""
    for path in sorted(directory.iterdir()):
        if segment_number(path.name) is None:
            continue
        with path.open("rb") as file:
            found = segment_format(file.read(16))
        if found is not None and found != FORMAT_VERSION:
            what = str(directory)
            raise PreflightError(
                format_refusal(what, UNKNOWN_WRITER, found, FORMAT_VERSION, "ssd.path")
            )
