"""The page in a real browser: what it shows, keyboard, locked, empty, router gone."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from emberkv_proto.types import EngineInfo, NamespaceId, NodeId, Tier, TierDigest
from tests.helpers.browser import Page, browser_binary, browser_page
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.router_client import (
    HandIndex,
    HandNode,
    RunningRouter,
    request,
    running_router,
)
from tests.helpers.waiting import until

REQUIRED = os.environ.get("EMBERKV_REQUIRE_BROWSER") == "1"
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        browser_binary() is None and not REQUIRED,
        reason="NO BROWSER HERE: the page was not tested in one; run `make browser`",
    ),
]
HOSTILE = "<img src=x onerror=document.title='hacked'>"


def node(name: str, engine: FakeEngine, engine_id: str, **more: str) -> HandNode:
    return HandNode(
        NodeId(name),
        engines=(EngineInfo(engine_id, engine.url, "m", NamespaceId(bytes(32)), 16),),
        tiers=(
            TierDigest(Tier.DRAM, 1200, 0, capacity_bytes=4 << 30, used_bytes=3 << 30),
            TierDigest(Tier.SSD, 90_000, 0, capacity_bytes=1 << 40, used_bytes=1 << 38),
        ),
        lag_seconds=0.2,
        **more,
    )


@asynccontextmanager
async def busy_router() -> AsyncIterator[RunningRouter]:
    """Two engines, and some requests answered."""
    async with FakeEngine().serving() as a, FakeEngine().serving() as b:
        nodes = node("node-a", a, HOSTILE), node("node-b", b, "engine-b", exactness="degraded")
        async with running_router(index=HandIndex(*nodes)) as router:
            for at in range(12):
                prompt = [at % 3, *range(900)]
                body = {"model": "m", "prompt": prompt}
                assert (await request(router.port, "/v1/completions", body)).status == 200
            await router.settled()
            yield router


async def shown(page: Page, selector: str) -> str:
    text = await page.value(f"document.querySelector({selector!r}).innerText")
    return str(text).replace("\u00a0", " ")


async def opened(page: Page, router: RunningRouter) -> None:
    await page.open(f"http://127.0.0.1:{router.port}/ui")
    await page.until("document.querySelectorAll('#engines tbody tr').length")


async def test_what_the_router_knows_is_shown_and_nobody_else_is_asked(tmp_path: Path) -> None:
    async with busy_router() as router, browser_page(tmp_path) as page:
        await opened(page, router)
        assert await page.value("document.querySelectorAll('#nodes tbody tr').length") == 2
        nodes = await shown(page, "#nodes")
        for text in ("node-a", "75 % of 4.0 GiB", "25 % of 1.0 TiB", "200 ms", "● exact"):
            assert text in nodes
        assert "▲ degraded" in nodes  # by shape and word, not by color alone
        engines = await shown(page, "#engines")
        assert HOSTILE in engines  # a text, and nothing but a text
        assert await page.value("document.title") == "EmberKV router"
        assert await page.value("document.images.length") == 0
        assert "● healthy" in engines
        assert "5,000 tok/s" in engines
        assert await page.value("document.querySelectorAll('#decisions tbody tr').length") == 12
        decisions = await shown(page, "#decisions")
        assert "longest hit" in decisions
        assert "next best of 2" in decisions
        assert "s ago" in decisions
        assert await page.value("document.querySelectorAll('#prefixes tbody tr').length") == 3
        figures = await shown(page, "#figures")
        assert "Tokens found in cache" in figures
        assert "12 in the last" in figures
        assert await shown(page, "#state") == "● serving"
        # Every bar says in words what it shows.
        unnamed = "document.querySelectorAll('.bar:not([aria-label])').length"
        assert await page.value(unnamed) == 0
        assert await page.value("document.querySelectorAll('.bar').length") > 20
        await until(lambda: page.asked.count(f"http://127.0.0.1:{router.port}/ui/state") >= 3)
        assert not page.errors
        hosts = {url.split("/")[2] for url in page.asked}
        assert hosts == {f"127.0.0.1:{router.port}"}


async def test_light_and_dark_are_the_readers_choice(tmp_path: Path) -> None:
    async with busy_router() as router, browser_page(tmp_path) as page:
        await opened(page, router)
        paper = "getComputedStyle(document.body).backgroundColor"
        await page.prefer("light")
        assert await page.value(paper) == "rgb(250, 248, 245)"
        await page.prefer("dark")
        assert await page.value(paper) == "rgb(20, 18, 15)"
        for width in (380, 1280):  # the page itself never scrolls sideways; wide tables do
            await page.size(width, 800)
            wide = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
            assert await page.value(wide), width


async def test_all_can_be_done_from_the_keyboard(tmp_path: Path) -> None:
    async with busy_router() as router, browser_page(tmp_path) as page:
        await opened(page, router)
        focused = "document.activeElement.id || document.activeElement.className"
        await page.press("Tab")
        assert await page.value(focused) == "skip"
        await page.press("/")
        assert await page.value(focused) == "filter"
        await page.type("engine-b")
        assert await page.value("document.querySelectorAll('#engines tbody tr').length") == 1
        await page.value("document.getElementById('filter').value = ''")
        await page.type("nobody")
        assert "No engine matches the filter" in await shown(page, "#engines")
        await page.value("document.getElementById('filter').value = ''")
        await page.press("Escape")
        await page.press("1")
        assert "scroll" in await page.value(focused)
        # Sort the nodes by their name, the other way round; the focus stays on the column.
        await page.value("document.querySelector('#nodes thead button').focus()")
        await page.press("Enter")
        first = await shown(page, "#nodes tbody th")
        assert first.startswith("node-b")
        sort = "document.querySelector('#nodes th[aria-sort=descending]').innerText.trim()"
        assert str(await page.value(sort)).startswith("Node")
        assert await page.value("document.activeElement.dataset.table") == "nodes"
        await page.press("p")
        assert "paused" in await shown(page, "#state")
        asked = len(page.asked)
        await page.value("new Promise((done) => setTimeout(done, 2500))")
        assert len(page.asked) == asked
        await page.press("p")
        await until(lambda: len(page.asked) > asked)


async def test_without_the_token_nothing_is_shown(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t" * 32)
    token.chmod(0o600)
    async with (
        FakeEngine().serving() as a,
        running_router(index=HandIndex(node("secret", a, "e")), operator_token_file=token) as r,
        browser_page(tmp_path) as page,
    ):
        # As if through a proxy, from another machine.
        await page.call("Network.setExtraHTTPHeaders", headers={"X-Forwarded-For": "203.0.113.9"})
        await page.open(f"http://127.0.0.1:{r.port}/ui")
        await page.until("!document.getElementById('key').hidden")
        assert await shown(page, "#state") == "■ locked"
        assert "secret" not in await page.value("document.body.innerText")
        assert await page.value("document.activeElement.id") == "token"
        await page.type("wrong")
        await page.press("Enter")
        await page.until("document.getElementById('key-why').textContent.includes('not this')")
        assert "secret" not in await page.value("document.body.innerText")
        await page.type("t" * 32)
        await page.press("Enter")
        await page.until("document.getElementById('nodes').innerText.includes('secret')")
        assert await page.value("document.getElementById('key').hidden")
        assert await page.value("document.getElementById('token').value") == ""


async def test_empty_tables_say_what_to_do(tmp_path: Path) -> None:
    async with running_router() as router, browser_page(tmp_path) as page:
        await opened(page, router)
        assert "name daemons in index.nodes" in await shown(page, "#nodes")
        assert "No engine has announced itself" in await shown(page, "#engines")
        assert "No request has been routed yet" in await shown(page, "#decisions")
        assert await shown(page, "#state") == "✕ no healthy engine"


async def test_a_router_that_is_gone_is_said_and_one_that_is_back_is_shown(tmp_path: Path) -> None:
    async with browser_page(tmp_path) as page:
        async with busy_router() as router:
            port = router.port
            await opened(page, router)
        await page.until("document.getElementById('state').innerText.includes('no answer')")
        assert "does not answer" in await shown(page, "#notice")
        assert await page.value("document.body.classList.contains('stale')")
        assert "node-a" in await shown(page, "#nodes")  # what was known stays, marked as old
        async with FakeEngine().serving() as a:
            index = HandIndex(node("node-new", a, "e"))
            async with running_router(index=index, port=port):
                await page.until("document.getElementById('nodes').innerText.includes('node-new')")
                assert await page.value("document.getElementById('notice').hidden")
                assert await shown(page, "#state") == "● serving"
