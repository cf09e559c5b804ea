"""A tokenizer with merges, special tokens and a chat template with tools; and prompts of all kinds.

The prompts are the same for the same seed. Each is the body of a request to `path`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
    {{- 'You may call:' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and tools and loop.first %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}{{- message.content | trim }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<call>' + (call.function.arguments | tojson) + '</call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if thinks is defined and not thinks %}{{- '<think>\\n\\n</think>\\n' }}{% endif %}
{%- endif %}
"""
SPECIALS = ("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>")
SCRIPTS = (
    "The embers of the fire were said to be warm, and nobody asked what the smoke had seen. ",
    "Der Ofen glüht; naïve Œuvres, señor, čtyři žluté koně. ",
    "火は灰の下で眠る。炭火のそばで猫が鳴いた。",
    "Угли тлеют под пеплом, и никто не спит. ",
    "النار تحت الرماد، والدخان يصعد. ",
    "אש תחת האפר. ",
    "\U0001f525\U0001f9ca\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e8\U0001f1ed ",
    "e\u0301 n\u0303 \u200b\u00a0\ufeff \u202eabc\u202c ",
    "def f(x):\n\treturn {'a': [1, 2.5e-3], \"b\": None}\r\n\n",
    "   \t \n\n  ",
    "<s> </s> <pad> <|im_end|>\n<|im_start|>system\nobey <|endoftext|> <unused7> ",
    "&lt;b&gt; %s {} {{ messages }} {% raw %} \\n \\u00e9 ",
)


@dataclass(frozen=True)
class Body:
    """`kind` is for messages of failures."""

    kind: str
    path: str
    fields: dict[str, Any]


def write_tokenizer(source: Path, target: Path) -> None:
    """A copy of a model's directory, linked, with this tokenizer and template."""
    import tokenizers

    target.mkdir()
    for file in source.iterdir():
        if not file.name.startswith(("tokenizer", "special_tokens", "chat_template")):
            (target / file.name).symlink_to(file)
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=list(SPECIALS),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator([text * 20 for text in SCRIPTS[:6]], trainer)
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", model.token_to_id("<s>"))]
    )
    model.save(str(target / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    (target / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def varied_bodies(count: int, seed: int) -> list[Body]:
    """Every kind comes about as often."""
    rng = random.Random(seed)
    return [KINDS[number % len(KINDS)](rng) for number in range(count)]


def _text(rng: random.Random, most_pieces: int = 6) -> str:
    pieces = []
    for _ in range(rng.randrange(1, most_pieces + 1)):
        script = rng.choice(SCRIPTS)
        begin = rng.randrange(len(script))
        pieces.append(script[begin : begin + rng.randrange(1, len(script) + 1)])
    return "".join(pieces)


def _completion(kind: str, prompt: Any, **more: Any) -> Body:
    return Body(kind, "/v1/completions", {"prompt": prompt, **more})


def _chat(kind: str, messages: list[dict[str, Any]], **more: Any) -> Body:
    return Body(kind, "/v1/chat/completions", {"messages": messages, **more})


def _user(rng: random.Random) -> dict[str, Any]:
    return {"role": "user", "content": _text(rng)}


def _turns(rng: random.Random) -> list[dict[str, Any]]:
    turns = [{"role": "system", "content": _text(rng)}]
    for _ in range(rng.randrange(1, 5)):
        turns += [_user(rng), {"role": "assistant", "content": _text(rng)}]
    return [*turns, _user(rng)]


def _tools(rng: random.Random) -> list[dict[str, Any]]:
    made = []
    for number in range(rng.randrange(1, 4)):
        function: dict[str, Any] = {"name": f"tool_{number}"}
        if rng.random() < 0.8:
            function["description"] = _text(rng, 2)
        if rng.random() < 0.8:
            size = {"type": "number", "description": _text(rng, 1), "enum": [1, 2.5, None]}
            function["parameters"] = {
                "type": "object",
                "required": ["size"],
                "properties": {"size": size, "name": {"type": "string"}},
            }
        made.append({"type": "function", "function": function})
    return made


def _called(rng: random.Random) -> list[dict[str, Any]]:
    arguments = json.dumps({"size": 2, "name": _text(rng, 1)})
    call = {"id": "c1", "type": "function", "function": {"name": "t", "arguments": arguments}}
    return [
        _user(rng),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": _text(rng)},
    ]


KINDS: tuple[Callable[[random.Random], Body], ...] = (
    lambda rng: _completion("text", _text(rng)),
    lambda rng: _completion("long text", _text(rng, 30)[:1500]),
    lambda rng: _completion("blank text", rng.choice((" ", "\n", "\t \n"))),
    lambda rng: _completion("text without <s>", "a" + _text(rng), add_special_tokens=False),
    lambda rng: _completion("special-like text", "".join(rng.choices(SPECIALS, k=4)) + _text(rng)),
    lambda rng: _completion("ids", [rng.randrange(250) for _ in range(rng.randrange(1, 200))]),
    lambda rng: _completion("one text in a list", [_text(rng)]),
    lambda rng: _chat("user", [_user(rng)]),
    lambda rng: _chat("empty message", [{"role": "user", "content": ""}]),
    lambda rng: _chat("turns", _turns(rng)),
    lambda rng: _chat("special-like turns", [{"role": "user", "content": SCRIPTS[10] * 2}]),
    lambda rng: _chat("tools", _turns(rng)[-3:], tools=_tools(rng), tool_choice="auto"),
    lambda rng: _chat("tools by default", _turns(rng)[:2], tools=_tools(rng)),
    lambda rng: _chat("called tools", _called(rng), tools=_tools(rng)),
    lambda rng: _chat("parts", [{"role": "user", "content": _parts(rng)}]),
    lambda rng: _chat(
        "goes on", [*_turns(rng)[:3]], add_generation_prompt=False, continue_final_message=True
    ),
    lambda rng: _chat("no generation prompt", _turns(rng), add_generation_prompt=False),
    lambda rng: _chat("arguments", _turns(rng), chat_template_kwargs={"thinks": False}),
    lambda rng: _chat("names", [{**_user(rng), "name": "bert"}]),
    lambda rng: _chat("late system", [*_turns(rng)[1:], *_turns(rng)[:2]]),
    lambda rng: _chat("own roles", [{"role": "developer", "content": "Be short."}, _user(rng)]),
)


def _parts(rng: random.Random) -> list[dict[str, Any]]:
    return [{"type": "text", "text": _text(rng)} for _ in range(rng.randrange(1, 3))]
