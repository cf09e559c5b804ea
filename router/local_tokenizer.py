"""A model's own tokenizer and chat template, read from its directory: token ids without a call.

It renders what it surely renders as the engine does, and leaves the rest to the engine: roles with
plain text, tools, template arguments. Templates run in Jinja's sandbox; none is taken from a
request. A conversation's old messages are not encoded again: the text is cut behind each special
token, where tokenizers cut it too, and pieces are remembered.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from emberkv_proto.errors import ConfigError
from router.request_body import RequestBody
from router.tokenize import TokenIds

MOST_PIECES = 20_000
MOST_PIECE_CHARACTERS = 8_000_000
LEFT_TO_ENGINES = (
    "chat_template",
    "continue_final_message",
    "documents",
    "mm_processor_kwargs",
    "tool_choice",
    "reasoning_effort",
)
"""Fields whose effect on the rendering differs between engines and their versions."""
ROLES = ("system", "user", "assistant")
"""Engines rename others: vLLM makes a `developer` a `system`, unless the template knows it."""
_SAMPLES = (
    "Hello  world\n",
    " leading",
    "",
    "\n\nx\t",
    "z\u00e9ro \U0001f525",
    "don't",
    "\u4f60\u597d",
)


class NotRenderedError(Exception):
    """This request's prompt is left to the engine."""


class LocalTokenizer:
    """One model's. From any thread."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError: there is no tokenizer, or it cannot be read."""
        what = f"router.tokenizers: {directory}"
        try:
            self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
            settings = _read_json(directory / "tokenizer_config.json")
        except Exception as error:  # tokenizers raises bare ones
            raise ConfigError(f"{what} has no tokenizer that can be read: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special = {
            name: _token(settings.get(name)) for name in ("bos_token", "eos_token", "pad_token")
        }
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            source = _template_in(directory, settings)
            self._template = environment.from_string(source) if source else None
        except (TemplateError, OSError) as error:
            raise ConfigError(f"{what}: its chat template cannot be read: {error}") from None
        self._lock = threading.Lock()
        self._pieces: OrderedDict[str, Sequence[int]] = OrderedDict()
        self._characters = 0
        self._cut = _cutter(self._tokenizer)
        if self._cut is not None and not self._cuts_alike():
            self._cut = None

    @property
    def is_incremental(self) -> bool:
        """Whether pieces are encoded by themselves."""
        return self._cut is not None

    def ids(self, body: RequestBody) -> TokenIds:
        """The ids of the body's prompt.

        Raises NotRenderedError: whether the engine renders it so is not sure.
        """
        if "messages" in body:
            adds = body.get("add_special_tokens") is True
            return np.array(self._encoded(self._rendered(body), adds_special=adds), np.uint32)
        prompt = body.get("prompt")
        if not isinstance(prompt, str):
            raise NotRenderedError
        adds = body.get("add_special_tokens", True)
        return np.array(self._encoded(prompt, adds_special=adds is not False), np.uint32)

    def check_integrity(self) -> None:
        assert self._characters == sum(map(len, self._pieces))
        assert len(self._pieces) <= MOST_PIECES

    def _rendered(self, body: RequestBody) -> str:
        if self._template is None or any(body.get(name) is not None for name in LEFT_TO_ENGINES):
            raise NotRenderedError
        messages, tools = body["messages"], body.get("tools")
        arguments = body.get("chat_template_kwargs") or {}
        if not isinstance(messages, list) or not isinstance(arguments, dict):
            raise NotRenderedError
        if tools is not None and not (isinstance(tools, list) and all(map(_is_whole, tools))):
            raise NotRenderedError
        for message in messages:
            if not isinstance(message, dict) or not set(message) <= {"role", "content", "name"}:
                raise NotRenderedError
            if message.get("role") not in ROLES or not isinstance(message.get("content"), str):
                raise NotRenderedError
        generates = body.get("add_generation_prompt", True)
        try:
            return self._template.render(
                **{
                    **self._special,
                    "messages": messages,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": generates is not False,
                    **arguments,
                }
            )
        except Exception:  # whatever a template does with what a client sent
            raise NotRenderedError from None

    def _encoded(self, text: str, *, adds_special: bool) -> Sequence[int]:
        if adds_special or self._cut is None:
            whole: Sequence[int] = self._tokenizer.encode(text, add_special_tokens=adds_special).ids
            return whole
        ids: list[int] = []
        for piece in self._cut.findall(text):
            known = self._pieces.get(piece)
            if known is None:
                known = self._tokenizer.encode(piece, add_special_tokens=False).ids
            self._keep(piece, known)
            ids += known
        return ids

    def _keep(self, piece: str, ids: Sequence[int]) -> None:
        with self._lock:
            if piece not in self._pieces:
                self._pieces[piece] = ids
                self._characters += len(piece)
            self._pieces.move_to_end(piece)
            while len(self._pieces) > MOST_PIECES or self._characters > MOST_PIECE_CHARACTERS:
                dropped, _ = self._pieces.popitem(last=False)
                self._characters -= len(dropped)

    def _cuts_alike(self) -> bool:
        """Whether pieces encoded by themselves are the whole's tokens."""
        tokens = [token.content for token in _plain_specials(self._tokenizer)]
        for token in tokens[:4]:
            text = token.join(_SAMPLES) + token
            whole = self._tokenizer.encode(text, add_special_tokens=False).ids
            if self._encoded(text, adds_special=False) != whole:
                return False
        self._pieces.clear()
        self._characters = 0
        return bool(tokens)


def _is_whole(tool: Any) -> bool:
    """Whether engines give a tool to the template as it came.

    vLLM fills in what is missing with null and puts fields into this order.
    """
    if not isinstance(tool, dict) or list(tool) != ["type", "function"]:
        return False
    function = tool["function"]
    return (
        isinstance(function, dict)
        and list(function) == ["name", "description", "parameters"]
        and isinstance(function["name"], str)
        and isinstance(function["description"], str)
        and isinstance(function["parameters"], dict)
    )


def _plain_specials(tokenizer: Any) -> list[Any]:
    """Special tokens that take no blanks of their neighbourhood with them."""
    return [
        token
        for token in tokenizer.get_added_tokens_decoder().values()
        if token.special and not (token.lstrip or token.rstrip or token.single_word)
    ]


def _cutter(tokenizer: Any) -> re.Pattern[str] | None:
    """Finds pieces: text up to and with the next special token, or the end."""
    contents = [re.escape(token.content) for token in _plain_specials(tokenizer)]
    if not contents:
        return None
    either = "|".join(sorted(contents, key=len, reverse=True))
    return re.compile(f"(?s:.*?(?:{either})|.+)")


def _token(value: Any) -> str:
    """A special token as tokenizer_config.json has it: a text, or an object with one."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""


def _template_in(directory: Path, settings: dict[str, Any]) -> str:
    """Its own file comes first, as transformers reads them."""
    file = directory / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {item.get("name"): item.get("template") for item in found}
        found = named.get("default")
    return found if isinstance(found, str) else ""


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """As transformers has it: no escapes for HTML, no ASCII."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise TemplateError(message)
