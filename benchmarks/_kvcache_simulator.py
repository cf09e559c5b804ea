"""Our simulator beside `kvcache-simulator` (KVCache.AI, Apache-2.0), which shares no code with it.

Both replay the same chains into as many blocks. The answers must agree for LRU and Belady's MIN
(leaves first in both) and for plain FIFO: then our other policies were measured rightly, too.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks._figure import Figure
from benchmarks._traces import Trace

BLOCK_TOKENS = 512
MODEL = ("--model", "deepseek-r1", "--kv-precision", "fp8_int8")
GIB = 1 << 30
BLOCK_BYTES = BLOCK_TOKENS * 35_136
"""Of that model, as the tool reckons it."""
TIMEOUT_SECONDS = 600.0
OUR_NAMES = {"fifo": "fifo", "lru": "lru", "optimal": "hindsight"}
SHARE = 0.001
"""Part by which the two may differ: both count the same blocks, so by rounding alone."""


def fifo_hit_rate(trace: Trace, capacity: int) -> float:
    """Percent of hits where the oldest block goes first, whether or not blocks follow it."""
    half = len(trace.requests) // 2
    held: set[int] = set()
    order: deque[int] = deque()
    hits = asked = 0
    for number, request in enumerate(trace.requests):
        run = next((i for i, b in enumerate(request.chain) if b not in held), len(request.chain))
        if number >= half:
            hits += run
            asked += len(request.chain)
        for block in request.chain:
            if block not in held:
                if len(held) == capacity:
                    held.remove(order.popleft())
                held.add(block)
                order.append(block)
    return 100 * hits / asked


def peer_hit_rates(
    executable: Path, trace: Trace, sizes: Sequence[int]
) -> dict[int, dict[str, float]]:
    """Percent of hits by blocks of capacity, then by "fifo", "lru" and "optimal".

    A size that the trace does not fill before its second half is left out, as the tool does.

    Raises:
        RuntimeError: the tool failed; its own words are in the message.
    """
    budgets = ",".join(repr((size + 0.5) * BLOCK_BYTES / GIB) for size in sizes)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.jsonl"
        with path.open("w") as lines:
            for request in trace.requests:
                tokens = BLOCK_TOKENS * len(request.chain)
                row = {"hash_ids": request.chain, "input_length": tokens}
                lines.write(json.dumps({**row, "block_size": BLOCK_TOKENS}) + "\n")
        options = ["--budgets-gib", budgets, "--backend", "python", "--jobs", "1"]
        options += ["--no-progress", "--format", "json"]
        done = subprocess.run(
            [
                executable,
                "run",
                "--trace",
                path,
                *MODEL,
                *options,
                "--no-progress",
                "--format=json",
            ],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"kvcache-simulator failed: {done.stderr.strip()}")
    points: list[dict[str, Any]] = json.loads(done.stdout)["points"]
    return {
        point["cacheBlocks"]: {
            name: 100 * result["hitRate"] for name, result in point["results"].items()
        }
        for point in points
    }


def checks(
    executable: Path,
    trace: Trace,
    sizes: Sequence[int],
    ours: Callable[[str, int], float],
) -> Iterator[Figure]:
    """Our hit rate over the tool's, for each size and each of FIFO, LRU and Belady's MIN.

    Args:
        ours: our hit rate in percent by name ("fifo", "lru", "hindsight") and blocks.
    """
    for capacity, rates in peer_hit_rates(executable, trace, sizes).items():
        for name, rate in rates.items():
            yield Figure(
                f"check_{trace.name}_{capacity}_blocks_{OUR_NAMES[name]}",
                round(ours(OUR_NAMES[name], capacity), 2),
                "%",
                "kvcache-simulator 0.1.3",
                round(rate, 2),
                1,
                at_least=1 - SHARE,
                at_most=1 + SHARE,
            )
