"""Admission, chunking, preemption and ends, without tensors or threads."""

from __future__ import annotations

import random

import pytest

from client_sdk.engine.torch_engine.scheduler import Request, Scheduler
from emberkv_proto.hashing import block_hashes
from emberkv_proto.types import NamespaceId, Source
from tests.helpers.torch_engines import tiny_config

NAMESPACE = NamespaceId(b"n" * 16)
BLOCK = 4


class Bench:
    """A scheduler whose model says token 7, and whose victims are recorded."""

    def __init__(self, num_blocks: int, *, budget: int = 64, max_running: int = 8) -> None:
        self.victims: list[tuple[str, int]] = []
        self.scheduler = Scheduler(
            tiny_config(num_blocks=num_blocks, max_batch_tokens=budget, max_running=max_running),
            NAMESPACE,
            before_preempt=lambda r: self.victims.append((self.names[r], len(r.blocks))),
        )
        self.names: dict[Request, str] = {}

    def submit(self, name: str, tokens: int, max_tokens: int = 4, first: int = 0) -> Request:
        request = Request(range(first, first + tokens), max_tokens)
        self.names[request] = name
        self.scheduler.submit(request)
        return request

    def admit_all(self) -> list[str]:
        admitted = []
        while (request := self.scheduler.admit()) is not None:
            self.scheduler.resume(request)
            admitted.append(self.names[request])
        return admitted

    def step(self) -> list[tuple[str, int]]:
        """Admit, plan, advance, finish; what was computed."""
        self.admit_all()
        chunks = self.scheduler.plan()
        for chunk in chunks:
            if self.scheduler.advance(chunk, 7) and (
                chunk.request.generated >= chunk.request.max_tokens
            ):
                self.scheduler.finish(chunk.request)
        self.scheduler.check_integrity()
        return [(self.names[chunk.request], len(chunk.tokens)) for chunk in chunks]


def test_a_prompt_is_computed_in_chunks_of_the_budget() -> None:
    bench = Bench(16, budget=6)
    request = bench.submit("a", 14)
    assert [bench.step() for _ in range(4)] == [[("a", 6)], [("a", 6)], [("a", 2)], [("a", 1)]]
    assert request.generated == 2


def test_answers_go_first_and_prompts_share_what_is_left() -> None:
    bench = Bench(32, budget=8)
    bench.submit("a", 3, max_tokens=9)
    bench.step()
    bench.submit("b", 20, first=100)
    assert bench.step() == [("a", 1), ("b", 7)]


def test_hashes_are_those_of_the_contract_over_prompt_and_answer() -> None:
    bench = Bench(16)
    request = bench.submit("a", 6, max_tokens=8)
    for _ in range(7):
        bench.step()
    assert request.hashes == block_hashes(NAMESPACE, request.tokens, BLOCK)


def test_at_least_the_last_token_is_computed() -> None:
    bench = Bench(16)
    bench.submit("a", 8, max_tokens=1)
    bench.step()
    again = bench.submit("b", 8, max_tokens=1)
    assert len(bench.scheduler.loadable(again)) == 1
    assert bench.step() == [("b", 4)]
    assert again.cached[Source.HBM] == 4


def test_a_prefix_hit_shares_the_very_blocks() -> None:
    bench = Bench(16)
    first = bench.submit("a", 9)
    bench.step()
    second = bench.submit("b", 9)
    bench.step()
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] != first.blocks[2]


def test_another_salt_never_hits() -> None:
    bench = Bench(16)
    bench.submit("a", 9)
    bench.step()
    salted = Request(range(9), 4, b"tenant")
    bench.names[salted] = "b"
    bench.scheduler.submit(salted)
    assert bench.step()[1] == ("b", 9)
    assert not salted.cached[Source.HBM]


def test_admission_takes_all_blocks_in_one_step_or_none() -> None:
    bench = Bench(7)
    bench.submit("a", 20)
    second = bench.submit("b", 20, first=100)
    bench.step()
    assert second in bench.scheduler.waiting
    assert not second.blocks
    for _ in range(12):
        bench.step()
    assert second.generated == 4


def test_no_more_run_than_allowed() -> None:
    bench = Bench(64, max_running=2)
    for name in "abc":
        bench.submit(name, 4)
    assert bench.admit_all() == ["a", "b"]


def test_the_last_comer_gives_way_with_its_blocks_still_held() -> None:
    bench = Bench(4)
    first = bench.submit("a", 7, max_tokens=9)
    second = bench.submit("b", 7, max_tokens=9, first=100)
    for _ in range(40):
        bench.step()
    assert bench.victims[0] == ("b", 2)
    assert second.preemptions >= 1
    assert (first.generated, second.generated) == (9, 9)
    assert first.preemptions == 0
    assert bench.scheduler.pool.free_blocks == 4


def test_a_preempted_request_finds_its_blocks_again_if_nobody_took_them() -> None:
    bench = Bench(5)
    bench.submit("a", 7, max_tokens=3)
    second = bench.submit("b", 11, max_tokens=3, first=100)
    for _ in range(3):
        bench.step()
    assert second.preemptions == 1
    assert bench.step() == [("b", 5)]  # 8 of its 13 tokens were still there
    assert second.cached[Source.HBM] == 0, "a resumption is no prompt hit"


def test_a_load_moves_the_boundary_and_its_failure_moves_it_back() -> None:
    bench = Bench(16)
    request = bench.submit("a", 13)
    assert bench.scheduler.admit() is request
    assert bench.scheduler.plan() == [], "a request that still loads is not computed"
    bench.scheduler.resume(request, [Source.DRAM, Source.SSD])
    assert bench.scheduler.plan()[0].tokens == list(range(8, 13))
    bench.scheduler.resume(request)
    assert bench.scheduler.plan()[0].tokens == list(range(13))
    assert sum(request.cached.values()) == 0
    bench.scheduler.check_integrity()


def test_what_was_loaded_is_counted_and_found_but_not_saved_again() -> None:
    bench = Bench(16)
    request = bench.submit("a", 13)
    bench.scheduler.admit()
    bench.scheduler.resume(request, [Source.DRAM, Source.SSD])
    assert bench.scheduler.advance(bench.scheduler.plan()[0], 7)
    assert request.cached == {Source.HBM: 0, Source.DRAM: 4, Source.SSD: 4}
    assert request.saved == 2
    assert bench.scheduler.pool.match(request.hashes) == request.blocks[:3]
    bench.scheduler.check_integrity()


@pytest.mark.parametrize("state", ["waiting", "loading", "running", "finished"])
def test_finishing_frees_the_blocks_in_every_state(state: str) -> None:
    bench = Bench(16)
    request = bench.submit("a", 9)
    if state != "waiting":
        bench.scheduler.admit()
    if state == "running":
        bench.scheduler.resume(request, [Source.DRAM])
    if state == "finished":
        bench.scheduler.finish(request)
    bench.scheduler.finish(request)
    assert bench.scheduler.pool.free_blocks == 16
    assert not request.blocks
    bench.scheduler.check_integrity()


def test_every_request_ends_whatever_the_pressure() -> None:
    rng = random.Random(3)
    bench = Bench(8, budget=5, max_running=4)
    requests = [
        bench.submit(str(n), rng.randrange(1, 20), rng.randrange(1, 12), first=rng.randrange(3))
        for n in range(40)
    ]
    for _ in range(4000):
        if rng.random() < 0.01:
            bench.scheduler.finish(rng.choice(requests))
        bench.step()
        if not bench.scheduler.active and not bench.scheduler.waiting:
            break
    assert not bench.scheduler.active
    assert not bench.scheduler.waiting
    assert bench.scheduler.pool.free_blocks == 8
    assert bench.victims, "the pressure was not enough to mean anything"
