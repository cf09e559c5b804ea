"""A bare proxy of aiohttp on uvloop, round robin: what the obvious Python would cost."""

from __future__ import annotations

import asyncio
import sys
from itertools import cycle

import uvloop
from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

HOP_BY_HOP = {"connection", "host", "keep-alive", "transfer-encoding", "upgrade"}


async def serve(port: int, urls: list[str]) -> None:
    targets = cycle(urls)
    connector = TCPConnector(limit=0)
    async with ClientSession(
        connector=connector, timeout=ClientTimeout(total=None), auto_decompress=False
    ) as session:

        async def forward(request: web.Request) -> web.StreamResponse:
            headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP_BY_HOP}
            body = await request.read()
            url = next(targets) + request.path_qs
            async with session.request(request.method, url, headers=headers, data=body) as answer:
                kept = {k: v for k, v in answer.headers.items() if k.lower() not in HOP_BY_HOP}
                response = web.StreamResponse(status=answer.status, headers=kept)
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
                return response

        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), sys.argv[2:]))
