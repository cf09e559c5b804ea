"""What another version or another node left behind is refused with a way on, and left as it was."""

from __future__ import annotations

import asyncio
import json
import struct
from pathlib import Path

import pytest

from client_sdk.aio import timeout
from emberkv_proto import __version__
from emberkv_proto.errors import PreflightError
from emberkv_proto.shm_layout import LAYOUT_VERSION, POOL_MAGIC, POOL_WRITER_OFFSET, pool_writer
from store_daemon.app import Daemon
from store_daemon.config import DaemonSettings
from store_daemon.marker import MARKER_FILE, claim_directory
from store_daemon.tiers.drive_marker import MARKER_NAME, create_marker, read_marker
from store_daemon.tiers.segments import FORMAT_VERSION, pack_segment_header, segment_name


def settings_in(directory: Path) -> DaemonSettings:
    return DaemonSettings.model_validate(
        {
            "node": {"id": "node-1"},
            "daemon": {
                "socket_path": directory / "s",
                "data_dir": directory / "data",
                "grpc_port": 0,
                "metrics_port": 0,
                "drain_seconds": 2.0,
            },
            "dram": {
                "path": directory / "pool",
                "capacity_bytes": 1 << 20,
                "extent_bytes": 1 << 16,
            },
            "ssd": {
                "path": directory / "ssd",
                "capacity_bytes": 1 << 20,
                "segment_bytes": 1 << 16,
                "direct_io": False,
            },
        }
    )


async def live_once(directory: Path) -> None:
    daemon = Daemon(settings_in(directory))
    task = asyncio.ensure_future(daemon.run())
    waiting = asyncio.ensure_future(daemon.is_serving.wait())
    async with timeout(60):
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        daemon.stop()
        await task


def files_in(place: Path) -> dict[Path, bytes]:
    """A file's content, or that of all files of a directory, but for its lock."""
    files = [path for path in (place, *place.rglob("*")) if path.is_file()]
    return {path: path.read_bytes() for path in files if path.name != "lock"}


async def refused(directory: Path, kept: Path) -> str:
    """Start the daemon, which must refuse and leave `kept` as it is; return its words."""
    before = files_in(kept)
    with pytest.raises(PreflightError) as caught:
        await live_once(directory)
    assert files_in(kept) == before
    return str(caught.value)


def doctor(path: Path, **changes: object) -> None:
    marker = json.loads(path.read_text())
    path.write_text(json.dumps({**marker, **changes}))


@pytest.mark.parametrize(
    ("marker", "setting"),
    [(f"data/{MARKER_FILE}", "daemon.data_dir"), (f"ssd/{MARKER_NAME}", "ssd.path")],
)
async def test_a_directory_of_another_format_is_refused(
    tmp_path: Path, marker: str, setting: str
) -> None:
    await live_once(tmp_path)
    path = tmp_path / marker
    doctor(path, format=99, version="9.8.7")
    words = await refused(tmp_path, path.parent)
    assert f"{path.parent} was written by emberkv 9.8.7 in format 99" in words
    assert f"emberkv {__version__}" in words
    assert f"set {setting}" in words
    assert "emberkv drain" in words
    doctor(path, format=1)  # whose checksums were others
    assert "in format 1;" in await refused(tmp_path, path.parent)
    doctor(path, format="older")
    assert "in format older" in await refused(tmp_path, path.parent)


@pytest.mark.parametrize("marker", [f"data/{MARKER_FILE}", f"ssd/{MARKER_NAME}"])
async def test_a_directory_of_another_node_is_refused(tmp_path: Path, marker: str) -> None:
    await live_once(tmp_path)
    path = tmp_path / marker
    doctor(path, node_id="node-2")
    assert "belongs to node 'node-2'" in await refused(tmp_path, path.parent)


@pytest.mark.parametrize("layout", [LAYOUT_VERSION + 1, LAYOUT_VERSION - 1, 0, 1 << 31])
async def test_a_pool_of_another_layout_is_refused(tmp_path: Path, layout: int) -> None:
    await live_once(tmp_path)
    path = tmp_path / "pool"
    assert pool_writer(path.read_bytes()[:4096]) == __version__
    with path.open("r+b") as file:
        file.write(struct.pack("<8sI", POOL_MAGIC, layout))
        file.seek(POOL_WRITER_OFFSET)
        file.write(b"9.8.7".ljust(32, b"\0"))
    words = await refused(tmp_path, path)
    assert f"{path} was written by emberkv 9.8.7 in format {layout}" in words
    assert "set dram.path" in words


async def test_a_pool_that_does_not_name_its_writer_is_refused_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    path.write_bytes(struct.pack("<8sI", POOL_MAGIC, 7) + bytes(100))
    assert "written by an unknown version in format 7" in await refused(tmp_path, path)


async def test_a_file_that_is_no_pool_is_never_touched(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    path.write_bytes(b"somebody's weights" * 1000)
    assert "is not a pool file, and is left as it is" in await refused(tmp_path, path)


async def test_a_pool_file_without_a_header_yet_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "pool").write_bytes(bytes(1 << 20))
    await live_once(tmp_path)
    assert (tmp_path / "pool").read_bytes()[:8] == POOL_MAGIC


async def test_segments_of_another_format_are_refused_even_without_a_marker(tmp_path: Path) -> None:
    ssd = tmp_path / "ssd"
    ssd.mkdir()
    header = bytearray(pack_segment_header(1))
    struct.pack_into("<I", header, 8, FORMAT_VERSION + 1)
    (ssd / segment_name(1)).write_bytes(bytes(header) + bytes(4096))
    words = await refused(tmp_path, ssd)
    assert f"{ssd} was written by an unknown version in format {FORMAT_VERSION + 1}" in words
    assert not (ssd / MARKER_NAME).exists()


def test_segments_of_this_format_and_foreign_files_get_a_marker(tmp_path: Path) -> None:
    (tmp_path / segment_name(1)).write_bytes(pack_segment_header(1))
    (tmp_path / segment_name(2)).write_bytes(b"")
    (tmp_path / "notes.txt").write_bytes(b"x" * 50)
    made = create_marker(tmp_path, "n")
    assert read_marker(tmp_path) == made
    assert json.loads((tmp_path / MARKER_NAME).read_text())["version"] == __version__


def test_the_marker_names_the_last_version_that_used_the_directory(tmp_path: Path) -> None:
    assert not claim_directory(tmp_path, "n", 1, "x.y")
    doctor(tmp_path / MARKER_FILE, version="0.0.1")
    assert claim_directory(tmp_path, "n", 1, "x.y")
    assert json.loads((tmp_path / MARKER_FILE).read_text())["version"] == __version__


def test_a_marker_of_before_versions_were_written_is_good(tmp_path: Path) -> None:
    (tmp_path / MARKER_FILE).write_text('{"format": 1, "node_id": "n"}')
    assert claim_directory(tmp_path, "n", 1, "x.y")


@pytest.mark.parametrize("content", ["", "[]", "3", '"x"', "{}", '{"format": 1}', "\0"])
def test_what_is_no_marker_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / MARKER_FILE).write_text(content)
    with pytest.raises(PreflightError, match="not a marker of ours"):
        claim_directory(tmp_path, "n", 1, "x.y")
