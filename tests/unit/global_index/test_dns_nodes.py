"""Daemons found by a name that stands for all of them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest

from client_sdk import aio
from client_sdk.settings import load_settings
from emberkv_proto.errors import ConfigError
from global_index.config import IndexSettings
from global_index.dns_nodes import MAX_ADDRESSES, Changes, HostPort, NodeNames, follow, resolve

NAME = HostPort("store", 7100)
OTHER = HostPort("other", 7100)


def test_an_answer_s_new_addresses_are_followed_once() -> None:
    names = NodeNames((NAME,))
    assert names.on_answer(NAME, ["b:1", "a:1", "a:1"]) == Changes(("a:1", "b:1"), ())
    assert names.on_answer(NAME, ["a:1", "b:1"]) == Changes((), ())
    assert names.counts[NAME].addresses == 2
    names.check_integrity()


def test_an_address_is_given_up_when_two_answers_in_a_row_lack_it() -> None:
    names = NodeNames((NAME,))
    names.on_answer(NAME, ["a:1", "b:1"])
    assert names.on_answer(NAME, ["a:1"]) == Changes((), ())
    names.check_integrity()
    assert names.on_answer(NAME, ["a:1", "b:1"]) == Changes((), ())  # it was a short answer
    assert names.on_answer(NAME, ["a:1"]) == Changes((), ())
    assert names.on_answer(NAME, ["a:1"]) == Changes((), ("b:1",))
    assert names.followed() == {"a:1"}
    names.check_integrity()


def test_a_failed_lookup_changes_nothing_and_is_counted() -> None:
    names = NodeNames((NAME,))
    names.on_answer(NAME, ["a:1"])
    for _ in range(5):
        names.on_failure(NAME)
    assert names.followed() == {"a:1"}
    assert (names.counts[NAME].lookups, names.counts[NAME].failures) == (6, 5)
    names.check_integrity()


def test_what_two_names_have_stays_until_both_have_dropped_it() -> None:
    names = NodeNames((NAME, OTHER))
    names.on_answer(NAME, ["a:1"])
    assert names.on_answer(OTHER, ["a:1"]) == Changes((), ())
    names.on_answer(NAME, [])
    assert names.on_answer(NAME, []) == Changes((), ())
    names.on_answer(OTHER, [])
    assert names.on_answer(OTHER, []) == Changes((), ("a:1",))


def test_an_answer_without_end_is_cut() -> None:
    names = NodeNames((NAME,))
    changes = names.on_answer(NAME, [f"10.0.{i // 256}.{i % 256}:1" for i in range(5000)])
    assert len(changes.added) == MAX_ADDRESSES
    names.check_integrity()


async def _follow_until(
    names: NodeNames, answers: list[list[str] | Exception], done: Callable[[list[Changes]], bool]
) -> list[Changes]:
    seen: list[Changes] = []
    finished = asyncio.Event()

    async def lookup(host: str, port: int) -> list[str]:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def apply(changes: Changes) -> None:
        seen.append(changes)
        if done(seen):
            finished.set()

    task = asyncio.create_task(follow(names, apply, 0.001, lookup))
    try:
        async with aio.timeout(60):
            await finished.wait()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return seen


async def test_the_name_is_asked_again_after_answers_and_failures() -> None:
    names = NodeNames((NAME,))
    answers: list[list[str] | Exception] = [
        ["a:1"],
        socket.gaierror("no such name"),
        asyncio.TimeoutError(),
        ["b:1"],
        ["b:1"],
    ]
    seen = await _follow_until(names, answers, lambda seen: len(seen) == 3)
    assert seen == [Changes(("a:1",), ()), Changes(("b:1",), ()), Changes((), ("a:1",))]
    assert names.counts[NAME].failures == 2
    names.check_integrity()


async def test_a_real_lookup_gives_addresses_with_the_port() -> None:
    assert await resolve("127.0.0.1", 7100) == ["127.0.0.1:7100"]
    assert await resolve("::1", 7100) == ["[::1]:7100"]


def test_names_and_addresses_are_told_apart() -> None:
    override = "index.nodes=['dns:///store.ns.svc:7100','h1:7100','dns:///[::1]:7100']"
    section = load_settings(IndexSettings, None, [override], {}).index
    assert section.addresses == ("h1:7100",)
    assert section.names == (HostPort("store.ns.svc", 7100), HostPort("::1", 7100))
    assert [str(name) for name in section.names] == ["store.ns.svc:7100", "[::1]:7100"]


@pytest.mark.parametrize("node", ["dns:///store", "dns://store:7100", "dns:///a:0", "dns:///"])
def test_a_name_that_is_none_is_refused(node: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        load_settings(IndexSettings, None, [f"index.nodes=['{node}']"], {})
