"""Byte-level tokenizer and chat template: ids 0..255 are bytes, the next ones are marks.

The model only ever says printable ASCII, so an answer's text encodes back to the same ids and the
next turn of a chat finds its blocks again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ROLE_START, ROLE_END = 256, 257


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str


def encode(text: str) -> list[int]:
    """UTF-8 bytes; a lone surrogate becomes '?'. Text can never produce a mark."""
    return list(text.encode("utf-8", errors="replace"))


def decode(ids: Sequence[int]) -> str:
    """Text of the bytes among `ids`; marks and unused ids say nothing."""
    return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")


def encode_chat(messages: Sequence[ChatMessage]) -> list[int]:
    """Each message between marks, then the opening of the assistant's answer."""
    ids: list[int] = []
    for message in messages:
        ids += [ROLE_START, *encode(message.role + "\n" + message.content), ROLE_END]
    return [*ids, ROLE_START, *encode("assistant\n")]
