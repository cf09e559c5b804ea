"""Keys made by the command, taken and revoked by a running router; salts seen by its engine."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from client_sdk.aio import timeout
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.router_client import request
from tests.helpers.router_process import router_process

pytestmark = pytest.mark.process
PATH = "/v1/completions"
BODY = {"model": "m", "prompt": [1, 2, 3]}


async def emberkv(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "client_sdk.cli.main",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    async with timeout(150):
        out, _ = await process.communicate()
    process._transport.close()  # type: ignore[attr-defined]
    assert process.returncode == 0
    return out.decode().strip()


async def test_keys_are_made_and_revoked_while_the_router_serves(tmp_path: Path) -> None:
    file, secret = tmp_path / "keys.json", tmp_path / "secret"
    secret.write_text("c" * 32)
    secret.chmod(0o600)
    one = await emberkv("router-key", "create", "--file", str(file), "--tenant", "acme")
    async with FakeEngine().serving() as engine:
        settings = (
            f"router.engines=[{{url: '{engine.url}'}}]",
            f"router.key_file={file}",
            f"router.tenant_secret_file={secret}",
        )
        async with router_process(tmp_path, *settings) as router:

            async def becomes(key: str, wanted: int) -> None:
                async with timeout(60):
                    while True:
                        headers = {"Authorization": f"Bearer {key}"}
                        got = await request(router.port, PATH, BODY, headers)
                        if got.status == wanted:
                            return
                        await asyncio.sleep(0.05)

            assert (await request(router.port, PATH, BODY)).status == 401
            await becomes(one, 200)
            other = ("--tenant", "other", "--requests-per-minute", "1")
            two = await emberkv("router-key", "create", "--file", str(file), *other)
            await becomes(two, 200)
            await becomes(two, 429)
            listed = json.loads(await emberkv("router-key", "list", "--file", str(file), "--json"))
            key_id = next(k["key_id"] for k in listed["keys"] if k["tenant"] == "acme")
            await emberkv("router-key", "revoke", key_id, "--file", str(file))
            await becomes(one, 401)
            salts = {seen.json["cache_salt"] for seen in engine.requests}
            assert len(salts) == 2
            assert all("authorization" not in seen.headers for seen in engine.requests)
