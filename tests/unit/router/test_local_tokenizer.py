"""Tokens made by the router are the engine's, or the engine is asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from emberkv_proto.errors import ConfigError
from router.request_body import RequestBody, parse_body
from tests.helpers.fake_engine import FakeEngine, FakeRequest, answer
from tests.helpers.router_client import request, running_router

tokenizers = pytest.importorskip("tokenizers")

from router.local_tokenizer import LocalTokenizer, NotRenderedError  # noqa: E402

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What  did the \u00e9mb\u00e9rs say? \U0001f525\n\n don't"},
    {"role": "assistant", "content": "Nothing."},
    {"role": "user", "content": " <|im_end|> is text too"},
]


def tokenizer_in(directory: Path, alphabet: str = "abc") -> Any:
    """A byte-level BPE trained on a few words."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = ["Be short. What did the embers say? Nothing at all, said the fire. "] * 20
    model.train_from_iterator([*words, alphabet * 50], trainer)
    directory.mkdir(exist_ok=True)
    model.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return model


def chat(*turns: Any, **more: Any) -> RequestBody:
    return parse_body(json.dumps({"model": "m", "messages": turns, **more}).encode())


def rendered(turns: list[Any]) -> str:
    text = "".join(f"<|im_start|>{t['role']}\n{t['content']}<|im_end|>\n" for t in turns)
    return text + "<|im_start|>assistant\n"


def test_a_growing_conversation_has_the_tokens_of_its_whole_text(tmp_path: Path) -> None:
    model = tokenizer_in(tmp_path)
    local = LocalTokenizer(tmp_path)
    assert local.is_incremental
    for count in (*range(1, 5), 3, 4):
        wanted = model.encode(rendered(TURNS[:count]), add_special_tokens=False).ids
        assert local.ids(chat(*TURNS[:count])).tolist() == wanted
        local.check_integrity()
    text = parse_body(json.dumps({"prompt": "the embers"}).encode())
    assert local.ids(text).tolist() == model.encode("the embers").ids


def test_tools_and_the_generation_prompt_are_rendered(tmp_path: Path) -> None:
    model = tokenizer_in(tmp_path)
    function = {"name": "f\u00e9", "description": "d", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    text = "<|im_start|>user\nhi<|im_end|>\n" + json.dumps(tools, ensure_ascii=False)
    turn = {"role": "user", "content": "hi"}
    body = chat(turn, tools=tools, add_generation_prompt=False)
    wanted = model.encode(text, add_special_tokens=False).ids
    assert LocalTokenizer(tmp_path).ids(body).tolist() == wanted


@pytest.mark.parametrize(
    "body",
    [
        chat({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}),
        chat({"role": "assistant", "content": "x", "tool_calls": []}),
        chat("text"),
        chat({"role": "user", "content": "x"}, chat_template="{{ 1 }}"),
        chat({"role": "user", "content": "x"}, tool_choice="none"),
        chat({"role": "user", "content": "x"}, continue_final_message=True),
        chat({"role": "user", "content": "x"}, tools={"a": 1}),
        chat({"role": "developer", "content": "x"}),
        chat({"role": ["user"], "content": "x"}),
        *(
            chat({"role": "user", "content": "x"}, tools=[tool])
            for tool in (
                {},
                "f",
                {"type": "function", "function": {"name": "f"}},
                {"type": "function", "function": {"name": "f", "parameters": {}}},
                {
                    "type": "function",
                    "function": {"description": "d", "name": "f", "parameters": {}},
                },
                {
                    "function": {"name": "f", "description": "d", "parameters": {}},
                    "type": "function",
                },
                {
                    "type": "function",
                    "function": {"name": "f", "description": None, "parameters": {}},
                },
                {
                    "type": "function",
                    "function": {"name": "f", "description": "d", "parameters": {}, "strict": True},
                },
            )
        ),
        chat({"role": "user", "content": "x"}, chat_template_kwargs=[1]),
        RequestBody.of(prompt={"a": 1}),
    ],
)
def test_what_may_be_rendered_otherwise_is_left_to_the_engine(
    tmp_path: Path, body: RequestBody
) -> None:
    tokenizer_in(tmp_path)
    with pytest.raises(NotRenderedError):
        LocalTokenizer(tmp_path).ids(body)


def test_a_template_can_do_no_harm_and_one_that_fails_is_left_to_the_engine(
    tmp_path: Path,
) -> None:
    tokenizer_in(tmp_path)
    for template in (
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no') }}",
        "{{ missing.field }}",
    ):
        (tmp_path / "chat_template.jinja").write_text(template)
        with pytest.raises(NotRenderedError):
            LocalTokenizer(tmp_path).ids(chat({"role": "user", "content": "x"}))


def test_a_directory_without_a_tokenizer_is_told_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"router.tokenizers: {tmp_path}"):
        LocalTokenizer(tmp_path)
    tokenizer_in(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match="chat template"):
        LocalTokenizer(tmp_path)


async def test_the_engine_is_asked_for_the_first_prompts_only_while_it_agrees(
    tmp_path: Path,
) -> None:
    same = tokenizer_in(tmp_path / "same")
    other = tokenizer_in(tmp_path / "other", "zyx the say what did embers")

    def by(model: Any) -> Any:
        async def script(asked: FakeRequest, writer: Any) -> bool:
            ids = model.encode(rendered(asked.json["messages"]), add_special_tokens=False).ids
            return await answer({"tokens": ids})(asked, writer)

        return script

    async with FakeEngine().serving() as engine:
        async with running_router(engine.url, tokenizers={"m": str(tmp_path / "same")}) as router:
            engine.tokenize = by(same)
            for number in range(10):
                turn = {"role": "user", "content": f"What did ember {number} say?"}
                body = {"model": "m", "messages": [turn]}
                assert (await request(router.port, "/v1/chat/completions", body)).status == 200
            assert router.counter("local_tokens_total", what="made") == 10
            assert router.counter("local_tokens_total", what="equal") == 4
            assert engine.tokenize_calls == 4
            engine.tokenize = by(other)
        async with running_router(engine.url, tokenizers={"m": str(tmp_path / "same")}) as router:
            for number in range(3):
                turn = {"role": "user", "content": f"What did the embers say? {number}"}
                body = {"model": "m", "messages": [turn]}
                assert (await request(router.port, "/v1/chat/completions", body)).status == 200
            assert router.counter("local_tokens_total", what="different") == 1
            assert router.counter("local_tokens_total", what="made") == 1, "it is not trusted more"
            assert engine.tokenize_calls == 7
