"""A headless Chromium that a test drives by the DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from client_sdk.aio import timeout

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
START_SECONDS = 90
CALL_SECONDS = 40


def browser_binary() -> str | None:
    """EMBERKV_BROWSER, or a Chromium on the PATH."""
    named = os.environ.get("EMBERKV_BROWSER")
    return named or next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab. What it logs as an error, and every address it asks, is kept."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._last = 0
        self.errors: list[str] = []
        self.asked: list[str] = []

    async def listen(self) -> None:
        async for message in self._socket:
            heard = json.loads(message.data)
            if "id" in heard:
                self._calls.pop(heard["id"]).set_result(heard)
            else:
                self._note(heard["method"], heard["params"])

    def _note(self, method: str, params: Any) -> None:
        if method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])

    async def call(self, method: str, **params: Any) -> Any:
        self._last += 1
        number = self._last
        self._calls[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        answer = await asyncio.wait_for(self._calls[number], CALL_SECONDS)
        assert "error" not in answer, f"{method}: {answer.get('error')}"
        return answer["result"]

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def value(self, expression: str) -> Any:
        """What a JavaScript expression gives, promises awaited."""
        result = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, f"{expression}: {result['exceptionDetails']}"
        return result["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until the expression is true."""
        async with timeout(CALL_SECONDS):
            while not await self.value(f"Boolean({expression})"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def press(self, key: str) -> None:
        """One key as a person presses it."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27}
        text = {"Enter": "\r", "Tab": "", "Escape": ""}.get(key, key)
        known = {"key": key, "windowsVirtualKeyCode": codes.get(key, ord(key[0].upper()))}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **known)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **known)

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def prefer(self, scheme: str) -> None:
        """light or dark."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.call("Emulation.setEmulatedMedia", features=[feature])

    async def size(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    async def picture(self) -> bytes:
        """PNG of what is seen."""
        shot = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(shot["data"])


@asynccontextmanager
async def browser_page(tmp_path: Path) -> AsyncIterator[Page]:
    """A fresh browser with one empty tab."""
    binary = browser_binary()
    assert binary is not None
    profile = tmp_path / "profile"
    process = await asyncio.create_subprocess_exec(
        binary,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        f"--user-data-dir={profile}",
        "--remote-debugging-port=0",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    told = profile / "DevToolsActivePort"
    try:
        async with timeout(START_SECONDS):
            while not told.exists() or "\n" not in told.read_text():
                assert process.returncode is None, f"{binary} ended at once"
                await asyncio.sleep(0.05)
        port = told.read_text().split("\n")[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                tabs = await answer.json(content_type=None)
            address = next(tab for tab in tabs if tab["type"] == "page")["webSocketDebuggerUrl"]
            async with session.ws_connect(address, max_msg_size=64 << 20) as socket:
                page = Page(socket)
                listening = asyncio.create_task(page.listen())
                try:
                    for domain in ("Page", "Runtime", "Network", "Log"):
                        await page.call(f"{domain}.enable")
                    yield page
                finally:
                    listening.cancel()
                    await asyncio.gather(listening, return_exceptions=True)
    finally:
        # The whole group: the binary may be a script whose child is the browser.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.wait_for(process.wait(), 30)
        process._transport.close()  # type: ignore[attr-defined]
