"""Take the pictures of docs/ui.md: a cluster of `emberkv up` under load, light and dark.

python -m tests.process.ui_pictures --out docs/images
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from pathlib import Path

import aiohttp

from client_sdk.cli.demo_settings import FULL, TORCH_ENGINE, DemoPrompt, read_prompts
from tests.helpers.browser import Page, browser_binary, browser_page
from tests.helpers.up import ROOT, running_up

TRACE = ROOT / "tests/data/mooncake_conversation_150.jsonl"
SETTINGS = """
cluster: {nodes: 3}
dram: {capacity_bytes: 20971520, extent_bytes: 1048576}
ssd: {capacity_bytes: 134217728, segment_bytes: 8388608}
index: {capacity_blocks: 65536, backend: python}
engine: {model: ember-demo, vocab: 4096, block_tokens: 16, num_blocks: 320, ffn: 256, seed: 1}
"""
WIDTH, HEIGHT = 1180, 980


async def main(out: Path, seconds: float) -> None:
    prompts = read_prompts(TRACE, FULL, TORCH_ENGINE)
    with tempfile.TemporaryDirectory(prefix="emberkv-ui-") as directory:
        base = Path(directory)
        config = base / "config.yaml"
        config.write_text(SETTINGS)
        with running_up(base, str(config)) as up:
            async with browser_page(base) as page, aiohttp.ClientSession() as session:
                await page.size(WIDTH, HEIGHT)
                await page.open(f"{up.router_url}/ui")
                load = asyncio.create_task(_load(session, up.router_url, prompts))
                await asyncio.sleep(seconds)
                await _take(page, out)
                load.cancel()
                await asyncio.gather(load, return_exceptions=True)
                assert not page.errors, page.errors


async def _load(session: aiohttp.ClientSession, url: str, prompts: list[DemoPrompt]) -> None:
    """Eight clients that ask what others asked before, more or less."""
    rng = random.Random(7)

    async def client() -> None:
        while True:
            prompt = prompts[min(rng.randrange(len(prompts)), rng.randrange(len(prompts)))]
            body = {
                "model": TORCH_ENGINE.model,
                "prompt": list(prompt.token_ids),
                "max_tokens": 4,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                await answer.read()
            await asyncio.sleep(rng.random() / 2)

    await asyncio.gather(*(client() for _ in range(8)))


async def _take(page: Page, out: Path) -> None:
    for scheme in ("light", "dark"):
        await page.prefer(scheme)
        await asyncio.sleep(1)
        (out / f"ui-{scheme}.png").write_bytes(await page.picture())
    await page.size(WIDTH, HEIGHT - 160)
    await page.value("document.getElementById('h-decisions').scrollIntoView()")
    await asyncio.sleep(1)
    (out / "ui-decisions-dark.png").write_bytes(await page.picture())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images")
    parser.add_argument("--seconds", type=float, default=60.0, help="load before the pictures")
    options = parser.parse_args()
    if browser_binary() is None:
        sys.exit("no Chromium here: install one or name it by EMBERKV_BROWSER")
    options.out.mkdir(parents=True, exist_ok=True)
    asyncio.run(main(options.out, options.seconds))
