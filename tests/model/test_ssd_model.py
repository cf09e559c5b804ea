"""The SSD tier against a dict: append, forget, reclaim, clean and unclean restarts, lost index."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from store_daemon.local_index import LocalIndex
from store_daemon.tiers import segments
from store_daemon.tiers.segments import RowKey, SsdRow
from store_daemon.tiers.ssd import SsdFailure, SsdTier
from tests.helpers.ssd import (
    NODE,
    SEGMENT_BYTES,
    assert_reads_back,
    record,
    section,
)

SEGMENTS = 5
LENGTHS = st.sampled_from([1, 100, 4096, 5000, 20000, segments.largest_payload(SEGMENT_BYTES)])
NUMBERS = st.integers(1, 40)


class SsdMachine(RuleBasedStateMachine):
    """`live` is what must be there; `ghosts` may come back when the index is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="ssd-model-"))
        self.life = 0
        self.live: dict[RowKey, SsdRow] = {}
        self.ghosts: set[SsdRow] = set()
        self._open()

    @property
    def directory(self) -> Path:
        return self.root / str(self.life)

    def _open(self) -> None:
        self.index = LocalIndex.open(self.directory, NODE)
        self.tier = SsdTier.open(section(self.directory, SEGMENTS), self.index)

    def _close(self) -> None:
        self.tier.close()
        self.index.close()

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
        rows = [
            row for row in self.live.values() if int.from_bytes(row.block_hash, "big") in numbers
        ]
        self.tier.forget(rows)
        for row in rows:
            del self.live[row.key]
        self.ghosts |= set(rows)

    @rule()
    def reclaim(self) -> None:
        before = self.tier.used_bytes
        gone = self.tier.reclaim()
        assert self.tier.used_bytes <= (SEGMENTS - 1) * SEGMENT_BYTES
        if before <= (SEGMENTS - 1) * SEGMENT_BYTES:
            assert not gone
        for row in gone:
            assert self.live.pop(row.key) == row

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
        shutil.copytree(source, self.directory)
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
        path = self.directory / "ssd" / segments.segment_name(number)
        if not path.exists() or path.stat().st_size != SEGMENT_BYTES:
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

    @invariant()
    def rows_are_those_of_the_model(self) -> None:
        assert {row.key: row for row in self.tier.recovered_rows()} == self.live
        self.tier.check_integrity()

    def teardown(self) -> None:
        assert_reads_back(self.tier, list(self.live.values()))
        self._close()
        shutil.rmtree(self.root)


TestSsdMachine = SsdMachine.TestCase
TestSsdMachine.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestSsdMachine.pytestmark = [pytest.mark.slow]
