"""A real vLLM server: time to first token after a restart, and what the connector costs.

vLLM runs on the CPU in an environment of its own (`make test-vllm` makes it). The reference is the
same server computing the same number of tokens.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks._daemon import running_daemon
from benchmarks._figure import Figure, Options, main
from benchmarks._vllm import Server, make_model, transfer_config

MIB = 1 << 20
PROMPT_TOKENS = 2000
DRAM_BYTES = 1024 * MIB


def fresh_prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(250) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def measure(options: Options) -> Iterator[Figure]:
    prompts = options.repeats(20, 6)
    with tempfile.TemporaryDirectory() as name, running_daemon(DRAM_BYTES, 64 * MIB) as node:
        directory = Path(name)
        make_model(directory / "model")
        transfer = f"--kv-transfer-config={json.dumps(transfer_config(node.socket_path))}"
        with Server(directory / "server", directory / "model", transfer) as server:
            kept = fresh_prompts(prompts, 1)
            _first_tokens(server, kept)
            server.kill()
            server.start()
            _first_tokens(server, fresh_prompts(2, 2))  # imports and memory of its first steps
            warm, computed = _alternating(server, kept, fresh_prompts(prompts, 3))
        yield Figure(
            "ttft_after_restart_2000_tokens",
            1000 * warm,
            "ms",
            "the same server computing as many tokens",
            1000 * computed,
            prompts,
            at_most=0.2,
        )
        with (
            Server(directory / "with", directory / "model", transfer) as ours,
            Server(directory / "without", directory / "model") as plain,
        ):
            for server in (ours, plain):
                _first_tokens(server, fresh_prompts(2, 4))
            cost: list[list[float]] = [[], []]
            for number in range(prompts):
                for server, times in zip((ours, plain), cost, strict=True):
                    times += _first_tokens(server, fresh_prompts(1, 100 + number))
        yield Figure(
            "ttft_nothing_hits_2000_tokens",
            1000 * statistics.median(cost[0]),
            "ms",
            "a server without the connector",
            1000 * statistics.median(cost[1]),
            prompts,
            at_most=1.03,
        )


def _first_tokens(server: Server, prompts: Sequence[Sequence[int]]) -> list[float]:
    return [server.first_token_seconds(prompt) for prompt in prompts]


def _alternating(
    server: Server, kept: Sequence[Sequence[int]], fresh: Sequence[Sequence[int]]
) -> tuple[float, float]:
    """Median seconds of prompts that the store has, and of prompts that nobody has."""
    warm, computed = [], []
    for known, unknown in zip(kept, fresh, strict=True):
        warm += _first_tokens(server, [known])
        computed += _first_tokens(server, [unknown])
    return statistics.median(warm), statistics.median(computed)


if __name__ == "__main__":
    main("vllm_engine", lambda options: list(measure(options)))
