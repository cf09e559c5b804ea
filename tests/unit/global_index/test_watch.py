"""What watchers of the nodes are told, and that a slow one costs nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from client_sdk import aio
from emberkv_proto.errors import UnavailableError
from emberkv_proto.types import Incarnation, NodeId
from global_index.ingest import Exactness
from global_index.membership import Liveness
from global_index.watch import MAX_OWED_NODES, MAX_WATCHERS, NodesChange, NodeWatch, Standing

FINE = Standing(Incarnation(1), Liveness.OK, Exactness.EXACT, "h:1", ())
ILL = Standing(Incarnation(1), Liveness.SUSPECT, Exactness.EXACT, "h:1", ())


class Fleet:
    def __init__(self, *names: str) -> None:
        self.standings = {NodeId(name): FINE for name in names}
        self.watch = NodeWatch(lambda: self.standings, heartbeat_seconds=30.0)

    def change(self, **standings: Standing | None) -> None:
        for name, standing in standings.items():
            if standing is None:
                del self.standings[NodeId(name)]
            else:
                self.standings[NodeId(name)] = standing
        self.watch.notice()
        self.watch.check_integrity()


async def following(stream: AsyncGenerator[NodesChange, None]) -> NodesChange:
    async with aio.timeout(30):
        return await stream.__anext__()


async def test_first_the_whole_picture_then_only_what_changed() -> None:
    fleet = Fleet("a", "b", "c")
    async with aclosing(fleet.watch.watch()) as stream:
        assert await following(stream) == NodesChange(
            True, (NodeId("a"), NodeId("b"), NodeId("c")), ()
        )
        fleet.change()
        fleet.change(b=ILL)
        assert await following(stream) == NodesChange(False, (NodeId("b"),), ())
        fleet.change(a=None)
        fleet.change(d=FINE, b=FINE)
        assert await following(stream) == NodesChange(
            False, (NodeId("b"), NodeId("d")), (NodeId("a"),)
        )
    assert fleet.watch.watchers == 0


async def test_what_changed_and_changed_back_before_it_was_told_is_told_once() -> None:
    fleet = Fleet("a")
    async with aclosing(fleet.watch.watch()) as stream:
        await following(stream)
        for _ in range(1000):
            fleet.change(a=ILL)
            fleet.change(a=FINE)
        assert await following(stream) == NodesChange(False, (NodeId("a"),), ())


async def test_slow_watcher_gets_the_whole_picture_again() -> None:
    fleet = Fleet()
    async with aclosing(fleet.watch.watch()) as slow, aclosing(fleet.watch.watch()) as quick:
        assert (await following(slow)).is_whole
        assert (await following(quick)).is_whole
        for number in range(MAX_OWED_NODES + 10):
            fleet.change(**{f"n{number}": FINE})
            if number % 50 == 0:
                assert not (await following(quick)).is_whole
        whole = await following(slow)
        assert whole.is_whole
        assert len(whole.changed) == MAX_OWED_NODES + 10
        fleet.change(n1=ILL)
        assert await following(slow) == NodesChange(False, (NodeId("n1"),), ())


async def test_silence_is_broken_by_an_empty_change() -> None:
    watch = NodeWatch(lambda: {NodeId("a"): FINE}, heartbeat_seconds=0.01)
    async with aclosing(watch.watch()) as stream:
        await following(stream)
        assert await following(stream) == NodesChange(False, (), ())


async def test_late_watcher_does_not_lose_what_others_are_owed() -> None:
    fleet = Fleet("a")
    async with aclosing(fleet.watch.watch()) as first:
        await following(first)
        fleet.standings[NodeId("b")] = FINE  # not noticed yet
        async with aclosing(fleet.watch.watch()) as second:
            assert (await following(second)).changed == (NodeId("a"), NodeId("b"))
        assert await following(first) == NodesChange(False, (NodeId("b"),), ())


async def test_one_watcher_too_many_is_refused() -> None:
    fleet = Fleet("a")
    streams = [fleet.watch.watch() for _ in range(MAX_WATCHERS)]
    await asyncio.gather(*(following(stream) for stream in streams))
    with pytest.raises(UnavailableError, match="watch this index already"):
        await fleet.watch.watch().__anext__()
    for stream in streams:
        await stream.aclose()
    assert fleet.watch.watchers == 0
