"""The OpenAI request and answer bodies this engine speaks. Pure: dicts in, dicts out."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from client_sdk.engine.torch_engine.config import EngineSection
from client_sdk.engine.torch_engine.tokenizer import ChatMessage, decode, encode, encode_chat
from emberkv_proto.types import Source

Json = dict[str, Any]
DEFAULT_MAX_TOKENS, DEFAULT_CHAT_MAX_TOKENS = 16, 64


class ApiError(Exception):
    """What the client gets instead of an answer."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body: Json = {"error": {"message": message, "type": kind, "code": code}}


@dataclass(frozen=True, slots=True)
class Ask:
    """A checked completion request."""

    prompt: Sequence[int]
    max_tokens: int
    stop: tuple[str, ...]
    salt: bytes
    is_chat: bool
    is_streamed: bool
    includes_usage: bool
    returns_token_ids: bool


def parse_body(raw: bytes) -> Json:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object", code="invalid_json")
    return body


def parse_prompt(body: Json, cfg: EngineSection) -> list[int]:
    """Token ids of `messages` or `prompt`; every id is in the vocabulary."""
    if "messages" in body:
        messages = body["messages"]
        if not isinstance(messages, list) or not messages:
            raise ApiError("messages must be a list of at least one message")
        return encode_chat([_message(message) for message in messages])
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        prompt = encode(prompt)
    elif not isinstance(prompt, list) or any(type(token) is not int for token in prompt):
        raise ApiError("prompt must be one string or one list of token ids")
    if not prompt:
        raise ApiError("prompt must hold at least one token")
    if min(prompt) < 0 or max(prompt) >= cfg.vocab:
        raise ApiError(f"a token id is not in 0..{cfg.vocab - 1}")
    return prompt


def parse_ask(body: Json, cfg: EngineSection, *, is_chat: bool) -> Ask:
    """Check a completion request. Raises ApiError; fields this engine does not know are ignored."""
    model = body.get("model", cfg.model)
    if model != cfg.model:
        raise ApiError(f"model {model!r} is not served; {cfg.model!r} is", 404, "model_not_found")
    if body.get("temperature") not in (None, 0):
        raise ApiError("this engine is greedy: temperature must be 0 or absent")
    if body.get("n") not in (None, 1):
        raise ApiError("this engine gives one choice: n must be 1 or absent")
    if body.get("lora_name"):
        raise ApiError(f"LoRA {body['lora_name']!r} is not loaded", 404, "model_not_found")
    if ("messages" in body) is not is_chat:
        raise ApiError("chat completions need messages, completions need prompt")
    prompt = parse_prompt(body, cfg)
    if len(prompt) >= cfg.max_tokens:
        raise ApiError(
            f"the prompt has {len(prompt)} tokens; prompt and answer together may have"
            f" {cfg.max_tokens}",
            code="context_length_exceeded",
        )
    wanted = body.get("max_completion_tokens") if is_chat else None
    wanted = body.get("max_tokens") if wanted is None else wanted
    if wanted is None:
        wanted = DEFAULT_CHAT_MAX_TOKENS if is_chat else DEFAULT_MAX_TOKENS
    if type(wanted) is not int or wanted < 1:
        raise ApiError(f"max_tokens must be an integer of at least 1, not {wanted!r}")
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise ApiError("stop must be a string or a list of strings, none of them empty")
    salt = body.get("cache_salt") or ""
    if not isinstance(salt, str):
        raise ApiError("cache_salt must be a string")
    options = body.get("stream_options") or {}
    return Ask(
        prompt,
        min(wanted, cfg.max_tokens - len(prompt)),
        tuple(stop),
        salt.encode("utf-8", errors="surrogatepass"),
        is_chat,
        body.get("stream") is True,
        isinstance(options, dict) and options.get("include_usage") is True,
        body.get("return_token_ids") is True,
    )


class Answer:
    """An answer as it grows; gives the text that may be shown so far."""

    def __init__(self, request_id: str, model: str, ask: Ask) -> None:
        self._ask = ask
        kind = "chat.completion" if ask.is_chat else "text_completion"
        streamed_kind = kind + ".chunk" if ask.is_chat else kind
        self._head: Json = {
            "id": ("chatcmpl-" if ask.is_chat else "cmpl-") + request_id,
            "object": streamed_kind if ask.is_streamed else kind,
            "created": int(time.time()),
            "model": model,
        }
        self._held_back = max((len(text) - 1 for text in ask.stop), default=0)
        self._shown_chars = self._shown_ids = 0
        self.ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.cached: Mapping[Source, int] = {}

    def say(self, token: int, *, is_last: bool, cached: Mapping[Source, int]) -> None:
        """Take one token; a stop string ends the answer before it. One token is one character."""
        self.ids.append(token)
        self.text += decode([token])
        self.cached = cached
        found = [at for text in self._ask.stop if (at := self.text.find(text)) >= 0]
        if found:
            self.text, self.finish_reason = self.text[: min(found)], "stop"
        elif is_last:
            self.finish_reason = "length"

    def chunk(self) -> Json | None:
        """What is new since the last chunk; None while a stop string may be under way."""
        end = len(self.text) - (0 if self.finish_reason else self._held_back)
        if end <= self._shown_chars and not self.finish_reason:
            return None
        text, is_first = self.text[self._shown_chars : end], not self._shown_ids
        ids = self.ids[self._shown_ids :]
        self._shown_chars, self._shown_ids = end, len(self.ids)
        choice: Json = {"index": 0, "finish_reason": self.finish_reason}
        if self._ask.is_chat:
            choice["delta"] = {"content": text, **({"role": "assistant"} if is_first else {})}
        else:
            choice["text"] = text
        if self._ask.returns_token_ids:
            choice["token_ids"] = ids
            if is_first:
                choice["prompt_token_ids"] = list(self._ask.prompt)
        return {**self._head, "choices": [choice]}

    def usage_chunk(self) -> Json:
        return {**self._head, "choices": [], "usage": self.usage()}

    def whole(self) -> Json:
        choice: Json = {"index": 0, "finish_reason": self.finish_reason, "logprobs": None}
        if self._ask.is_chat:
            choice["message"] = {"role": "assistant", "content": self.text}
        else:
            choice["text"] = self.text
        if self._ask.returns_token_ids:
            choice |= {"token_ids": self.ids, "prompt_token_ids": list(self._ask.prompt)}
        return {**self._head, "choices": [choice], "usage": self.usage()}

    def usage(self) -> Json:
        prompt, said = len(self._ask.prompt), len(self.ids)
        by_source = {f"{s.name.lower()}_tokens": self.cached.get(s, 0) for s in Source}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": said,
            "total_tokens": prompt + said,
            "prompt_tokens_details": {"cached_tokens": sum(by_source.values()), **by_source},
        }


def _message(message: object) -> ChatMessage:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError("each message must be an object with a role")
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(text, str) for text in parts):
            raise ApiError("this engine reads text parts only")
        content = "".join(str(text) for text in parts)
    if not isinstance(content, str):
        raise ApiError("a message's content must be text or a list of text parts")
    return ChatMessage(message["role"], content)
