"""The data directory: whose it is, what survives, what damage costs."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from rocksdict import Options, Rdict

from emberkv_proto.errors import PreflightError
from emberkv_proto.layout import Group, GroupKind, Namespace
from emberkv_proto.types import BlockHash, NamespaceId
from store_daemon import local_index
from store_daemon.local_index import IndexChanges, IndexContent, LocalIndex
from store_daemon.tiers.segments import PAGE_BYTES, SsdRow

NODE = "node-a"


def row(number: int, segment: int = 1, part: int = 0) -> SsdRow:
    return SsdRow(
        NamespaceId(b"n" * 16),
        BlockHash(number.to_bytes(32, "big")),
        part,
        None,
        segment,
        PAGE_BYTES * (1 + number),
        100,
        number,
    )


def namespace(model: str) -> Namespace:
    return Namespace(
        model=model,
        weights_id="w",
        kv_dtype="bfloat16",
        layout_fingerprint="f",
        block_tokens=16,
        groups=(Group(GroupKind.FULL, 2, 4096),),
    )


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def index(data_dir: Path) -> Iterator[LocalIndex]:
    index = LocalIndex.open(data_dir, NODE)
    yield index
    index.check_integrity()
    index.close()


def filled(data_dir: Path, count: int = 2000) -> list[SsdRow]:
    """Close a directory with rows that are in an SST file."""
    index = LocalIndex.open(data_dir, NODE)
    rows = [row(number) for number in range(count)]
    index.put_rows(rows)
    index.mark_covered(5)
    index.close()
    return rows


def test_rows_are_kept_by_place_and_forgotten(index: LocalIndex) -> None:
    index.put_rows([row(2), row(1), row(1, part=1, segment=2)])
    index.put_rows([row(1, segment=9)])
    index.forget_rows([row(2), row(77)])
    assert list(index.rows()) == [row(1), row(1, part=1, segment=2), row(1, segment=9)]
    assert index.content().forgotten == {1: {row(2).offset, row(77).offset}}


def test_rows_of_a_sealed_segment_leave_and_what_is_forgotten_of_it_stays(
    index: LocalIndex,
) -> None:
    index.put_rows([row(1), row(2), row(3, segment=2), row(4, segment=257)])
    index.forget_rows([row(1)])
    index.mark_sealed(1, 1)
    assert index.covered_through() == 1
    assert list(index.rows()) == [row(3, segment=2), row(4, segment=257)]
    assert index.content().forgotten == {}
    assert index.content().sealed == {1: 1}
    index.forget_rows([row(2)])
    assert index.content().forgotten == {1: {row(2).offset}}
    index.drop_segments([1])
    assert index.content() == IndexContent((row(3, segment=2), row(4, segment=257)), {}, {})


def test_a_mark_never_moves_back(index: LocalIndex) -> None:
    index.mark_covered(7)
    index.mark_sealed(3, 1)
    index.mark_covered(5)
    assert index.covered_through() == 7


def test_changes_are_made_together_and_forgetting_comes_after_sealing(index: LocalIndex) -> None:
    index.put_rows([row(1), row(2), row(3, segment=2)])
    index.apply(IndexChanges((row(9, segment=4),), (row(1),), {1: 2}, (2,)))
    assert index.content() == IndexContent((row(9, segment=4),), {1: {row(1).offset}}, {1: 2})


def test_rows_marks_and_namespaces_survive_closing(data_dir: Path) -> None:
    rows = filled(data_dir)
    index = LocalIndex.open(data_dir, NODE)
    assert sorted(index.rows(), key=lambda row: row.checksum) == rows
    assert index.covered_through() == 5
    assert not index.was_rebuilt
    index.close()


def test_database_can_be_opened_again_while_a_row_iterator_is_alive(data_dir: Path) -> None:
    filled(data_dir, 10)
    index = LocalIndex.open(data_dir, NODE)
    rows = index.rows()
    next(rows)
    index.close()
    again = LocalIndex.open(data_dir, NODE)
    assert len(list(rows)) == 9
    again.close()


def test_directory_is_the_owners_alone(index: LocalIndex, data_dir: Path) -> None:
    assert stat.S_IMODE(data_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE((data_dir / "lock").stat().st_mode) == 0o600


def test_second_opener_is_refused_by_pid(index: LocalIndex, data_dir: Path) -> None:
    with pytest.raises(PreflightError, match=rf"pid {os.getpid()}.*daemon\.data_dir"):
        LocalIndex.open(data_dir, NODE)


@pytest.mark.process
def test_second_process_is_refused_until_the_first_is_gone(data_dir: Path) -> None:
    holder = (
        "import sys; from pathlib import Path; from store_daemon.local_index import LocalIndex\n"
        f"i = LocalIndex.open(Path(sys.argv[1]), {NODE!r}); print('open', flush=True)\n"
        "sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", holder, str(data_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        with pytest.raises(PreflightError, match=f"pid {process.pid}"):
            LocalIndex.open(data_dir, NODE)
        process.kill()
        process.wait(60)
    LocalIndex.open(data_dir, NODE).close()


def test_directory_of_another_node_is_refused_and_not_changed(data_dir: Path) -> None:
    filled(data_dir, 3)
    with pytest.raises(PreflightError, match=r"belongs to node 'node-a'.*'node-b'"):
        LocalIndex.open(data_dir, "node-b")
    index = LocalIndex.open(data_dir, NODE)
    assert len(list(index.rows())) == 3
    index.close()


@pytest.mark.parametrize(
    ("content", "message"),
    [(b'{"format":99,"node_id":"node-a"}', "format 99"), (b"\0\0", "not a marker of ours")],
)
def test_foreign_marker_is_refused(data_dir: Path, content: bytes, message: str) -> None:
    filled(data_dir, 1)
    (data_dir / "marker.json").write_bytes(content)
    with pytest.raises(PreflightError, match=message):
        LocalIndex.open(data_dir, NODE)


def test_data_dir_that_is_a_file_is_refused(data_dir: Path) -> None:
    data_dir.write_bytes(b"")
    with pytest.raises(PreflightError, match=r"daemon\.data_dir"):
        LocalIndex.open(data_dir, NODE)


def overwrite(pattern: str) -> Callable[[Path], None]:
    def damage(database: Path) -> None:
        for path in database.glob(pattern):
            size = path.stat().st_size
            path.write_bytes(os.urandom(max(size, 100)))

    return damage


def unlink(pattern: str) -> Callable[[Path], None]:
    def damage(database: Path) -> None:
        for path in database.glob(pattern):
            path.unlink()

    return damage


def clear(database: Path) -> None:
    for path in database.iterdir():
        path.unlink()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "everything is garbage": overwrite("*"),
    "CURRENT is garbage": overwrite("CURRENT"),
    "MANIFEST is garbage": overwrite("MANIFEST*"),
    "SST is garbage": overwrite("*.sst"),
    "CURRENT is missing": unlink("CURRENT"),
    "MANIFEST is missing": unlink("MANIFEST*"),
    "SST is missing": unlink("*.sst"),
    "directory is empty": clear,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_database_is_rebuilt_and_everything_else_survives(
    data_dir: Path, damage: Callable[[Path], None]
) -> None:
    filled(data_dir)
    index = LocalIndex.open(data_dir, NODE)
    database = index._database
    assert database is not None
    database.flush()
    del database
    first = index.next_incarnation()
    index.put_namespace(namespace("m"))
    index.close()
    damage(data_dir / "rocksdb")

    index = LocalIndex.open(data_dir, NODE)
    assert list(index.rows()) == []
    assert index.was_rebuilt
    assert index.covered_through() == 0
    assert index.next_incarnation() > first
    assert index.namespaces() == {namespace("m").id: namespace("m")}
    index.put_rows([row(1)])
    index.check_integrity()
    index.close()

    index = LocalIndex.open(data_dir, NODE)
    assert list(index.rows()) == [row(1)]
    assert not index.was_rebuilt
    index.close()


def test_damage_inside_an_sst_is_found_though_the_database_opens(data_dir: Path) -> None:
    filled(data_dir, 20000)
    index = LocalIndex.open(data_dir, NODE)
    database = index._database
    assert database is not None
    database.flush()
    del database
    index.close()
    for path in (data_dir / "rocksdb").glob("*.sst"):
        middle = path.stat().st_size // 2
        with path.open("r+b") as file:
            file.seek(middle)
            file.write(os.urandom(5000))
    index = LocalIndex.open(data_dir, NODE)
    assert list(index.rows()) == []
    assert index.was_rebuilt
    assert (data_dir / "rocksdb.corrupt-1").is_dir()
    index.close()


class _Bomb:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (str(self.path), "w"))


def pickled_by_default_mode(directory: Path, value: object) -> bytes:
    """Make a database in the library's own default mode; return what it stored for `value`."""
    database = Rdict(str(directory))
    database[b"s-bomb"] = value
    database.close()
    del database
    database = Rdict(str(directory), Options(raw_mode=True))
    stored = next(iter(database.values()))
    database.close()
    assert isinstance(stored, bytes)
    return stored


def test_pickled_code_in_the_database_does_not_run(data_dir: Path, tmp_path: Path) -> None:
    filled(data_dir, 3)
    fuse = tmp_path / "went-off"
    bomb = pickled_by_default_mode(tmp_path / "default", _Bomb(fuse))
    assert b"went-off" in bomb
    database = Rdict(str(data_dir / "rocksdb"), Options(raw_mode=True))
    for key in (b"s-bomb", b"m/incarnation", b"m/covered-through"):
        database[key] = bomb
    database.close()
    del database

    index = LocalIndex.open(data_dir, NODE)
    assert len(list(index.rows())) == 3
    assert index.unreadable_rows == 1
    assert index.covered_through() == 0
    assert index.next_incarnation() >= int(time.time()) - 1
    index.close()
    assert not fuse.exists()


def test_database_of_the_unpickling_mode_is_not_obeyed(data_dir: Path, tmp_path: Path) -> None:
    filled(data_dir, 3)
    fuse = tmp_path / "went-off"
    shutil.rmtree(data_dir / "rocksdb")
    pickled_by_default_mode(data_dir / "rocksdb", _Bomb(fuse))

    index = LocalIndex.open(data_dir, NODE)
    assert list(index.rows()) == []
    index.put_rows([row(1)])
    assert list(index.rows()) == [row(1)]
    index.close()
    assert not fuse.exists()


def test_incarnation_grows_over_restarts_and_every_loss(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_800_000_000.0
    monkeypatch.setattr(local_index, "time", SimpleNamespace(time=lambda: now))
    seen = [0]
    for lost in ((), ("incarnation",), ("rocksdb/*",), ("rocksdb/*", "incarnation")):
        for path in (path for pattern in lost for path in data_dir.glob(pattern)):
            path.unlink()
        if len(lost) == 2:
            now += 60  # nothing is left but the clock
        index = LocalIndex.open(data_dir, NODE)
        seen += [index.next_incarnation(), index.next_incarnation()]
        index.close()
    assert seen == sorted(set(seen))


def test_incarnation_file_with_garbage_is_replaced(data_dir: Path) -> None:
    index = LocalIndex.open(data_dir, NODE)
    first = index.next_incarnation()
    (data_dir / "incarnation").write_bytes(b"\xff\x00")
    assert index.next_incarnation() > first
    index.close()


def test_namespaces_survive_and_a_damaged_file_costs_only_itself(data_dir: Path) -> None:
    index = LocalIndex.open(data_dir, NODE)
    for model in ("a", "b", "../../c"):
        index.put_namespace(namespace(model))
    index.close()
    names = sorted(path.name for path in (data_dir / "namespaces").iterdir())
    assert names == sorted(f"{namespace(m).id.hex()}.json" for m in ("a", "b", "../../c"))
    (data_dir / "namespaces" / f"{namespace('a').id.hex()}.json").write_bytes(b"{\xff")
    (data_dir / "namespaces" / f"{'0' * 32}.json").write_text(namespace("b").to_json())

    index = LocalIndex.open(data_dir, NODE)
    assert set(index.namespaces()) == {namespace("b").id, namespace("../../c").id}
    assert index.unreadable_namespaces == 2
    index.put_namespace(namespace("a"))
    index.check_integrity()
    index.close()


def test_closed_index_refuses_writes_and_a_second_close_is_harmless(data_dir: Path) -> None:
    index = LocalIndex.open(data_dir, NODE)
    index.close()
    index.close()
    with pytest.raises(OSError, match="closed"):
        index.put_rows([row(1)])


def test_hundred_restarts_leave_a_bounded_number_of_files(data_dir: Path) -> None:
    for number in range(100):
        index = LocalIndex.open(data_dir, NODE)
        # Spread over the key space, as hashes are.
        index.put_rows([row(key * 7919 % 10007) for key in range(10 * number, 10 * number + 10)])
        index.close()
    assert len(list((data_dir / "rocksdb").iterdir())) < 40
