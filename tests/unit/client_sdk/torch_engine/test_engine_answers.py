"""Greedy answers are the same, token for token, whatever the engine does with the KV."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest

from client_sdk.engine.torch_engine.config import EngineSection
from client_sdk.engine.torch_engine.model import TinyTransformer
from emberkv_proto.hashing import block_hashes, salt_id
from emberkv_proto.types import BlockHash, Source
from tests.helpers.fake_store import FakeStore
from tests.helpers.torch_engines import (
    EngineThread,
    Failed,
    Listener,
    Said,
    ask,
    running_engine,
    tiny_config,
    uncached_answers,
)

ANSWER = 9


def some_prompts(seed: int, count: int = 6) -> list[list[int]]:
    """Prompts of every length class, most of them sharing a prefix."""
    rng = random.Random(seed)
    shared = [rng.randrange(512) for _ in range(60)]
    return [
        shared[: rng.randrange(0, 60)] + [rng.randrange(512) for _ in range(rng.randrange(1, 20))]
        for _ in range(count)
    ]


def make_store(cfg: EngineSection) -> FakeStore:
    return FakeStore(cfg.namespace("x").part_bytes(0))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in 30 s"
        time.sleep(0.002)


@pytest.mark.parametrize("budget", [1, 7, 64])
def test_chunking_batching_and_prefix_cache_change_no_token(budget: int) -> None:
    prompts = some_prompts(budget)
    expected = uncached_answers(prompts, ANSWER)
    with running_engine(tiny_config(max_batch_tokens=budget)) as engine:
        assert [heard.tokens for heard in ask(engine, prompts, ANSWER)] == expected
        again = ask(engine, prompts, ANSWER)
    assert [heard.tokens for heard in again] == expected
    assert sum(heard.cached_tokens for heard in again) > 0
    assert len(set(expected)) == len(expected), "the model says the same whatever it is asked"


def test_preemption_changes_no_token() -> None:
    prompts = some_prompts(11, 8)
    expected = uncached_answers(prompts, 30)
    with running_engine(tiny_config(num_blocks=30, max_batch_tokens=16)) as engine:
        assert [heard.tokens for heard in ask(engine, prompts, 30)] == expected
        assert engine.count("preempted") > 0


def test_a_preempted_request_gets_its_blocks_back_from_the_store() -> None:
    cfg = tiny_config(num_blocks=24, prefix_cache=False)
    store = make_store(cfg)
    prompts = [[n, *range(40)] for n in range(2)]
    expected = uncached_answers(prompts, 30)
    with running_engine(cfg, store) as engine:
        heard = ask(engine, prompts, 30)
        assert engine.count("preempted") > 0
        assert engine.count("loaded_blocks") > 0
    assert [one.tokens for one in heard] == expected
    assert [one.cached for one in heard] == [{}, {}], "a resumption is no prompt hit"


def test_a_new_engine_loads_what_the_old_one_saved() -> None:
    cfg, prompts = tiny_config(), some_prompts(2)
    store = make_store(cfg)
    expected = uncached_answers(prompts, ANSWER)
    with running_engine(cfg, store) as engine:
        assert [heard.tokens for heard in ask(engine, prompts, ANSWER)] == expected
    store.source = Source.SSD
    with running_engine(cfg, store) as engine:
        for prompt, tokens in zip(prompts, expected, strict=True):
            heard = ask(engine, [prompt], ANSWER)[0]
            assert heard.tokens == tokens
            full = (len(prompt) - 1) // cfg.block_tokens * cfg.block_tokens
            assert heard.cached_tokens == full
            assert set(heard.cached) <= {Source.HBM, Source.SSD}
    assert store.announced[0].engine_id == cfg.engine_id
    assert store.announced[0].url == "http://127.0.0.1:1"


def test_saved_chains_name_their_parents_and_hold_answers_too() -> None:
    cfg = tiny_config(max_batch_tokens=5)
    store = make_store(cfg)
    with running_engine(cfg, store) as engine:
        answer = ask(engine, [list(range(10))], ANSWER)[0].tokens
        tokens = [*range(10), *answer]
        chain = block_hashes(engine.engine.namespace.id, tokens[:-1], cfg.block_tokens)
    assert set(store.blocks) == set(chain)
    parents: list[BlockHash | None] = [None, *chain[:-1]]
    assert [store.parents[block] for block in chain] == parents


def test_a_corrupt_block_and_all_after_it_are_recomputed() -> None:
    cfg, prompt = tiny_config(), list(range(41))
    store = make_store(cfg)
    with running_engine(cfg, store) as engine:
        expected = ask(engine, [prompt], ANSWER)[0].tokens
    chain = list(store.parents)
    store.corrupt.add(chain[3])
    with running_engine(cfg, store) as engine:
        heard = ask(engine, [prompt], ANSWER)[0]
        assert engine.count("corrupt_blocks") == 1
    assert heard.tokens == expected
    assert heard.cached == {Source.DRAM: 3 * cfg.block_tokens}


def test_wrong_bytes_would_show() -> None:
    """The comparison of answers means something: KV of another prompt gives another answer."""
    cfg, prompt = tiny_config(), list(range(41))
    store = make_store(cfg)
    with running_engine(cfg, store) as engine:
        expected = ask(engine, [prompt], ANSWER)[0].tokens
    store.blocks[next(iter(store.parents))] = next(reversed(store.blocks.values()))
    with running_engine(cfg, store) as engine:
        assert ask(engine, [prompt], ANSWER)[0].tokens != expected


def test_a_daemon_that_dies_under_the_copy_costs_the_step_and_no_token() -> None:
    cfg, prompt = tiny_config(store_timeout_seconds=0.3), list(range(41))
    store = make_store(cfg)
    with running_engine(cfg, store) as engine:
        expected = ask(engine, [prompt], ANSWER)[0].tokens
    store.dies_before_heartbeat = True
    with running_engine(cfg, store) as engine:
        heard = ask(engine, [prompt], ANSWER)[0]
        assert engine.count("load_broken") == 1
    assert (heard.tokens, heard.cached) == (expected, {})


def test_a_slow_store_is_not_waited_for_longer_than_recomputing_takes() -> None:
    cfg, prompt = tiny_config(load_patience_seconds=0.05), list(range(41))
    store = make_store(cfg)
    with running_engine(cfg, store) as engine:
        expected = ask(engine, [prompt], ANSWER)[0].tokens
    store.hang_seconds = 5.0
    with running_engine(cfg, store) as engine:
        began = time.monotonic()
        heard = ask(engine, [prompt], ANSWER)[0]
        assert time.monotonic() - began < 4.5
        assert engine.count("load_given_up") == 1
    assert (heard.tokens, heard.cached) == (expected, {})


def test_a_dead_store_costs_nothing_but_the_hits() -> None:
    cfg, prompts = tiny_config(), some_prompts(5)
    store = make_store(cfg)
    store.is_dead = True
    with running_engine(cfg, store) as engine:
        heard = ask(engine, prompts, ANSWER)
        assert engine.count("load_UnavailableError") > 0
        until(lambda: engine.count("save_UnavailableError") > 0)
    assert [one.tokens for one in heard] == uncached_answers(prompts, ANSWER)
    assert not store.blocks


def test_a_full_save_queue_skips_and_counts_but_never_waits() -> None:
    cfg = tiny_config(save_queue_blocks=4)
    store = make_store(cfg)
    store.save_gate = threading.Event()
    prompts = [[n, *range(30)] for n in range(4)]
    with running_engine(cfg, store) as engine:
        heard = ask(engine, prompts, ANSWER)
        assert engine.count("save_queue_full") > 0
        store.save_gate.set()
    assert [one.tokens for one in heard] == uncached_answers(prompts, ANSWER)


def test_blocks_under_save_are_not_given_to_others_before_they_are_copied() -> None:
    cfg = tiny_config(num_blocks=16, prefix_cache=False)
    store = make_store(cfg)
    store.save_gate = threading.Event()
    with running_engine(cfg, store) as engine:
        ask(engine, [list(range(20))], 1)
        until(lambda: engine.scheduler.pool.free_blocks == 16 - 5)
        ask(engine, [[9, *range(30)]], 1)  # would overwrite them if they were free
        store.save_gate.set()
        until(lambda: engine.scheduler.pool.free_blocks == 16)
    with running_engine(cfg, store) as engine:
        heard = ask(engine, [list(range(20))], ANSWER)[0]
    assert heard.cached == {Source.DRAM: 16}
    assert (heard.tokens,) == tuple(uncached_answers([list(range(20))], ANSWER))


@pytest.mark.parametrize("state", ["waiting", "loading", "prefilling", "answering"])
def test_an_abort_frees_the_blocks_at_once_in_every_state(state: str) -> None:
    cfg = tiny_config(max_running=1, max_batch_tokens=1, load_patience_seconds=5.0)
    store = make_store(cfg)
    with running_engine(cfg, store) as engine:
        if state == "loading":
            store.hang_seconds = 0.5
        blocker = Listener()
        if state == "waiting":
            blocker_id = engine.submit([1] * 9, 200, b"", blocker.events.put)
            blocker.next()
        listener = Listener()
        request_id = engine.submit(list(range(150)), 50, b"", listener.events.put)
        reached = {
            "waiting": lambda: bool(engine.scheduler.waiting),
            "loading": lambda: any(r.computed == 0 for r in engine.scheduler.active),
            "prefilling": lambda: any(r.computed > 20 for r in engine.scheduler.active),
            "answering": lambda: any(r.generated > 3 for r in engine.scheduler.active),
        }
        until(reached[state])
        engine.abort(request_id)
        if state == "waiting":
            until(lambda: not engine.scheduler.waiting)
            engine.abort(blocker_id)
        until(lambda: engine.is_idle and engine.scheduler.pool.free_blocks == cfg.num_blocks)
        engine.abort(request_id)  # a second one is of no consequence
        ask(engine, [[1, 2, 3]], 1)


def test_salts_separate_tenants_in_cache_and_store() -> None:
    cfg, prompt = tiny_config(), list(range(30))
    store = make_store(cfg)
    with running_engine(cfg, store) as engine:
        mine = ask(engine, [prompt], ANSWER, b"me")[0]
        assert ask(engine, [prompt], ANSWER, b"you")[0].cached == {}
        assert ask(engine, [prompt], ANSWER, b"me")[0].cached == {Source.HBM: 28}
    with running_engine(cfg, store) as engine:
        assert ask(engine, [prompt], ANSWER, b"them")[0].cached == {}
        again = ask(engine, [prompt], ANSWER, b"me")[0]
    assert again.cached == {Source.DRAM: 28}
    assert again.tokens == mine.tokens
    assert set(store.salt_ids) == {salt_id(b"me"), salt_id(b"you"), salt_id(b"them")}


def test_other_weights_and_sizes_are_other_namespaces() -> None:
    def namespace_of(cfg: EngineSection) -> bytes:
        return cfg.namespace(TinyTransformer(cfg).weights_id).id

    changes: list[dict[str, int]] = [{}, {"seed": 1}, {"layers": 3}, {"block_tokens": 8}]
    assert len({namespace_of(tiny_config(**change)) for change in changes}) == len(changes)
    assert namespace_of(tiny_config()) == namespace_of(tiny_config())


def test_a_request_may_fill_the_whole_pool_and_ends_there() -> None:
    cfg = tiny_config(num_blocks=8)
    with running_engine(cfg) as engine:
        heard = ask(engine, [list(range(20))], 1000)[0]
    assert len(heard.tokens) == 8 * cfg.block_tokens - 20


def test_requests_under_way_hear_of_the_shutdown() -> None:
    engine = EngineThread(tiny_config())
    engine.start()
    listener = Listener()
    engine.submit([1, 2, 3], 200, b"", listener.events.put)
    assert isinstance(listener.next(), Said)
    engine.close()
    events = []
    while not listener.events.empty():
        events.append(listener.next())
    assert isinstance(events[-1], Failed)


def test_a_step_that_fails_ends_its_requests_and_not_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running_engine(tiny_config()) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine.engine.model, "forward", lambda *_: 1 / 0)
            listener = Listener()
            engine.submit([1, 2, 3], 5, b"", listener.events.put)
            assert isinstance(listener.next(), Failed)
        assert len(ask(engine, [[1, 2, 3]], 5)[0].tokens) == 5
        until(lambda: engine.scheduler.pool.free_blocks == 64)


def test_a_loop_that_breaks_ends_the_requests_and_refuses_new_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = EngineThread(tiny_config())
    monkeypatch.setattr(engine.scheduler, "plan", lambda: 1 / 0)
    engine.start()
    listener, late = Listener(), Listener()
    engine.submit([1, 2, 3], 5, b"", listener.events.put)
    assert isinstance(listener.next(), Failed)
    until(lambda: not engine.engine.is_alive)
    engine.submit([1, 2, 3], 5, b"", late.events.put)
    assert isinstance(late.next(), Failed)
    engine.close()
