"""A campaign: few blocks, many requests, aborts, and a store that fails in every way meanwhile."""

from __future__ import annotations

import random
import time

from tests.helpers.fake_store import FakeStore
from tests.helpers.torch_engines import (
    Listener,
    Said,
    running_engine,
    tiny_config,
    uncached_answers,
)

ROUNDS = 12
ANSWER = 12


def misbehave(store: FakeStore, rng: random.Random) -> None:
    store.is_dead = rng.random() < 0.2
    store.dies_before_heartbeat = rng.random() < 0.3
    store.hang_seconds = rng.choice([0.0, 0.0, 0.002, 0.03])
    store.corrupt = {block for block in store.blocks if rng.random() < 0.1}


def test_no_fault_of_the_store_and_no_pressure_changes_a_token() -> None:
    rng = random.Random(5)
    roots = [[rng.randrange(512) for _ in range(48)] for _ in range(2)]
    prompts = [
        rng.choice(roots)[: rng.randrange(49)] + [rng.randrange(512) for _ in range(5)]
        for _ in range(16)
    ]
    expected = uncached_answers(prompts, ANSWER)
    cfg = tiny_config(
        num_blocks=26,
        max_batch_tokens=12,
        load_patience_seconds=0.01,
        store_timeout_seconds=0.1,
        save_queue_blocks=12,
    )
    store = FakeStore(cfg.namespace("x").part_bytes(0))
    seen: set[str] = set()
    for _ in range(2):
        with running_engine(cfg, store) as engine:
            for _ in range(ROUNDS):
                misbehave(store, rng)
                asked = [(number, Listener()) for number in rng.sample(range(16), 6)]
                ids = [
                    engine.submit(prompts[number], ANSWER, b"", listener.events.put)
                    for number, listener in asked
                ]
                time.sleep(rng.random() * 0.02)
                dropped = rng.randrange(6)
                engine.abort(ids[dropped])
                for place, (number, listener) in enumerate(asked):
                    if place != dropped:
                        assert listener.answer().tokens == expected[number]
                partial = []
                while not asked[dropped][1].events.empty():
                    event = asked[dropped][1].next()
                    assert isinstance(event, Said)
                    partial.append(event.token)
                assert tuple(partial) == expected[asked[dropped][0]][: len(partial)]
            seen |= {event for event in ("loaded_blocks", "corrupt_blocks") if engine.count(event)}
            seen |= {"broken"} if engine.count("load_broken") else set()
            seen |= {"given up"} if engine.count("load_given_up") else set()
            seen |= {"preempted"} if engine.count("preempted") else set()
    wanted = {"loaded_blocks", "corrupt_blocks", "broken", "given up", "preempted"}
    assert wanted <= seen, f"the campaign never met {wanted - seen}"
