"""The daemon's data directory: SSD rows in RocksDB, namespaces, incarnation, lock and marker.

The rows of a segment are kept here until its footer holds them; of a sealed one only how many rows
it has, and which of them were forgotten since. All of it is a cache of what the segment files say
(see `recovery`), so it is written without fsync: a killed process loses nothing, a power cut loses
the newest batches whole and in order.
Namespaces and the incarnation exist nowhere else; they are small files, replaced atomically.

RocksDB is opened in raw mode only: the library's default mode unpickles what it reads.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rocksdict import Options, Rdict, WriteBatch

from client_sdk import faults
from emberkv_proto.errors import CorruptionError, InvalidRequestError, PreflightError
from emberkv_proto.layout import MAX_NAMESPACE_BYTES, Namespace
from emberkv_proto.types import (
    BLOCK_HASH_BYTES,
    NAMESPACE_ID_BYTES,
    BlockHash,
    Incarnation,
    NamespaceId,
)
from store_daemon.files import DirectoryLock, write_durably
from store_daemon.marker import claim_directory
from store_daemon.tiers.drive_marker import KnownDrive
from store_daemon.tiers.segments import SsdRow

_log = logging.getLogger(__name__)

DATA_FORMAT = 3
"""3: checksums are XXH3-64."""
_ROW_PREFIX = b"s"
_FORGOTTEN_PREFIX = b"f"
_SEALED_PREFIX = b"n"
_PIN_PREFIX = b"p"
_PLACE_BYTES = 16
_COVERED = b"m/covered-through"
_INCARNATION = b"m/incarnation"
_DRIVE_PREFIX = b"m/drive/"
_ASIDE = re.compile(r"rocksdb\.corrupt-(\d+)")
# What RocksDB says when the machine, not the database, is the problem.
_NOT_DAMAGE = (
    "lock hold",
    "no space left",
    "permission denied",
    "too many open files",
    "read-only",
)


@dataclass(frozen=True, slots=True)
class IndexContent:
    """What the database says about segments."""

    rows: tuple[SsdRow, ...] = ()
    """Of segments whose footer does not hold them; by place."""
    forgotten: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Per segment, the offsets of records that count no more."""
    sealed: Mapping[int, int] = field(default_factory=dict)
    """Per sealed segment, how many rows its footer has."""

    @property
    def segments(self) -> set[int]:
        """Every segment that anything is said of."""
        return {*(row.segment for row in self.rows), *self.forgotten, *self.sealed}


@dataclass(frozen=True, slots=True)
class IndexChanges:
    """What the index must be told so that it fits the files."""

    put: tuple[SsdRow, ...]
    """Rows that no footer holds."""
    forget: tuple[SsdRow, ...]
    sealed: Mapping[int, int]
    """Segments whose rows are in their footer, and how many; before `forget`."""
    drop: tuple[int, ...]
    """Segments that are no more."""


class LocalIndex:
    """Blocking, thread-safe. Calls that write raise OSError when the database cannot take it."""

    def __init__(self, data_dir: Path, node_id: str, lock: DirectoryLock) -> None:
        """Use `open()`."""
        self.node_id = node_id
        self._dir = data_dir
        self._database_dir = data_dir / "rocksdb"
        self._directory_lock = lock
        self._mutex = threading.RLock()
        self._database: Rdict | None = None
        self._namespaces: dict[NamespaceId, Namespace] = {}
        self._closed = False
        self.was_rebuilt = False
        """The database was lost or damaged and begins empty: rows must come from the segments."""
        self.unreadable_rows = 0
        self.unreadable_namespaces = 0

    @classmethod
    def open(cls, data_dir: Path, node_id: str) -> LocalIndex:
        """Lock the directory and open what is in it; a damaged database is moved aside.

        Raises:
            PreflightError: in use, another node's, of another format, or not writable.
        """
        lock = DirectoryLock(data_dir, "daemon.data_dir")
        index = cls(data_dir, node_id, lock)
        try:
            known = claim_directory(data_dir, node_id, DATA_FORMAT, "daemon.data_dir")
            (data_dir / "namespaces").mkdir(mode=0o700, exist_ok=True)
            index._load_namespaces()
            index._open_or_replace_database(expected=known)
        except OSError as error:
            lock.release()
            raise PreflightError(
                f"{data_dir} cannot be used: {error}; mend that or set daemon.data_dir to another"
                " directory"
            ) from error
        except BaseException:
            lock.release()
            raise
        return index

    # -- incarnation and namespaces ------------------------------------------------------------

    def next_incarnation(self) -> Incarnation:
        """A number greater than any returned before for this directory, durable on return.

        At least the clock's Unix seconds, so that it grows even when all of the data is lost.
        """
        path = self._dir / "incarnation"
        with self._mutex:
            stored = [0]
            with contextlib.suppress(FileNotFoundError, ValueError):
                stored.append(int(path.read_text("ascii")))
            packed = self._get(_INCARNATION)
            if packed is not None:
                stored.append(int.from_bytes(packed, "little"))
            incarnation = max(max(stored) + 1, int(time.time()))
            write_durably(path, b"%d" % incarnation)
            batch = WriteBatch(raw_mode=True)
            batch.put(_INCARNATION, incarnation.to_bytes(8, "little"))
            self._write(batch)
        return Incarnation(incarnation)

    def put_namespace(self, namespace: Namespace) -> None:
        """Keep a namespace over restarts; durable on return."""
        with self._mutex:
            if self._namespaces.get(namespace.id) == namespace:
                return
            write_durably(self._namespace_path(namespace.id), namespace.to_json().encode("ascii"))
            self._namespaces[namespace.id] = namespace

    def namespaces(self) -> dict[NamespaceId, Namespace]:
        with self._mutex:
            return dict(self._namespaces)

    # -- rows ----------------------------------------------------------------------------------

    def put_rows(self, rows: Sequence[SsdRow]) -> None:
        """Store all of `rows` or none."""
        batch = WriteBatch(raw_mode=True)
        for row in rows:
            batch.put(_place(_ROW_PREFIX, row), row.pack())
        self._write(batch)

    def forget_rows(self, rows: Sequence[SsdRow]) -> None:
        """The records of `rows` count no more, whether their rows are here or in a footer."""
        batch = WriteBatch(raw_mode=True)
        for row in rows:
            _forget(batch, row)
        self._write(batch)

    def mark_sealed(self, segment: int, rows: int, gone: Sequence[SsdRow] = ()) -> None:
        """The footer of `segment` holds `rows` rows now; they leave the database.

        Those of them that are `gone` count no more. Covers the segment as `mark_covered` does.
        """
        batch = WriteBatch(raw_mode=True)
        _seal(batch, segment, rows)
        for row in gone:
            _forget(batch, row)
        self._cover(batch, segment)
        self._write(batch)

    def drop_segments(self, segments: Iterable[int]) -> None:
        """The segments are no more, or not to be had for now."""
        batch = WriteBatch(raw_mode=True)
        for segment in segments:
            _drop(batch, segment)
        self._write(batch)

    def apply(self, changes: IndexChanges) -> None:
        """Make all of `changes`, or none."""
        batch = WriteBatch(raw_mode=True)
        for row in changes.put:
            batch.put(_place(_ROW_PREFIX, row), row.pack())
        for segment, rows in changes.sealed.items():
            _seal(batch, segment, rows)
        for row in changes.forget:
            _forget(batch, row)
        for segment in changes.drop:
            _drop(batch, segment)
        self._write(batch)

    def content(self) -> IndexContent:
        """All that is known about segments. Entries that cannot be ours are skipped and counted.

        Damage found while reading moves the database aside; `was_rebuilt` is then True and there
        is no content.
        """
        with self._mutex:
            try:
                return self._scan()
            except CorruptionError as error:
                self._set_database_aside(str(error))
                return IndexContent()

    def rows(self) -> Iterator[SsdRow]:
        """The rows of segments that are not sealed, as of the call. See `content`."""
        return iter(self.content().rows)

    def covered_through(self) -> int:
        """Rows of segments up to this number are all here: what is missing was forgotten."""
        packed = self._get(_COVERED)
        return 0 if packed is None else int.from_bytes(packed, "little")

    def mark_covered(self, segment: int) -> None:
        """Record that the rows of all segments up to `segment` are here or in a footer."""
        batch = WriteBatch(raw_mode=True)
        self._cover(batch, segment)
        self._write(batch)

    # -- hard pins -----------------------------------------------------------------------------

    def put_pins(self, namespace_id: NamespaceId, hashes: Sequence[BlockHash]) -> None:
        """Keep hard pins over restarts; lost with the database."""
        batch = WriteBatch(raw_mode=True)
        for block_hash in hashes:
            batch.put(_PIN_PREFIX + namespace_id + block_hash, b"")
        self._write(batch)

    def delete_pins(self, pins: Sequence[tuple[NamespaceId, BlockHash]]) -> None:
        batch = WriteBatch(raw_mode=True)
        for namespace_id, block_hash in pins:
            batch.delete(_PIN_PREFIX + namespace_id + block_hash)
        self._write(batch)

    def pins(self) -> list[tuple[NamespaceId, BlockHash]]:
        """Namespace and hash of every block under a hard pin. Raises OSError."""
        size = len(_PIN_PREFIX) + NAMESPACE_ID_BYTES
        return [
            (NamespaceId(key[1:size]), BlockHash(key[size:]))
            for key in self._entries(_PIN_PREFIX)
            if len(key) == size + BLOCK_HASH_BYTES
        ]

    # -- drives --------------------------------------------------------------------------------

    def drives(self) -> dict[str, KnownDrive]:
        """By drive id, what is known of the SSD tier's drives. Entries that are none are skipped.

        Raises OSError if the database cannot be read.
        """
        found: dict[str, KnownDrive] = {}
        for key, value in self._entries(_DRIVE_PREFIX).items():
            drive_id = key[len(_DRIVE_PREFIX) :].decode("ascii", "replace")
            known = KnownDrive.from_bytes(value)
            if known is None:
                _log.warning("the entry of drive %s is skipped", drive_id)
                continue
            found[drive_id] = known
        return found

    def put_drive(self, drive_id: str, known: KnownDrive) -> None:
        batch = WriteBatch(raw_mode=True)
        batch.put(_DRIVE_PREFIX + drive_id.encode(), known.to_bytes())
        self._write(batch)

    def forget_drive(self, drive_id: str) -> None:
        batch = WriteBatch(raw_mode=True)
        batch.delete(_DRIVE_PREFIX + drive_id.encode())
        self._write(batch)

    # -- life ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the database and give the directory up. A second call does nothing."""
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            if self._database is not None:
                self._database.close()
                self._database = None
            self._directory_lock.release()

    def check_integrity(self) -> None:
        """Assert that each namespace is durable and each stored row is readable."""
        with self._mutex:
            for namespace_id, namespace in self._namespaces.items():
                text = self._namespace_path(namespace_id).read_text("ascii")
                assert Namespace.from_json(text) == namespace, f"{namespace_id.hex()} differs"
                assert namespace.id == namespace_id, f"{namespace_id.hex()} is {namespace.id.hex()}"
            before = self.unreadable_rows
            content = self._scan()
            assert self.unreadable_rows == before, "the database holds entries that are no rows"
            for row in content.rows:
                assert row.segment not in content.sealed, "a row of a sealed segment is kept"
                gone = content.forgotten.get(row.segment, frozenset())
                assert row.offset not in gone, "a row is kept and forgotten"

    # -- inside --------------------------------------------------------------------------------

    def _namespace_path(self, namespace_id: NamespaceId) -> Path:
        return self._dir / "namespaces" / f"{namespace_id.hex()}.json"

    def _load_namespaces(self) -> None:
        for path in sorted((self._dir / "namespaces").glob("*.json")):
            try:
                if path.stat().st_size > MAX_NAMESPACE_BYTES:
                    raise InvalidRequestError("file is too large")
                namespace = Namespace.from_json(path.read_bytes().decode("ascii"))
                if path.stem != namespace.id.hex():
                    raise InvalidRequestError(f"content has the id {namespace.id.hex()}")
            except (InvalidRequestError, UnicodeDecodeError, OSError) as error:
                self.unreadable_namespaces += 1
                _log.warning("namespace file %s is left unread: %s", path, error)
                continue
            self._namespaces[namespace.id] = namespace

    def _open_or_replace_database(self, *, expected: bool) -> None:
        existed = self._database_dir.is_dir() and any(self._database_dir.iterdir())
        if not existed:
            self._database = self._open_database()
            self.was_rebuilt = expected
            return
        try:
            if not (self._database_dir / "CURRENT").is_file():
                raise CorruptionError("CURRENT is missing")  # RocksDB would begin anew in place
            self._database = self._open_database()
        except CorruptionError as error:
            self._set_database_aside(str(error))

    def _open_database(self) -> Rdict:
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_keep_log_file_num(4)
        options.set_max_total_wal_size(64 << 20)
        try:
            return Rdict(str(self._database_dir), options)
        except Exception as error:  # the library raises bare Exception with RocksDB's status text
            if any(words in str(error).lower() for words in _NOT_DAMAGE):
                raise OSError(errno.EIO, f"local index: {error}") from error
            raise CorruptionError(f"local index: {error}") from error

    def _set_database_aside(self, why: str) -> None:
        if self._database is not None:
            with contextlib.suppress(Exception):  # it is damaged; only the handle matters
                self._database.close()
            self._database = None
        earlier = {
            int(match[1]): path
            for path in self._dir.iterdir()
            if (match := _ASIDE.fullmatch(path.name))
        }
        aside = self._dir / f"rocksdb.corrupt-{max(earlier, default=0) + 1}"
        self._database_dir.rename(aside)
        for path in earlier.values():  # one is enough to find out what happened
            shutil.rmtree(path, ignore_errors=True)
        self.was_rebuilt = True
        _log.warning("local index was damaged (%s); moved to %s, rebuilding", why, aside)
        self._database = self._open_database()

    def _live(self) -> Rdict:
        """The open database. After a failed write it is opened again here: RocksDB itself stays
        read-only after an I/O error."""
        if self._closed:
            raise OSError(errno.EBADF, "local index is closed")
        if self._database is None:
            try:
                self._database = self._open_database()
            except CorruptionError as error:
                raise OSError(errno.EIO, str(error)) from error
        return self._database

    def _get(self, key: bytes) -> bytes | None:
        with self._mutex:
            try:
                value = self._live().get(key)
            except OSError:
                raise
            except Exception as error:  # as in _open_database
                raise OSError(errno.EIO, f"local index: {error}") from error
            return value if isinstance(value, bytes) and len(value) == 8 else None

    def _entries(self, prefix: bytes) -> dict[bytes, bytes]:
        """Every key that begins so, with its value. Raises OSError."""
        try:
            with self._mutex:
                return dict(self._read_entries(prefix))
        except CorruptionError as error:
            raise OSError(errno.EIO, str(error)) from error

    def _write(self, batch: WriteBatch) -> None:
        if not len(batch):
            return
        with self._mutex:
            database = self._live()
            try:
                if faults.hit(faults.ROCKS_WRITE):
                    database.write(batch)
            except Exception as error:  # as in _open_database
                self._database = None
                with contextlib.suppress(Exception):  # the write's error is the one to report
                    database.close()
                raise OSError(errno.EIO, f"local index: {error}") from error

    def _cover(self, batch: WriteBatch, segment: int) -> None:
        batch.put(_COVERED, max(segment, self.covered_through()).to_bytes(8, "little"))

    def _scan(self) -> IndexContent:
        """Raises CorruptionError if RocksDB cannot read its files to the end."""
        rows: list[SsdRow] = []
        forgotten: defaultdict[int, set[int]] = defaultdict(set)
        sealed: dict[int, int] = {}
        for key, value in self._read_entries(_ROW_PREFIX):
            try:
                row = SsdRow.unpack(value)
                if _place(_ROW_PREFIX, row) != key:
                    raise CorruptionError("row is stored under another key")
                rows.append(row)
            except CorruptionError as error:  # noqa: PERF203
                self._skip(error)
        for key, _ in self._read_entries(_FORGOTTEN_PREFIX):
            if len(key) == 1 + _PLACE_BYTES:
                segment = int.from_bytes(key[1:9], "big")
                forgotten[segment].add(int.from_bytes(key[9:], "big"))
            else:
                self._skip(CorruptionError(f"place of {len(key)} bytes"))
        for key, value in self._read_entries(_SEALED_PREFIX):
            if len(key) == 9 and len(value) == 8:
                sealed[int.from_bytes(key[1:], "big")] = int.from_bytes(value, "little")
            else:
                self._skip(CorruptionError(f"segment of {len(key)} and {len(value)} bytes"))
        return IndexContent(
            tuple(rows), {number: frozenset(gone) for number, gone in forgotten.items()}, sealed
        )

    def _skip(self, error: CorruptionError) -> None:
        self.unreadable_rows += 1
        _log.warning("an entry of the local index is skipped: %s", error)

    def _read_entries(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        """All entries whose key begins so. Raises CorruptionError as `_scan`."""
        found: list[tuple[bytes, bytes]] = []
        iterator = self._live().iter()
        try:
            iterator.seek(prefix)
            while iterator.valid():
                key: bytes = iterator.key()
                if not key.startswith(prefix):
                    break
                found.append((key, iterator.value()))
                iterator.next()
            iterator.status()  # an iterator ends early, without a word, at a damaged block
        except Exception as error:  # as in _open_database
            raise CorruptionError(f"local index: {error}") from error
        finally:
            del iterator  # a live iterator keeps the database locked after close()
        return found


def _place(prefix: bytes, row: SsdRow) -> bytes:
    return prefix + row.segment.to_bytes(8, "big") + row.offset.to_bytes(8, "big")


def _forget(batch: WriteBatch, row: SsdRow) -> None:
    batch.delete(_place(_ROW_PREFIX, row))
    batch.put(_place(_FORGOTTEN_PREFIX, row), b"")


def _seal(batch: WriteBatch, segment: int, rows: int) -> None:
    _drop_places(batch, segment)
    batch.put(_SEALED_PREFIX + segment.to_bytes(8, "big"), rows.to_bytes(8, "little"))


def _drop(batch: WriteBatch, segment: int) -> None:
    _drop_places(batch, segment)
    batch.delete(_SEALED_PREFIX + segment.to_bytes(8, "big"))


def _drop_places(batch: WriteBatch, segment: int) -> None:
    for prefix in (_ROW_PREFIX, _FORGOTTEN_PREFIX):
        first = prefix + segment.to_bytes(8, "big")
        batch.delete_range(first, first + b"\xff" * (_PLACE_BYTES - 7))
