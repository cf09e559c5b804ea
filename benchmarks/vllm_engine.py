"""A real vLLM server: time to first token after a restart, and what the connector costs.

vLLM runs on the CPU in an environment of its own (`make test-vllm` makes it). The reference is the
same server computing the same number of tokens; for the cost, a server without a connector beside
it. These two take turns, each begins every other time, and each turn counts until all its processes
are quiet again, saves included. Wall time is what a client sees and CPU time what it takes: where
cores are few or busy, only the second means something. Throughput is of prompts sent at once, from
the first byte sent to the last answer.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks._daemon import running_daemon
from benchmarks._figure import Figure, Options, main
from benchmarks._process_costs import await_quiet, costs, cpu_seconds
from benchmarks._vllm import Server, make_model, side_by_side, transfer_config

MIB = 1 << 20
PROMPT_TOKENS = 2000
AT_ONCE = 4
"""Half of what the servers' caches hold: nobody waits for pages."""
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
        ours = Server(directory / "with", directory / "model", transfer)
        plain = Server(directory / "without", directory / "model")
        with side_by_side(ours, plain):
            yield from _cost(ours, plain, options.repeats(60, 16))
            yield _throughput(ours, plain, options.repeats(40, 8))


@dataclass(frozen=True, slots=True)
class _Turn:
    """What one prompt of which nothing hits cost a server."""

    first_token_seconds: float
    cpu_seconds: float


def _cost(ours: Server, plain: Server, turns: int) -> Iterator[Figure]:
    servers = (ours, plain)
    for server in servers:
        _first_tokens(server, fresh_prompts(3, 4))  # imports and memory of its first steps
        await_quiet(server.process.pid)
    taken: list[list[_Turn]] = [[], []]
    for turn in range(turns):
        for place in range(2):
            number = (turn + place) % 2
            (prompt,) = fresh_prompts(1, 100 + 2 * turn + place)
            taken[number].append(_turn(servers[number], prompt))
    for name, unit, scale, of in (
        ("ttft_nothing_hits_2000_tokens", "ms", 1e3, lambda turn: turn.first_token_seconds),
        ("cpu_nothing_hits_2000_tokens", "CPU ms", 1e3, lambda turn: turn.cpu_seconds),
    ):
        medians = [scale * statistics.median(map(of, rows)) for rows in taken]
        yield Figure(name, medians[0], unit, "a server without it", medians[1], turns, at_most=1.03)
    for half, process in (("scheduler", "VLLM::EngineCor"), ("worker", "VLLM::Worker")):
        ours_mib, plain_mib = (_own_mib(server, process) for server in servers)
        yield Figure(
            f"memory_{half}_half",
            ours_mib,
            "MiB",
            "the same process of a server without it",
            plain_mib,
            turns,
        )


def _throughput(ours: Server, plain: Server, turns: int) -> Figure:
    """Of `AT_ONCE` prompts sent together, of which nothing hits; median of the turns."""
    servers = (ours, plain)
    taken: list[list[float]] = [[], []]
    with ThreadPoolExecutor(AT_ONCE) as clients:
        for turn in range(-1, turns):  # the first only wakes what larger batches use
            for place in range(2):
                number = (turn + place) % 2
                prompts = fresh_prompts(AT_ONCE, 10_000 + 2 * turn + place)
                began = time.perf_counter()
                list(clients.map(servers[number].first_token_seconds, prompts))
                if turn >= 0:
                    taken[number].append(time.perf_counter() - began)
                await_quiet(servers[number].process.pid)
    rates = [AT_ONCE * PROMPT_TOKENS / statistics.median(seconds) for seconds in taken]
    return Figure(
        f"prefill_throughput_nothing_hits_{AT_ONCE}_at_once",
        rates[0],
        "tokens/s",
        "a server without it",
        rates[1],
        turns,
        at_least=0.97,
    )


def _turn(server: Server, prompt: Sequence[int]) -> _Turn:
    before = cpu_seconds(server.process.pid)
    seconds = server.first_token_seconds(prompt)
    await_quiet(server.process.pid)
    return _Turn(seconds, cpu_seconds(server.process.pid) - before)


def _own_mib(server: Server, process: str) -> float:
    """Of the server's processes of this name; Linux keeps 15 characters of a name."""
    found = [cost for cost in costs(server.process.pid) if cost.name == process]
    assert found, f"{process} is none of {costs(server.process.pid)}"
    return sum(cost.own_bytes for cost in found) / MIB


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
