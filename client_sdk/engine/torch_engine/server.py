"""The engine's OpenAI-compatible HTTP server, and the bodies it speaks."""

from __future__ import annotations

import json
import time
import uuid
from contextlib import aclosing
from typing import Annotated, Any, Literal

from aiohttp import web
from prometheus_client import generate_latest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from client_sdk.engine.torch_engine.config import Count, EngineSection, EngineSettings
from client_sdk.engine.torch_engine.engine import TorchEngine
from client_sdk.engine.torch_engine.scheduler import Request
from client_sdk.server_main import stop_signal, write_endpoint
from emberkv_proto.errors import UnavailableError
from emberkv_proto.types import Source

Json = dict[str, Any]
MAX_BODY_BYTES = 32 * 1024 * 1024
ROLE_START, ROLE_END = 256, 257  # marks around a message; the ids below them are bytes


class Message(BaseModel):
    role: str
    content: str


class Ask(BaseModel):
    """A completion request. What would change the answer and is not offered is refused."""

    model_config = ConfigDict(strict=True)
    model: str | None = None
    prompt: str | list[int] | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    temperature: Annotated[float, Field(ge=0, le=0)] | None = None
    n: Literal[1] | None = None
    stop: Literal[""] | Annotated[list[str], Field(max_length=0)] | None = None
    lora_name: Literal[""] | None = None

    def tokens(self, cfg: EngineSection) -> list[int]:
        """Of the prompt, or of each message between marks and the opening of the answer."""
        if self.messages is not None:
            tokens: list[int] = []
            for message in self.messages:
                text = f"{message.role}\n{message.content}"
                tokens += [ROLE_START, *text.encode(), ROLE_END]
            return [*tokens, ROLE_START, *b"assistant\n"]
        tokens = list(self.prompt.encode()) if isinstance(self.prompt, str) else self.prompt or []
        if not tokens or min(tokens) < 0 or max(tokens) >= cfg.vocab:
            raise _refusal(f"prompt must hold at least one token, each in 0..{cfg.vocab - 1}")
        return tokens


class EngineServer:
    """Routes over one engine. Run its app with handler_cancellation on: a client that goes away
    cancels its handler, and with that ends its request."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine, self._cfg = engine, engine.cfg
        self.app = web.Application(client_max_size=MAX_BODY_BYTES)
        for path in ("/v1/completions", "/v1/chat/completions"):
            self.app.router.add_post(path, self._complete)
        self.app.router.add_post("/tokenize", self._tokenize)
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_get("/metrics", self._metrics)
        for path in ("/health", "/ready"):
            self.app.router.add_get(path, self._health)

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        ask, is_chat = _parse(await http.read()), http.path == "/v1/chat/completions"
        if ask.model not in (None, self._cfg.model):
            raise _refusal(f"model {ask.model!r} is not served", "model_not_found")
        if (ask.messages is not None) is not is_chat:
            raise _refusal("chat completions need messages, completions need prompt")
        prompt, room = ask.tokens(self._cfg), self._cfg.max_tokens
        if len(prompt) >= room:
            words = f"the prompt has {len(prompt)} tokens, with its answer it may have {room}"
            raise _refusal(words, "context_length_exceeded")
        wanted = ask.max_completion_tokens or ask.max_tokens or (64 if is_chat else 16)
        salt = (ask.cache_salt or "").encode()
        request = Request(prompt, min(wanted, room - len(prompt)), salt)
        head, said = _head(ask, self._cfg.model), list[int]()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            async with aclosing(self._engine.answer(request)) as spoken:
                async for token in spoken:
                    said.append(token)
                    if ask.stream:
                        if not response.prepared:
                            await response.prepare(http)
                        choice = _choice(ask, request, [token], len(said))
                        await _send(response, {**head, "choices": [choice]})
        except UnavailableError as error:
            if not response.prepared:
                raise _refusal(str(error), "unavailable") from error
            await _send(response, {"error": {"message": str(error), "type": "server_error"}})
            return response
        if not ask.stream:
            choices = [_choice(ask, request, said, len(said))]
            return web.json_response({**head, "choices": choices, "usage": _usage(request)})
        if (ask.stream_options or {}).get("include_usage"):
            await _send(response, {**head, "choices": [], "usage": _usage(request)})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _tokenize(self, http: web.Request) -> web.Response:
        ids = _parse(await http.read()).tokens(self._cfg)
        size = {"count": len(ids), "max_model_len": self._cfg.max_tokens}
        return web.json_response({**size, "tokens": ids})

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": self._cfg.model, "object": "model", "max_model_len": self._cfg.max_tokens}
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, _: web.Request) -> web.Response:
        if self._engine.is_alive:
            return web.json_response({"status": "ok", "engine_id": self._cfg.engine_id})
        raise _refusal("the engine does not run", "unavailable")

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=generate_latest(self._engine.metrics).decode())


def _head(ask: Ask, model: str) -> Json:
    kind = "text_completion" if ask.messages is None else "chat.completion"
    kind += ".chunk" if ask.stream and ask.messages else ""
    return {"id": uuid.uuid4().hex, "object": kind, "created": int(time.time()), "model": model}


def _choice(ask: Ask, request: Request, ids: list[int], said: int) -> Json:
    """The last `ids` of `said` tokens: a chunk of a stream, or all of them at once."""
    is_last, is_first, text = said == request.max_tokens, len(ids) == said, bytes(ids).decode()
    choice: Json = {"index": 0, "finish_reason": "length" if is_last else None}
    if ask.messages is None:
        choice["text"] = text
    else:
        role = {"role": "assistant"} if is_first else {}
        choice["delta" if ask.stream else "message"] = {**role, "content": text}
    if ask.return_token_ids:
        choice |= {"token_ids": ids, **({"prompt_token_ids": request.prompt} if is_first else {})}
    return choice


def _usage(request: Request) -> Json:
    prompt, said = len(request.prompt), request.generated
    cached = {f"{source.name.lower()}_tokens": request.cached[source] for source in Source}
    details = {"cached_tokens": sum(cached.values()), **cached}
    usage = {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}
    return {**usage, "prompt_tokens_details": details}


def _parse(raw: bytes) -> Ask:
    try:
        return Ask.model_validate_json(raw)
    except ValidationError as error:
        faults = error.errors(include_input=False, include_url=False, include_context=False)
        words = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in faults[:3]]
        is_broken = faults[0]["type"] in ("json_invalid", "model_type")
        code = "invalid_json" if is_broken else "invalid_request"
        raise _refusal("; ".join(words), code) from None


async def _send(response: web.StreamResponse, event: Json) -> None:
    await response.write(b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n")


def _refusal(message: str, code: str = "invalid_request") -> web.HTTPException:
    """What the client gets instead of an answer."""
    status = {"model_not_found": web.HTTPNotFound, "unavailable": web.HTTPServiceUnavailable}
    kind = "server_error" if code == "unavailable" else "invalid_request_error"
    body = json.dumps({"error": {"message": message, "type": kind, "code": code}})
    return status.get(code, web.HTTPBadRequest)(text=body, content_type="application/json")


async def serve(settings: EngineSettings) -> None:
    """Serve until SIGTERM or SIGINT; then let running requests finish, save, and end."""
    cfg, stop = settings.engine, stop_signal()
    engine = TorchEngine(cfg)
    app, drain = EngineServer(engine).app, cfg.drain_seconds
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=drain)
    await runner.setup()
    try:
        await web.TCPSite(runner, cfg.host, cfg.port).start()
        url = f"http://{cfg.host}:{runner.addresses[0][1]}"
        engine.start(url)
        if cfg.endpoint_file is not None:
            write_endpoint(cfg.endpoint_file, {"url": url})
        print(f"engine {cfg.engine_id} serves {cfg.model} at {url}", flush=True)
        await stop.wait()
    finally:
        await runner.cleanup()
        await engine.close()
