"""The marker of a directory that outlives the daemon: whose, in which format, by whom written.

A format that this version does not read is refused, never overwritten: the content is a cache, but
to throw it away is the operator's choice.
"""

from __future__ import annotations

import json
from pathlib import Path

from emberkv_proto import __version__
from emberkv_proto.errors import PreflightError
from store_daemon.files import write_durably

MARKER_FILE = "marker.json"
UNKNOWN_WRITER = "an unknown version"


def claim_directory(directory: Path, node_id: str, data_format: int, setting: str) -> bool:
    """Check the marker, or write one where there is none; return whether there was one.

    Keeps the marker's version that of the last daemon that used the directory.

    Raises:
        PreflightError: another node's, of another format, or not readable; says what to do.
        OSError: it cannot be written.
    """
    path = directory / MARKER_FILE
    try:
        marker = json.loads(path.read_bytes())
        owner, found = str(marker["node_id"]), marker["format"]
        writer = str(marker.get("version", UNKNOWN_WRITER))
    except FileNotFoundError:
        _write(path, node_id, data_format)
        return False
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PreflightError(
            f"{path} is not a marker of ours ({error}); remove it if the directory belongs to"
            f" node {node_id}, or set {setting} to another one"
        ) from error
    if found != data_format:
        raise PreflightError(format_refusal(str(directory), writer, found, data_format, setting))
    if owner != node_id:
        raise PreflightError(
            f"{directory} belongs to node {owner!r}, this is node {node_id!r};"
            f" set node.id back or {setting} to this node's directory"
        )
    if writer != __version__:
        _write(path, node_id, data_format)
    return True


def format_refusal(what: str, writer: str, found: object, ours: int, setting: str) -> str:
    """Why content of another format is left alone, and the ways on."""
    by = writer if writer == UNKNOWN_WRITER else f"emberkv {writer}"
    return (
        f"{what} was written by {by} in format {found}; this is emberkv {__version__}, which reads"
        f" format {ours} only. To keep the content, start that version again. To go on with this"
        f" one, stop the other (`emberkv drain`), then move {what} away or set {setting} to another"
        " place: it is a cache and fills anew"
    )


def _write(path: Path, node_id: str, data_format: int) -> None:
    content = {"format": data_format, "node_id": node_id, "version": __version__}
    write_durably(path, json.dumps(content, sort_keys=True).encode() + b"\n")
