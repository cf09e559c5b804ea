"""Thousands of random histories of a node against the index: `python -m tests.model.index_runs`.

Each run is `unreliable_channel.UnreliableChannel` with a script of its own seed, so a failure is
seen again with `--seed N --runs 1`. Exits 1 when a run fails, and names its seed.
"""

from __future__ import annotations

import argparse
import logging
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from global_index.dict_index import DictIndex
from global_index.index import BlockIndex
from global_index.memory_index import MemoryIndex
from global_index.naive_index import NaiveIndex
from tests.helpers.redis_server import redis_server
from tests.model.redis_channel import WEIGHTED_WITH_REDIS, RedisChannel, redis_runs
from tests.model.unreliable_channel import LENGTHS, WEIGHTED, UnreliableChannel

CAPACITY_BLOCKS = 1024
SHORT = (25, 60)
"""Steps of a run where each waits for Redis."""
MAKERS: dict[str, Callable[[int], BlockIndex]] = {
    "memory": MemoryIndex,
    "dict": DictIndex,
    "naive": NaiveIndex,
}
BACKENDS = (*MAKERS, "redis")
Run = Callable[[int], UnreliableChannel]
"""Plays the history of a seed. Raises AssertionError when the index is not what the oracle says."""


@contextmanager
def runner(backend: str) -> Iterator[Run]:
    """Runs with this backend; for Redis all with one real server."""
    if backend == "redis":
        with redis_server() as server, redis_runs(server) as runs:
            yield lambda seed: _played(RedisChannel(runs, seed), WEIGHTED_WITH_REDIS, seed, SHORT)
    else:
        make = MAKERS[backend]
        yield lambda seed: _played(UnreliableChannel(make(CAPACITY_BLOCKS), seed), WEIGHTED, seed)


def _played(
    channel: UnreliableChannel,
    steps: Sequence[str],
    seed: int,
    lengths: tuple[int, int] = LENGTHS,
) -> UnreliableChannel:
    choose = random.Random(seed)
    channel.run(choose.choices(steps, k=choose.randint(*lengths)))
    return channel


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1, help="of the first run; the others follow")
    parser.add_argument("--backend", choices=BACKENDS, default="memory")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended too
    started, failed, repairs = time.monotonic(), [], 0
    with runner(options.backend) as run:
        for seed in range(options.seed, options.seed + options.runs):
            if seed > options.seed and (seed - options.seed) % 500 == 0:
                print(f"{seed - options.seed} runs, {len(failed)} failed", flush=True)
            try:
                repairs += run(seed).bucket_repairs
            except Exception:
                failed.append(seed)
                traceback.print_exc()
    print(
        f"backend {options.backend}: {options.runs} runs from seed {options.seed},"
        f" {len(failed)} failed, {repairs} bucket repairs, {time.monotonic() - started:.0f} s"
    )
    if failed:
        print(f"failed seeds: {failed}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
