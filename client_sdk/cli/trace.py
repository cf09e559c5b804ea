"""Mooncake's trace as prompts: each 512-token block of the trace becomes one store block.

Token ids are drawn from BLAKE3 of the trace's block id, so an equal id gives equal tokens, in
every process and on every machine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import blake3
import numpy as np

from emberkv_proto.errors import ConfigError

TRACE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of the trace: its length and the id of each of its blocks."""

    number: int
    input_tokens: int
    block_ids: tuple[int, ...]

    @property
    def last_block_tokens(self) -> int:
        return self.input_tokens - TRACE_BLOCK_TOKENS * (len(self.block_ids) - 1)


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Token ids that prompts may use: first <= id < end."""

    first: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.end:
            raise ConfigError(f"token range {self.first}..{self.end} is empty")


def default_trace_path() -> Path:
    """The excerpt in the source tree.

    Raises:
        ConfigError: this is an installed package without the tree's test data.
    """
    path = Path(__file__).parents[2] / "tests" / "data" / "mooncake_conversation_150.jsonl"
    if not path.is_file():
        raise ConfigError(f"no trace at {path}; give one with --trace FILE")
    return path


def load_trace(path: Path, limit: int) -> list[TraceRequest]:
    """Read the first `limit` requests.

    Raises:
        ConfigError: unreadable, or a line that is no request; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace {path} cannot be read: {error}") from None
    requests = [_parse(path, number, line) for number, line in enumerate(lines[:limit])]
    if not requests:
        raise ConfigError(f"trace {path} is empty")
    return requests


def _parse(path: Path, number: int, line: str) -> TraceRequest:
    try:
        row = json.loads(line)
        request = TraceRequest(
            number, int(row["input_length"]), tuple(int(block) for block in row["hash_ids"])
        )
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"trace {path} line {number + 1}: {error!r}") from None
    if not request.block_ids or not 0 < request.last_block_tokens <= TRACE_BLOCK_TOKENS:
        raise ConfigError(
            f"trace {path} line {number + 1}: {request.input_tokens} tokens do not fit"
            f" {len(request.block_ids)} blocks of {TRACE_BLOCK_TOKENS}"
        )
    return request


def block_token_ids(block_id: int, block_tokens: int, tokens: TokenRange) -> list[int]:
    """The `block_tokens` token ids that stand for a block of the trace."""
    digest = blake3.blake3(b"emberkv trace block %d" % block_id).digest(length=4 * block_tokens)
    drawn = np.frombuffer(digest, dtype="<u4") % np.uint32(tokens.end - tokens.first)
    ids: list[int] = (drawn + np.uint32(tokens.first)).tolist()
    return ids


def prompt_token_ids(request: TraceRequest, block_tokens: int, tokens: TokenRange) -> list[int]:
    """The request's prompt, scaled from 512 to `block_tokens` a block; its last block as well."""
    prompt: list[int] = []
    for block_id in request.block_ids:
        prompt += block_token_ids(block_id, block_tokens, tokens)
    last = -(-request.last_block_tokens * block_tokens // TRACE_BLOCK_TOKENS)
    return prompt[: len(prompt) - block_tokens + last]
