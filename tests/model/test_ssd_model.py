"""The SSD tier against a dict: append, forget, read, reclaim with re-append, clean and unclean
restarts, lost index; on one drive, and on several that go missing and come back."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from store_daemon.config import SsdSection
from store_daemon.local_index import LocalIndex
from store_daemon.tiers import segments
from store_daemon.tiers.changes import TierChanges
from store_daemon.tiers.segments import RowKey, SsdRow
from store_daemon.tiers.ssd import OK, SsdFailure, SsdTier
from tests.helpers.ssd import (
    NODE,
    SEGMENT_BYTES,
    assert_reads_back,
    crash_copy,
    drives,
    payload_of,
    read,
    record,
    section,
)
from tests.helpers.store import FakeClock

SEGMENTS = 5
LENGTHS = st.sampled_from([1, 100, 4096, 5000, 20000, segments.largest_payload(SEGMENT_BYTES)])
NUMBERS = st.integers(1, 40)


class SsdMachine(RuleBasedStateMachine):
    """`live` is what must be there; `ghosts` may come back when the index is lost."""

    pinned: ClassVar[set[int]] = {7, 17, 27}
    """Numbers that reclaim must keep."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="ssd-model-"))
        self.life = 0
        self.clock = FakeClock()
        self.live: dict[RowKey, SsdRow] = {}
        self.ghosts: set[SsdRow] = set()
        self._open()

    @property
    def directory(self) -> Path:
        return self.root / str(self.life)

    @property
    def drive_names(self) -> list[str]:
        return ["ssd"]

    @property
    def config(self) -> SsdSection:
        return section(self.directory, SEGMENTS)

    def _open(self) -> None:
        self.index = LocalIndex.open(self.directory, NODE)
        self.tier = SsdTier.open(self.config, self.index, self.clock)
        self.tier.keep(lambda row: number_of(row) in self.pinned, lambda row: False)

    def _close(self) -> None:
        self.tier.close()
        self.index.close()

    def _follow(self, changes: TierChanges) -> None:
        """What reclaim and upkeep say must be all that they did."""
        for row in changes.gone:
            assert number_of(row) not in self.pinned
            assert self.live.pop(row.key) == row
            self.ghosts.add(row)
        for row in changes.lost:
            assert self.live.pop(row.key) == row
            self.ghosts.add(row)
        for move in changes.moved:
            assert self.live[move.old.key] == move.old
            assert (move.new.key, move.new.checksum) == (move.old.key, move.old.checksum)
            self.live[move.old.key] = move.new
            self.ghosts.add(move.old)
        for row in changes.found:
            assert row.key not in self.live
            assert row in self.ghosts
            self.live[row.key] = row

    @rule(batch=st.lists(st.tuples(NUMBERS, LENGTHS), min_size=1, max_size=8))
    def append(self, batch: list[tuple[int, int]]) -> None:
        records = [record(number, length) for number, length in batch]
        for item, result in zip(records, self.tier.append(records), strict=True):
            if isinstance(result, SsdFailure):
                assert "full" in result.reason
                continue
            assert result.key == item.key
            earlier = self.live.get(result.key)
            if earlier is not None and earlier != result:
                self.ghosts.add(earlier)
            self.live[result.key] = result

    @rule(numbers=st.sets(NUMBERS))
    def forget(self, numbers: set[int]) -> None:
        rows = [row for row in self.live.values() if number_of(row) in numbers]
        self.tier.forget(rows)
        for row in rows:
            del self.live[row.key]
        self.ghosts |= set(rows)

    @rule()
    def reclaim(self) -> None:
        had_room = self._has_room()
        before = self.tier.used_bytes
        changes = self.tier.reclaim()
        self._follow(changes)
        assert self._has_room()
        assert self.tier.used_bytes <= max(before, self.config.capacity_bytes)
        if had_room:
            assert not changes

    def _has_room(self) -> bool:
        return any(
            state.state == OK and state.capacity_bytes - state.used_bytes >= SEGMENT_BYTES
            for state in self.tier.drive_states()
        )

    @rule()
    def restart(self) -> None:
        self._close()
        self._open()

    @rule(lose_index=st.booleans(), tear=st.booleans(), seed=st.integers(0, 2**16))
    def crash(self, lose_index: bool, tear: bool, seed: int) -> None:
        """Go on with a copy taken while the tier was open."""
        source = self.directory
        open_number = max(
            (row.segment for row in self.live.values()),
            default=0,
        )
        self.life += 1
        crash_copy(source, self.directory)
        self._close()
        shutil.rmtree(source)
        if lose_index:
            shutil.rmtree(self.directory / "rocksdb")
        if tear:
            self._scribble_behind_the_tail(open_number, seed)
        self._open()
        found = {row.key: row for row in self.tier.recovered_rows()}
        for key, row in self.live.items():
            if key not in found or found[key] != row:
                raise AssertionError(f"{row} was lost; found {found.get(key)}")
        extra = set(found.values()) - set(self.live.values())
        assert extra <= self.ghosts, "a row appeared that was never appended"
        self.live = found

    def _scribble_behind_the_tail(self, number: int, seed: int) -> None:
        """Half-written bytes of a record that was never acknowledged."""
        name = segments.segment_name(number)
        paths = [self.directory / drive / name for drive in self.drive_names]
        path = next((path for path in paths if path.exists()), None)
        if path is None or path.stat().st_size != SEGMENT_BYTES:
            return
        rows = [row for row in (*self.live.values(), *self.ghosts) if row.segment == number]
        end = max((row.end for row in rows), default=4096)
        torn = record(999, 5000).placed(number, end)
        if torn.end <= SEGMENT_BYTES:
            with path.open("r+b") as file:
                file.seek(end)
                file.write(segments.pack_record_header(torn).ljust(4096, b"\0"))
                file.write(random.Random(seed).randbytes(3000))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.live.values(), key=lambda row: row.offset)))
        assert_reads_back(self.tier, [row])

    @precondition(lambda self: self.ghosts)
    @rule(data=st.data())
    def read_where_it_was(self, data: st.DataObject) -> None:
        """A reader that took its row before a move gets the right bytes or a miss."""
        ghosts = sorted(self.ghosts, key=lambda row: (row.segment, row.offset))
        row = data.draw(st.sampled_from(ghosts))
        try:
            content = read(self.tier, row)
        except FileNotFoundError:
            return
        assert content == payload_of(number_of(row), row.length)

    @invariant()
    def rows_are_those_of_the_model(self) -> None:
        assert {row.key: row for row in self.tier.recovered_rows()} == self.live
        self.tier.check_integrity()

    def teardown(self) -> None:
        assert_reads_back(self.tier, list(self.live.values()))
        self._close()
        shutil.rmtree(self.root)


class SeveralDrivesMachine(SsdMachine):
    """Three drives of which some may be away, while serving and at a start."""

    def __init__(self) -> None:
        self.away: set[str] = set()
        super().__init__()

    @property
    def drive_names(self) -> list[str]:
        return ["a", "b", "c"]

    @property
    def config(self) -> SsdSection:
        return drives(self.directory, "abc", segments=3)

    @precondition(lambda self: len(self.away) < 2)
    @rule(name=st.sampled_from("abc"))
    def take_away(self, name: str) -> None:
        """As an unplugged drive, found out at the next read of it; the rest must go on."""
        path = self.directory / name
        if name in self.away or self._is_degraded(path):
            return
        on_it = [row for row in self.live.values() if self.tier.segment_path(row).parent == path]
        if not on_it:
            return
        path.rename(self.directory / f"{name}-away")
        path.mkdir()
        self.away.add(name)
        with pytest.raises(FileNotFoundError):
            read(self.tier, on_it[0])
        changes = self.tier.upkeep()
        assert {row.key for row in changes.lost} == {row.key for row in on_it}
        assert not changes.found
        self._follow(changes)

    @precondition(lambda self: self.away)
    @rule(data=st.data())
    def put_back(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.away)))
        shutil.rmtree(self.directory / name)
        (self.directory / f"{name}-away").rename(self.directory / name)
        self.away.discard(name)
        self.clock.now += 60
        self._follow(self.tier.upkeep())
        assert not self._is_degraded(self.directory / name)

    @rule()
    def swap_and_restart(self) -> None:
        """Drives may be mounted in another order."""
        if self.away & {"a", "b"}:
            return
        self._close()
        (self.directory / "a").rename(self.directory / "x")
        (self.directory / "b").rename(self.directory / "a")
        (self.directory / "x").rename(self.directory / "b")
        self._open()

    def _is_degraded(self, path: Path) -> bool:
        return any(s.path == path and s.state != OK for s in self.tier.drive_states())


def number_of(row: SsdRow) -> int:
    return int.from_bytes(row.block_hash, "big")


TestSsdMachine = SsdMachine.TestCase
TestSsdMachine.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
TestSsdMachine.pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TestSeveralDrivesMachine = SeveralDrivesMachine.TestCase
TestSeveralDrivesMachine.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
TestSeveralDrivesMachine.pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
