"""A door for Redis clients over a small store, and a client that sees its bytes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from store_daemon.config import RespSection
from store_daemon.resp.door import RespDoor
from tests.helpers.store import SmallStore

TOKEN = "0123456789abcdef-token"
ANSWER_SECONDS = 30.0


def request(*words: bytes | str) -> bytes:
    """A command as clients send it."""
    raw = [word.encode() if isinstance(word, str) else word for word in words]
    return b"*%d\r\n" % len(raw) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in raw)


def value_of(seed: object, length: int) -> bytes:
    """The one value of a seed."""
    return random.Random(str(seed)).randbytes(length)


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(6000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("waited in vain")


@dataclass
class RespClient:
    """Sends bytes, and reads replies into Python: errors as exceptions that are returned."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, *words: bytes | str) -> None:
        self.writer.write(request(*words))

    async def ask(self, *words: bytes | str) -> Any:
        self.send(*words)
        return await self.reply()

    async def reply(self) -> Any:
        return await asyncio.wait_for(self._reply(), ANSWER_SECONDS)

    async def is_ended(self) -> bool:
        """Whether the other side hangs up without a further word."""
        try:
            return await asyncio.wait_for(self.reader.read(1), ANSWER_SECONDS) == b""
        except ConnectionError:
            return True

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except ConnectionError:
            return

    async def _reply(self) -> Any:
        line = (await self.reader.readuntil(b"\r\n"))[:-2]
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest.decode()
        if kind == b"-":
            return ReplyError(rest.decode())
        if kind == b":":
            return int(rest)
        if kind == b"_" or line in (b"$-1", b"*-1"):
            return None
        if kind in b"$=":
            bulk = await self.reader.readexactly(int(rest) + 2)
            assert bulk[-2:] == b"\r\n"
            return bulk[:-2]
        if kind == b"*":
            return [await self._reply() for _ in range(int(rest))]
        assert kind == b"%", line
        pairs = [(await self._reply(), await self._reply()) for _ in range(int(rest))]
        return dict(pairs)


class ReplyError(Exception):
    """An error that the server answered."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReplyError) and other.args == self.args

    __hash__ = Exception.__hash__


@dataclass
class SmallDoor:
    """A door on a unix socket; `client` connects to it."""

    small: SmallStore
    door: RespDoor
    path: Path

    async def client(self) -> RespClient:
        return RespClient(*await asyncio.open_unix_connection(self.path, limit=1 << 26))

    def count(self, counter: str) -> int:
        return self.small.store.holdings.counters[counter]

    def check(self) -> None:
        self.door.check_integrity()
        self.small.store.check_integrity()


@asynccontextmanager
async def small_door(
    directory: Path, *, token_mode: int | None = None, **settings: Any
) -> AsyncIterator[SmallDoor]:
    """Serves inside the block; afterwards nothing is held.

    With `token_mode`, clients need TOKEN, and its file has this mode.
    """
    options = {
        key: settings.pop(key) for key in ("extents", "ssd_segments", "ssd") if key in settings
    }
    small = SmallStore(directory, **options)
    small.store.start()
    path, token = directory / "resp.sock", None
    if token_mode is not None:
        token = directory / "token"
        token.write_text(TOKEN)
        token.chmod(token_mode)
    section = RespSection(socket_path=path, token_file=token, **settings)
    try:
        door = RespDoor(small.settings.model_copy(update={"resp": section}), small.store)
        await door.start()
        try:
            served = SmallDoor(small, door, path)
            yield served
            served.check()
        finally:
            await door.close()
        assert not door.connections
        assert door.shelf.held == 0
    finally:
        await small.close()


@asynccontextmanager
async def talk(served: SmallDoor) -> AsyncIterator[RespClient]:
    client = await served.client()
    try:
        yield client
    finally:
        await client.close()
