"""The door for Redis clients over a real store: values, order, limits, and who may come in."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from pydantic import ValidationError

from emberkv_proto.errors import ConfigError, PreflightError
from emberkv_proto.types import Tier
from store_daemon.config import RespSection, SsdSection
from store_daemon.resp import connection
from store_daemon.resp.connection import Connection
from store_daemon.resp.values import HEADER_BYTES, ValueShelf, size_of
from tests.helpers.resp import (
    TOKEN,
    ReplyError,
    RespClient,
    SmallDoor,
    request,
    small_door,
    talk,
    until,
    value_of,
)

SIZES = [0, 1, 3, 100, 4079, 4080, 4081, 9000, 16384, 16385, 20000, 50000]


async def test_values_of_any_size_come_back_as_they_were(tmp_path: Path) -> None:
    async with small_door(tmp_path, extents=20) as served, talk(served) as client:
        for size in SIZES:
            assert await client.ask("SET", f"k{size}", value_of(size, size)) == "OK"
        served.check()
        for size in SIZES:
            assert await client.ask("GET", f"k{size}") == value_of(size, size)
        keys = [f"k{size}" for size in reversed(SIZES)]
        assert await client.ask("MGET", *keys, "no") == [
            *(value_of(size, size) for size in reversed(SIZES)),
            None,
        ]
        assert await client.ask("GET", "no") is None
        assert await client.ask("EXISTS", "k0", "k1", "no", "k1") == 3
        assert served.count("resp_stored_values") == len(SIZES)


async def test_a_new_value_replaces_the_old_one_whatever_its_size(tmp_path: Path) -> None:
    async with small_door(tmp_path) as served, talk(served) as client:
        for turn, size in enumerate([100, 100, 20000, 5000, 0, 20001]):
            assert await client.ask("SET", "key", value_of(turn, size)) == "OK"
            assert await client.ask("GET", "key") == value_of(turn, size)
            served.check()
        assert served.small.store.holdings.blocks_of(Tier.DRAM) == 1


async def test_a_deleted_value_is_gone_and_its_room_is_free(tmp_path: Path) -> None:
    async with small_door(tmp_path, ssd_segments=0) as served, talk(served) as client:
        used = served.small.pool.slots.used_bytes
        await client.ask("SET", "a", b"1" * 20000)
        await client.ask("SET", "b", b"2")
        assert await client.ask("DEL", "a", "b", "c") == 2
        assert await client.ask("UNLINK", "a") == 0
        assert await client.ask("GET", "a") is None
        assert served.small.pool.slots.used_bytes == used


async def test_a_pipeline_is_answered_in_order(tmp_path: Path) -> None:
    big = value_of("big", 40000)
    async with small_door(tmp_path, extents=12) as served, talk(served) as client:
        for turn in range(200):
            client.send("SET", f"k{turn % 7}", str(turn))
            client.send("GET", f"k{turn % 7}")
            if turn % 50 == 0:
                client.send("SET", "big", big)
                client.send("GET", "big")
        for turn in range(200):
            assert await client.reply() == "OK"
            assert await client.reply() == str(turn).encode()
            if turn % 50 == 0:
                assert await client.reply() == "OK"
                assert await client.reply() == big


async def test_who_reads_late_gets_the_value_that_was_there_when_it_asked(tmp_path: Path) -> None:
    first, second = value_of(1, 50000), value_of(2, 50000)
    async with (
        small_door(tmp_path, extents=12, max_connections=1) as served,
        talk(served) as client,
    ):
        await client.ask("SET", "k", first)
        client.writer.write(request("GET", "k") * 9 + request("SET", "k", second))
        client.send("GET", "k")
        await asyncio.sleep(0.05)  # it does not read meanwhile
        replies = [await client.reply() for _ in range(11)]
        assert replies == [first] * 9 + ["OK", second]


async def test_values_come_back_from_ssd(tmp_path: Path) -> None:
    async with (
        small_door(tmp_path, extents=4, ssd_segments=24, dram_share=1.0) as served,
        talk(served) as client,
    ):
        for number in range(8):
            assert await client.ask("SET", f"k{number}", value_of(number, 30000)) == "OK"
            await _until_saved(served)
        assert served.small.store.holdings.blocks_of(Tier.DRAM) < 8
        replies = await client.ask("MGET", *(f"k{number}" for number in range(8)))
        missing = replies.count(None)
        assert missing == 0, f"{missing} are missing"
        assert replies == [value_of(number, 30000) for number in range(8)]
        assert served.count("promoted_blocks") > 0


async def _until_saved(served: SmallDoor) -> None:
    store = served.small.store
    for _ in range(500):
        if all(block.in_ssd for block in store.holdings.catalog.blocks.values()):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("not written to SSD")


async def test_what_was_replaced_or_deleted_is_not_found_again(tmp_path: Path) -> None:
    async with small_door(tmp_path) as served, talk(served) as client:
        await client.ask("SET", "replaced", b"old")
        await client.ask("SET", "longer", b"old")
        await client.ask("SET", "deleted", b"old")
        await _until_saved(served)
        await client.ask("SET", "replaced", b"new")
        await client.ask("SET", "longer", b"n" * 9000)
        assert await client.ask("DEL", "deleted") == 1
    async with small_door(tmp_path) as served, talk(served) as client:
        assert await client.ask("MGET", "replaced", "longer", "deleted") == [
            b"new",
            b"n" * 9000,
            None,
        ]


async def test_an_old_row_does_not_come_back_beside_a_newer_value_in_dram(tmp_path: Path) -> None:
    """As after a kill before the row of the replaced value was struck out."""
    async with small_door(tmp_path) as served, talk(served) as client:
        await client.ask("SET", "k", b"old")
        await _until_saved(served)
        (old,) = served.small.store.holdings.catalog.blocks.values()
        row = old.rows[0]
        assert row is not None
        assert served.small.ssd is not None
        served.small.ssd.forget = lambda rows: None  # type: ignore[method-assign]
        await client.ask("SET", "k", b"new")
        new = served.door.shelf._find(served.door.shelf._hash(b"k"))
        assert new is not None
        served.small.store.holdings.lose_ssd(new)
        served.small.index.put_rows([row])
    async with small_door(tmp_path) as served, talk(served) as client:
        assert await client.ask("GET", "k") == b"new"


KEYS = [f"k{number}" for number in range(12)]


def two_drives(directory: Path) -> SsdSection:
    return SsdSection(
        paths=(directory / "a", directory / "b"),
        capacity_bytes=24 * 65536,
        segment_bytes=65536,
        direct_io=False,
    )


async def _fill_two_drives(served: SmallDoor, client: RespClient) -> None:
    for key in KEYS:
        await client.ask("SET", key, value_of((key, "old"), 30000))
        await _until_saved(served)
    ssd = served.small.ssd
    assert ssd is not None
    rows = ssd.recovered_rows()
    assert {ssd.segment_path(row).parent.name for row in rows} == {"a", "b"}


async def _replace_and_delete(client: RespClient) -> None:
    assert await client.ask("SET", KEYS[0], "new") == "OK"
    assert await client.ask("SET", KEYS[1], "new") == "OK"
    await client.ask("DEL", *KEYS[2:])


async def test_a_drive_that_was_away_does_not_bring_old_values_back(tmp_path: Path) -> None:
    ssd = two_drives(tmp_path)
    async with small_door(tmp_path, ssd=ssd) as served, talk(served) as client:
        await _fill_two_drives(served, client)
        tier, clock = served.small.ssd, served.small.clock
        assert tier is not None
        (tmp_path / "a").rename(tmp_path / "away")
        for drive in tier._drives:
            drive.is_doubted = True
        await until(lambda: tier.state != "ok")
        await _replace_and_delete(client)
        (tmp_path / "away").rename(tmp_path / "a")
        clock.now += 60
        await until(lambda: tier.state == "ok")
        assert await client.ask("MGET", *KEYS) == [b"new", b"new", *[None] * 10]
    async with small_door(tmp_path, ssd=ssd) as served, talk(served) as client:
        assert await client.ask("MGET", *KEYS) == [b"new", b"new", *[None] * 10]


async def test_a_drive_that_was_away_for_a_whole_life_brings_no_old_values_back(
    tmp_path: Path,
) -> None:
    ssd = two_drives(tmp_path)
    async with small_door(tmp_path, ssd=ssd) as served, talk(served) as client:
        await _fill_two_drives(served, client)
    (tmp_path / "a").rename(tmp_path / "away")
    async with small_door(tmp_path, ssd=ssd) as served, talk(served) as client:
        await _replace_and_delete(client)
        (tmp_path / "away").rename(tmp_path / "a")
    async with small_door(tmp_path, ssd=ssd) as served, talk(served) as client:
        assert await client.ask("MGET", *KEYS) == [b"new", b"new", *[None] * 10]


async def test_a_value_that_is_too_long_is_refused_and_the_connection_lives(tmp_path: Path) -> None:
    async with small_door(tmp_path, max_value_bytes=1000) as served, talk(served) as client:
        client.send("SET", "k", b"x" * 1_000_000)
        client.send("PING")
        refused = await client.reply()
        assert isinstance(refused, ReplyError)
        assert str(refused).startswith("ERR a value of 1000000 bytes exceeds maximum allowed size")
        assert await client.reply() == "PONG"
        assert await client.ask("SET", "k", b"x" * 1000) == "OK"
        assert served.count("resp_refused_values") == 1


async def test_one_gibibyte_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    async with small_door(tmp_path) as served:
        used = served.small.pool.slots.used_bytes
        async with talk(served) as client:
            client.writer.write(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1073741824\r\nxxxxxxxx")
            assert await client.reply() == ReplyError("ERR Protocol error: invalid bulk length")
            assert await client.is_ended()
        assert served.small.pool.slots.used_bytes == used


async def test_values_stay_within_the_doors_quota(tmp_path: Path) -> None:
    async with (
        small_door(tmp_path, extents=8, ssd_segments=0, dram_share=0.25) as served,
        talk(served) as client,
    ):
        for number in range(40):
            assert await client.ask("SET", f"k{number}", value_of(number, 9000)) == "OK"
            assert served.door.shelf.tenant.dram_bytes <= 0.25 * 8 * 65536
        found = await client.ask("MGET", *(f"k{number}" for number in range(40)))
        assert found[-1] == value_of(39, 9000)
        assert found[0] is None


async def test_a_value_waits_for_room_and_is_refused_when_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "ROOM_SECONDS", 0.1)
    async with (
        small_door(tmp_path, extents=4, ssd_segments=0, dram_share=0.2) as served,
        talk(served) as client,
        talk(served) as other,
    ):
        other.writer.write(request("SET", "held", b"h" * 30000)[:100])
        await until(lambda: served.door.shelf.held == 1)
        client.send("SET", "k", b"x" * 30000)
        client.send("PING")
        assert str(await client.reply()).startswith("OOM ")
        assert await client.reply() == "PONG"
        monkeypatch.setattr(connection, "ROOM_SECONDS", 10.0)
        client.send("SET", "k", b"x" * 30000)
        await asyncio.sleep(0.05)
        other.writer.transport.abort()
        assert await client.reply() == "OK"
        assert await client.ask("GET", "k") == b"x" * 30000


async def test_a_value_that_stops_halfway_gives_its_slot_back(tmp_path: Path) -> None:
    async with small_door(tmp_path) as served:
        used = served.small.pool.slots.used_bytes
        client = await served.client()
        client.writer.write(request("SET", "k", b"x" * 30000)[:20000])
        await until(lambda: served.small.pool.slots.used_bytes > used)
        served.check()
        await client.close()
        await until(lambda: not served.door.connections)
        assert served.small.pool.slots.used_bytes == used


async def test_who_does_not_read_is_bounded_and_then_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SILENCE_SECONDS", 1.0)
    async with small_door(tmp_path, extents=8, max_connections=2) as served, talk(served) as writer:
        await writer.ask("SET", "k", value_of(1, 50000))
        known = set(served.door.connections)
        reader = await served.client()
        await until(lambda: len(served.door.connections) == 2)
        (slow,) = served.door.connections - known
        reader.writer.transport.pause_reading()  # type: ignore[attr-defined]
        reader.writer.write(request("GET", "k") * 3000)
        await until(lambda: slow._is_unread)
        assert 0 < len(slow._talk.line) <= connection.MAX_REPLIES_AHEAD
        assert slow._talk.line.held_bytes <= 0.25 * 8 * 65536 / 2 + 65536
        await until(lambda: served.count("resp_cut_connections") == 1)
        await until(lambda: served.door.shelf.held == 0)
        assert await writer.ask("GET", "k") == value_of(1, 50000)
        await reader.close()


async def test_a_request_that_stops_in_the_middle_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SILENCE_SECONDS", 0.5)
    async with small_door(tmp_path) as served, talk(served) as idle, talk(served) as client:
        assert await idle.ask("PING") == "PONG"
        client.writer.write(b"*2\r\n$3\r\nGET\r\n$5\r\nab")
        assert await client.is_ended()
        assert await idle.ask("PING") == "PONG", "an idle connection may stay"


async def test_nothing_is_answered_without_the_token(tmp_path: Path) -> None:
    async with small_door(tmp_path, token_mode=0o600) as served, talk(served) as client:
        needed = ReplyError("NOAUTH Authentication required.")
        for words in (["GET", "k"], ["PING"], ["SET", "k", "v"], ["INFO"], ["DEL", "k"]):
            assert await client.ask(*words) == needed
        wrong = ReplyError("WRONGPASS invalid username-password pair or user is disabled.")
        assert await client.ask("AUTH", "wrong") == wrong
        assert await client.ask("AUTH", "somebody", TOKEN) == wrong
        assert await client.ask("HELLO", "3", "AUTH", "default", "wrong") == wrong
        assert str(await client.ask("HELLO", "3")).startswith("NOAUTH HELLO")
        assert await client.ask("AUTH", TOKEN) == "OK"
        assert await client.ask("SET", "k", "v") == "OK"
        assert served.small.store.holdings.counters["resp_wrong_passwords"] == 3
        async with talk(served) as other:
            hello = await other.ask("HELLO", "3", "AUTH", "default", TOKEN, "SETNAME", "me")
            assert hello[b"proto"] == 3
            assert await other.ask("CLIENT", "GETNAME") == b"me"


async def test_who_guesses_tokens_is_hung_up_on(tmp_path: Path) -> None:
    async with small_door(tmp_path, token_mode=0o600) as served, talk(served) as client:
        for _ in range(5):
            assert isinstance(await client.ask("AUTH", "guess"), ReplyError)
        assert await client.is_ended()


async def test_a_connection_too_many_is_hung_up_on(tmp_path: Path) -> None:
    async with (
        small_door(tmp_path, max_connections=2) as served,
        talk(served) as one,
        talk(served) as two,
    ):
        assert [await c.ask("PING") for c in (one, two)] == ["PONG", "PONG"]
        async with talk(served) as third:
            assert await third.is_ended()
        assert served.count("resp_refused_connections") == 1


async def test_what_clients_ask_when_they_connect_is_answered(tmp_path: Path) -> None:
    async with small_door(tmp_path) as served, talk(served) as client:
        hello = await client.ask("HELLO")
        assert dict(zip(hello[::2], hello[1::2], strict=True))[b"server"] == b"emberkv"
        assert str(await client.ask("HELLO", "4")).startswith("NOPROTO")
        assert await client.ask("CLIENT", "SETINFO", "LIB-NAME", "x") == "OK"
        assert str(await client.ask("CLIENT", "KILL", "x")).startswith("ERR")
        assert await client.ask("SELECT", "0") == "OK"
        assert str(await client.ask("SELECT", "1")).startswith("ERR DB index")
        assert b"redis_version:7" in await client.ask("INFO")
        assert b"Clients" not in await client.ask("INFO", "server")
        assert await client.ask("CONFIG", "GET", "save") == [b"save", b""]
        assert str(await client.ask("CONFIG", "SET", "save", "1")).startswith("ERR")
        assert await client.ask("COMMAND") == []
        assert await client.ask("COMMAND", "COUNT") == 16
        assert b"mget" in await client.ask("COMMAND", "LIST")
        assert await client.ask("ECHO", "x") == await client.ask("PING", "x") == b"x"
        assert str(await client.ask("FLUSHALL")) == "ERR unknown command 'FLUSHALL'"
        assert str(await client.ask("a\r\nb")) == "ERR unknown command 'a\\r\\nb'"
        assert str(await client.ask("GET")) == "ERR wrong number of arguments for 'get' command"
        assert str(await client.ask("SET", "k", "v", "EX", "9")).startswith("ERR syntax error")
        assert await client.ask("GET", "k") is None
        assert await client.ask("HELLO", "3") != hello
        assert await client.ask("GET", "k") is None
        assert await client.ask("QUIT") == "OK"
        assert await client.is_ended()


async def test_another_doors_values_are_not_seen(tmp_path: Path) -> None:
    async with small_door(tmp_path, namespace="one") as served, talk(served) as client:
        await client.ask("SET", "k", "v")
    async with small_door(tmp_path, namespace="two") as served, talk(served) as client:
        assert await client.ask("GET", "k") is None
        assert await client.ask("EXISTS", "k") == 0
        assert await client.ask("DEL", "k") == 0


async def test_many_clients_at_once_never_see_each_others_bytes(tmp_path: Path) -> None:
    async def work(served: SmallDoor, number: int) -> None:
        choose = random.Random(number)
        async with talk(served) as client:
            for turn in range(60):
                size = choose.choice(SIZES)
                key = f"{number}-{turn % 5}"
                assert await client.ask("SET", key, value_of((number, turn), size)) == "OK"
                found = await client.ask("GET", key)
                assert found in (value_of((number, turn), size), None)  # it may be evicted

    async with small_door(tmp_path, extents=24) as served:
        await asyncio.gather(*(work(served, number) for number in range(6)))


async def test_a_request_that_fails_here_ends_its_connection_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with small_door(tmp_path) as served, talk(served) as one, talk(served) as other:
        monkeypatch.setattr(served.door.shelf.store.holdings.catalog, "wake", None)
        assert await one.ask("PING") == "PONG"
        one.send("GET", "k")
        assert await one.is_ended()
        monkeypatch.undo()
        assert await other.ask("GET", "k") is None
        assert served.count("resp_failed_requests") == 1
        assert "a redis client's request failed" in caplog.text


@pytest.mark.parametrize("words", [("GET", "k"), ("SET", "k", "new"), ("DEL", "k")])
async def test_work_that_fails_ends_its_connection_instead_of_leaving_it_without_a_reply(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    words: tuple[str, ...],
) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("broken")

    async with small_door(tmp_path) as served, talk(served) as one, talk(served) as other:
        assert await one.ask("SET", "k", "old") == "OK"
        await _until_saved(served)
        (block,) = served.small.store.holdings.catalog.blocks.values()
        served.small.store.holdings.evict(block)
        served.small.store.holdings.publish()
        for name in ("wait", "forget"):
            owner = served.small.store if name == "wait" else ValueShelf
            monkeypatch.setattr(owner, name, fail)
        one.send(*words)
        assert await one.is_ended()
        monkeypatch.undo()
        assert served.count("resp_failed_requests") == 1
        assert "broken" in caplog.text
        served.check()
        wanted = {"GET": b"old", "SET": b"new", "DEL": None}[words[0]]
        assert await other.ask("GET", "k") == wanted
        assert not list(served.small.store.lender.leases)


@pytest.mark.parametrize("command", ["EXISTS", "DEL", "UNLINK", "MGET"])
async def test_a_request_for_many_keys_leaves_the_loop_to_others_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(connection, "TURN_SECONDS", 0.0)
    async with small_door(tmp_path, extents=12) as served, talk(served) as client:
        keys = [f"k{number}" for number in range(20)]
        for key in keys:
            await client.ask("SET", key, "v")
        await _until_saved(served)
        turns = 0
        take_turn = Connection._take_turn

        def counted(self: Connection) -> None:
            nonlocal turns
            turns += 1
            take_turn(self)

        monkeypatch.setattr(Connection, "_take_turn", counted)
        answer = await client.ask(command, *keys, "no", keys[0])
        wanted = {"EXISTS": 21, "DEL": 20, "UNLINK": 20, "MGET": [b"v"] * 20 + [None, b"v"]}
        assert answer == wanted[command]
        assert turns > len(keys)


async def test_blank_lines_leave_the_loop_to_others_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "TURN_SECONDS", 0.0)
    async with small_door(tmp_path) as served, talk(served) as client:
        passed: list[int] = []
        answer_next = Connection._answer_next

        def counted(self: Connection) -> bool:
            before = len(self._reader._data) - self._reader._at
            is_answered = answer_next(self)
            passed.append(before - len(self._reader._data) + self._reader._at)
            return is_answered

        monkeypatch.setattr(Connection, "_answer_next", counted)
        client.writer.write(b"\n" * 10000 + b"*0\r\n" * 1000)
        assert await client.ask("PING") == "PONG"
        assert max(passed) <= 64 * 4


async def test_an_empty_value_counts_as_known(tmp_path: Path) -> None:
    async with small_door(tmp_path) as served, talk(served) as client:
        await client.ask("SET", "empty", b"")
        assert await client.ask("MGET", "empty", "no") == [b"", None]
        assert (served.count("resp_hits"), served.count("resp_misses")) == (1, 1)


async def test_values_of_many_sizes_share_the_slots_of_a_few(tmp_path: Path) -> None:
    sizes = [3000 + 1024 * number for number in range(48)]
    async with small_door(tmp_path, extents=24, ssd_segments=0) as served, talk(served) as client:
        shelf = served.door.shelf
        for size in sizes:
            assert await client.ask("SET", "one", value_of(size, size)) == "OK"
            assert await client.ask("GET", "one") == value_of(size, size)
        # Six close ones, of half of the door's share, and powers of two from 4 KiB to an extent.
        assert len(shelf._sessions) <= 6 + 5
        assert max(shelf._sessions) == size_of(sizes[-1], shelf._largest_payload, steps=1)


def test_slots_waste_no_more_than_a_sixteenth_or_a_page() -> None:
    for size in [0, 1, 4080, 4081, 100_000, 1 << 20, (1 << 20) + 1, 33_000_000]:
        payload = size_of(size, 1 << 26)
        assert payload % 4096 == 0
        wanted = size + HEADER_BYTES
        assert wanted <= payload <= wanted + max(4096, wanted // 16)
    assert size_of(60_000_000, 60_000_100) == 60_000_100


def test_a_port_needs_a_token_and_loopback() -> None:
    with pytest.raises(ValidationError, match=r"resp\.port needs resp\.token_file"):
        RespSection(port=6380)
    with pytest.raises(ValidationError):
        RespSection(port=6380, host="0.0.0.0", token_file=Path("x"))


async def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"resp\.token_file"):
        async with small_door(tmp_path, token_mode=0o644):
            pass


async def test_an_address_that_is_taken_is_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "resp.sock").write_text("mine")
    with pytest.raises(PreflightError, match=r"resp\.socket_path .* is not a socket"):
        async with small_door(tmp_path):
            pass
    assert (tmp_path / "resp.sock").read_text() == "mine"
