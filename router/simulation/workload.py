"""What comes to the simulated cluster: requests with their blocks, read from traces.

Traces are in the format of Mooncake's FAST'25 release: a JSON object a line with `timestamp` in
milliseconds, `input_length` and `output_length` in tokens, and `hash_ids`, one for each block,
where equal numbers mean equal prefixes up to and with that block.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from emberkv_proto.errors import ConfigError

BLOCK_TOKENS = 512
MAX_LINE_BYTES = 1 << 20
MAX_REQUESTS = 10_000_000
DRIFT = 0.1
"""Copies of a trace begin within this part of its length."""
_SPREAD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_COPY_SHIFT = 48


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A request. `keys` are those of the index, root first; `array` the same for its kernels."""

    seconds: float
    prompt_tokens: int
    output_tokens: int
    keys: tuple[int, ...]
    array: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Requests in the order of their coming; at least one."""

    name: str
    arrivals: Sequence[Arrival]

    @property
    def prompt_tokens(self) -> int:
        return sum(arrival.prompt_tokens for arrival in self.arrivals)

    @property
    def seconds(self) -> float:
        """From the first request to the last; never 0."""
        return max(self.arrivals[-1].seconds - self.arrivals[0].seconds, 1e-3)


def arrival(
    seconds: float, block_ids: Sequence[int], prompt_tokens: int, output_tokens: int, copy: int = 0
) -> Arrival:
    """`block_ids`: 0 <= id < 2**48. Requests of another copy share no block with this one's."""
    keys = tuple(((copy << _COPY_SHIFT) + block + 1) * _SPREAD & _MASK for block in block_ids)
    return Arrival(seconds, prompt_tokens, output_tokens, keys, np.array(keys, np.uint64))


def read_workload(path: Path, limit: int | None = None) -> Workload:
    """The first `limit` requests of a trace.

    Raises:
        ConfigError: it cannot be read, or a line is no request; names the line.
    """
    found: list[Arrival] = []
    most = MAX_REQUESTS if limit is None else min(limit, MAX_REQUESTS)
    try:
        with path.open("rb") as lines:
            for number in range(1, most + 1):
                line = lines.readline(MAX_LINE_BYTES + 1)
                if not line:
                    break
                found.append(_parse(f"trace {path} line {number}", line))
    except OSError as error:
        raise ConfigError(f"trace {path} cannot be read: {error}") from None
    if not found:
        raise ConfigError(f"trace {path} is empty")
    found.sort(key=lambda item: item.seconds)
    return Workload(path.stem, found)


def _parse(where: str, line: bytes) -> Arrival:
    if len(line) > MAX_LINE_BYTES:
        raise ConfigError(f"{where} is longer than {MAX_LINE_BYTES} bytes")
    try:
        row = json.loads(line)
        blocks = row["hash_ids"]
        prompt = row["input_length"]
        output = row.get("output_length", 0)
        seconds = float(row["timestamp"]) / 1000
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{where} is no request: {error!r}") from None
    if not isinstance(blocks, list) or not all(_is_number(block, 1 << 48) for block in blocks):
        raise ConfigError(f"{where}: hash_ids is no list of numbers below 2**48")
    if not _is_number(prompt, 1 << 40) or not _is_number(output, 1 << 40):
        raise ConfigError(f"{where}: lengths are no numbers of tokens")
    if not 0 <= seconds < 1e9:
        raise ConfigError(f"{where}: timestamp {seconds * 1000:g} ms is not within 30 years")
    if not blocks or len(blocks) != -(-prompt // BLOCK_TOKENS):
        raise ConfigError(
            f"{where}: {prompt} tokens are not {len(blocks)} blocks of {BLOCK_TOKENS}"
        )
    return arrival(seconds, blocks, prompt, output)


def _is_number(value: object, end: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < end


def best_hit_rate(arrivals: Iterable[Arrival]) -> float:
    """Hit tokens over all: the oracle's, one cache for all that forgets nothing."""
    seen: set[int] = set()
    hits = tokens = 0
    for item in arrivals:
        held = len(item.keys)
        for at, key in enumerate(item.keys):
            if key not in seen:
                held = at
                break
        seen.update(item.keys[held:])
        tokens += item.prompt_tokens
        hits += min(held * BLOCK_TOKENS, item.prompt_tokens)
    return hits / tokens


def offered(workload: Workload, load: float, tokens_per_second: float) -> Workload:
    """The same requests, so much quicker or slower that they need `load` of the cluster.

    `tokens_per_second`: what all engines prefill together. What is needed is what the oracle
    leaves to compute.
    """
    needed = workload.prompt_tokens * (1 - best_hit_rate(workload.arrivals)) / workload.seconds
    stretch = needed / (load * tokens_per_second)
    first = workload.arrivals[0].seconds
    return replace(
        workload,
        arrivals=[
            replace(item, seconds=(item.seconds - first) * stretch) for item in workload.arrivals
        ],
    )


def copies(workload: Workload, count: int, seed: int) -> Workload:
    """So many user populations that each do what the trace says, but share no block.

    Each begins somewhere in the first tenth of the trace's time, by chance.
    """
    rng = random.Random(seed)  # noqa: S311
    arrivals = list(workload.arrivals)
    for copy in range(1, count):
        later = rng.uniform(0, DRIFT * workload.seconds)
        mark = (copy << _COPY_SHIFT) * _SPREAD & _MASK
        for item in workload.arrivals:
            keys = tuple(key + mark & _MASK for key in item.keys)
            arrivals.append(
                replace(
                    item,
                    seconds=item.seconds + later,
                    keys=keys,
                    array=np.array(keys, np.uint64),
                )
            )
    return replace(workload, arrivals=sorted(arrivals, key=lambda item: item.seconds))
