"""The engine's OpenAI-compatible HTTP server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from functools import partial

from aiohttp import web
from aiohttp.typedefs import Handler

from client_sdk.engine.torch_engine.api import (
    Answer,
    ApiError,
    Ask,
    Json,
    parse_ask,
    parse_body,
    parse_prompt,
)
from client_sdk.engine.torch_engine.engine import Failed, Said, TorchEngine

MAX_BODY_BYTES = 32 * 1024 * 1024


class EngineServer:
    """Routes over one engine. Run its app with handler_cancellation on: a client that goes away
    cancels its handler, and the handler's end aborts its request."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self._cfg = engine.cfg
        self.app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors_as_json])
        self.app.add_routes(
            [
                web.post("/v1/completions", partial(self._answer, is_chat=False)),
                web.post("/v1/chat/completions", partial(self._answer, is_chat=True)),
                web.post("/tokenize", self._tokenize),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/ready", self._health),
                web.get("/metrics", self._metrics),
            ]
        )

    async def _answer(self, http: web.Request, *, is_chat: bool) -> web.StreamResponse:
        ask = parse_ask(parse_body(await http.read()), self._cfg, is_chat=is_chat)
        if not ask.is_streamed:
            async with aclosing(self._spoken(ask)) as spoken:
                whole = [answer async for answer in spoken][-1].whole()
            return web.json_response(whole)
        return await self._stream(http, ask)

    async def _stream(self, http: web.Request, ask: Ask) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        try:
            async with aclosing(self._spoken(ask)) as spoken:
                async for answer in spoken:
                    if not response.prepared:
                        await response.prepare(http)
                    if (chunk := answer.chunk()) is not None:
                        await _send(response, chunk)
            if ask.includes_usage:
                await _send(response, answer.usage_chunk())
        except ApiError as error:
            if not response.prepared:
                raise
            await _send(response, error.body)
            return response
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _spoken(self, ask: Ask) -> AsyncGenerator[Answer, None]:
        """The answer after each token. However the caller leaves, the request is over then."""
        loop = asyncio.get_running_loop()
        heard: asyncio.Queue[Said | Failed] = asyncio.Queue()

        def sink(event: Said | Failed) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(heard.put_nowait, event)

        request_id = self._engine.submit(ask.prompt, ask.max_tokens, ask.salt, sink)
        try:
            answer = Answer(request_id, self._cfg.model, ask)
            while not answer.finish_reason:
                event = await heard.get()
                if isinstance(event, Failed):
                    raise ApiError(event.reason, 503, "engine_failed")
                answer.say(event.token, is_last=event.is_last, cached=event.cached)
                yield answer
        finally:
            self._engine.abort(request_id)

    async def _tokenize(self, http: web.Request) -> web.Response:
        tokens = parse_prompt(parse_body(await http.read()), self._cfg)
        return web.json_response(
            {"count": len(tokens), "max_model_len": self._cfg.max_tokens, "tokens": tokens}
        )

    async def _models(self, _: web.Request) -> web.Response:
        model = {
            "id": self._cfg.model,
            "object": "model",
            "created": 0,
            "owned_by": "emberkv",
            "max_model_len": self._cfg.max_tokens,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, _: web.Request) -> web.Response:
        if not self._engine.is_alive:
            raise ApiError("the engine does not run", 503, "not_ready")
        return web.json_response({"status": "ok", "engine_id": self._cfg.engine_id})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            body=self._engine.metrics.render(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )


async def _send(response: web.StreamResponse, event: Json) -> None:
    await response.write(b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n")


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return web.json_response(error.body, status=error.status)
    except web.HTTPException as error:
        body = ApiError(error.reason, error.status, "http_error").body
        return web.json_response(body, status=error.status)
