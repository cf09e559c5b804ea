"""Whatever Redis clients send, the door answers or hangs up, keeps its books, and leaks nothing."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.resp import request, small_door, talk, until

KEY = st.sampled_from([b"a", b"b", b"k" * 4096, b"k" * 4097, b"", b"\r\n"])
VALUE = st.sampled_from([0, 1, 5, 4080, 20000, 60000, 70000, 300000]).map(lambda n: b"v" * n)
WHOLE = st.one_of(
    st.tuples(st.just(b"SET"), KEY, VALUE),
    st.tuples(st.sampled_from([b"GET", b"EXISTS", b"DEL", b"PING", b"ECHO", b"HELLO"]), KEY),
    st.lists(KEY, max_size=20).map(lambda keys: (b"MGET", *keys)),
    st.tuples(st.sampled_from([b"INFO", b"COMMAND", b"CONFIG", b"CLIENT", b"QUIT", b"HELLO"])),
    st.lists(st.binary(max_size=12), min_size=1, max_size=4).map(tuple),
).map(lambda words: request(*words))
TORN = st.tuples(WHOLE, st.integers(0, 60), st.binary(max_size=6)).map(
    lambda parts: parts[0][: parts[1]] + parts[2] + parts[0][parts[1] :]
)
STREAM = st.lists(
    st.one_of(WHOLE, WHOLE, TORN, st.binary(max_size=40)), min_size=1, max_size=6
).map(b"".join)


@settings(max_examples=30)
@given(streams=st.lists(STREAM, min_size=1, max_size=3), reads=st.booleans(), cut=st.integers(0, 9))
async def test_no_stream_harms_the_door(
    tmp_path: Path, streams: list[bytes], reads: bool, cut: int
) -> None:
    async with small_door(tmp_path, extents=4, ssd_segments=4, max_connections=8) as served:
        clients = [await served.client() for _ in streams]
        for client, stream in zip(clients, streams, strict=True):
            client.writer.write(stream if cut else stream[: len(stream) // 2])
        await asyncio.sleep(0.002 * cut)
        served.check()
        for client in clients:
            if reads:
                with contextlib.suppress(TimeoutError, asyncio.TimeoutError, ConnectionError):
                    await asyncio.wait_for(client.reader.read(1 << 20), 0.02)
            client.writer.transport.abort()
        await until(lambda: not served.door.connections)
        assert served.door.shelf.held == 0
        served.check()
        async with talk(served) as client:
            assert await client.ask("PING") == "PONG"
            await client.ask("DEL", "a", "b", "", "\r\n", b"k" * 4096)
            assert await client.ask("SET", "after", b"x" * 30000) == "OK"
            assert await client.ask("GET", "after") == b"x" * 30000
            assert await client.ask("DEL", "after") == 1
        slots, blocks = served.small.pool.slots, served.small.store.holdings.catalog.blocks
        # What is being written to SSD is let go of when it has been.
        await until(lambda: slots.used_bytes == sum(b.dram_bytes for b in blocks.values()))
