"""A value that is deleted while its copy is on the way to SSD is gone for good when DEL answers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest

from store_daemon.resp import values
from store_daemon.tiers.ssd import SsdFailure, SsdRecord, SsdRow
from tests.helpers.resp import RespClient, SmallDoor, small_door, talk, until, value_of

PATIENCE_SECONDS = 20.0


class GatedWrites:
    """Batches that have reached the drive, and may not be finished before `open` is set."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.begun = 0
        self.ended = 0


@contextlib.contextmanager
def gated_writes(served: SmallDoor) -> Iterator[GatedWrites]:
    ssd, gate = served.small.ssd, GatedWrites()
    assert ssd is not None
    append = ssd.append

    def write_then_wait(records: Sequence[SsdRecord]) -> list[SsdRow | SsdFailure]:
        results = append(records)
        gate.begun += 1
        assert gate.open.wait(PATIENCE_SECONDS), "the test never let the batch end"
        gate.ended += 1
        return results

    with mock.patch.object(ssd, "append", write_then_wait):
        try:
            yield gate
        finally:
            gate.open.set()


async def _set_and_reach_the_drive(client: RespClient, gate: GatedWrites, key: str) -> None:
    assert await client.ask("SET", key, value_of(key, 9000)) == "OK"
    await until(lambda: gate.begun == 1)


def _rows_on_disk(served: SmallDoor, key: str) -> list[SsdRow]:
    """What a start of the daemon would find of the key now."""
    wanted = served.door.shelf._hash(key.encode())
    return [row for row in served.small.index.rows() if row.block_hash == wanted]


@pytest.mark.parametrize("deleted", [("k",), ("no", "k"), ("k", "k")])
async def test_del_answers_when_the_copy_that_was_being_written_is_forgotten(
    tmp_path: Path, deleted: tuple[str, ...]
) -> None:
    async with (
        small_door(tmp_path) as served,
        talk(served) as client,
        talk(served) as other,
    ):
        with gated_writes(served) as gate:
            await _set_and_reach_the_drive(client, gate, "k")
            assert len(_rows_on_disk(served, "k")) == 1
            client.send("DEL", *deleted)
            await until(lambda: served.door.shelf._find(served.door.shelf._hash(b"k")) is None)
            # Who did not ask for it does not wait.
            assert await other.ask("GET", "k") is None
            assert gate.ended == 0
            gate.open.set()
            assert await client.reply() == 1
            assert gate.ended == 1
            assert _rows_on_disk(served, "k") == []
        served.check()


async def test_a_second_del_does_not_answer_before_the_first_has_taken_effect(
    tmp_path: Path,
) -> None:
    async with (
        small_door(tmp_path) as served,
        talk(served) as client,
        talk(served) as other,
    ):
        with gated_writes(served) as gate:
            await _set_and_reach_the_drive(client, gate, "k")
            client.send("DEL", "k")
            await until(lambda: served.door.shelf._find(served.door.shelf._hash(b"k")) is None)
            other.send("DEL", "k")
            assert await client_of_its_own(served) == "PONG"
            gate.open.set()
            assert await other.reply() == 0
            assert _rows_on_disk(served, "k") == []
            assert await client.reply() == 1


async def client_of_its_own(served: SmallDoor) -> object:
    async with talk(served) as client:
        return await client.ask("PING")


async def test_del_forgets_the_copy_of_the_value_that_was_replaced_before(tmp_path: Path) -> None:
    async with small_door(tmp_path) as served, talk(served) as client:
        with gated_writes(served) as gate:
            await _set_and_reach_the_drive(client, gate, "k")
            assert await client.ask("SET", "k", b"newer, and of another size") == "OK"
            client.send("DEL", "k")
            await until(lambda: served.door.shelf._find(served.door.shelf._hash(b"k")) is None)
            assert gate.ended == 0
            gate.open.set()
            assert await client.reply() == 1
            assert _rows_on_disk(served, "k") == []


async def test_a_set_and_an_unrelated_del_do_not_wait_for_a_batch(tmp_path: Path) -> None:
    async with small_door(tmp_path) as served, talk(served) as client:
        with gated_writes(served) as gate:
            await _set_and_reach_the_drive(client, gate, "k")
            assert await client.ask("SET", "k", b"new") == "OK"
            assert await client.ask("SET", "other", b"x") == "OK"
            assert await client.ask("DEL", "other", "no") == 1
            assert gate.ended == 0
        assert await client.ask("GET", "k") == b"new"


async def test_del_says_so_when_the_drive_does_not_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "FORGET_SECONDS", 0.05)
    async with small_door(tmp_path) as served, talk(served) as client:
        with gated_writes(served) as gate:
            await _set_and_reach_the_drive(client, gate, "k")
            said = await client.ask("DEL", "k")
            assert str(said).startswith("ERR the drive is busy")
            assert await client.ask("GET", "k") is None
            gate.open.set()
        await until(lambda: not _rows_on_disk(served, "k"))
