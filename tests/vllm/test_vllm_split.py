"""Two vLLM servers, one that prefills and one that answers; a router that makes their tokens."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks._vllm import PAGE_TOKENS, Server
from router.engine_client import Fetched
from router.local_tokenizer import LocalTokenizer, NotRenderedError
from router.request_body import RequestBody, parse_body
from router.tokenize import Ask, NoTokens, TokenIds, read_answer, read_prompt
from tests.helpers.vllm_prompts import Body, varied_bodies, write_tokenizer
from tests.helpers.vllm_site import Completion, VllmSite, metric

pytestmark = pytest.mark.timeout(1800)
PROMPT_TOKENS = 1000
FULL_TOKENS = (PROMPT_TOKENS - 1) // PAGE_TOKENS * PAGE_TOKENS
BODIES = 200


@pytest.fixture(scope="module")
def tokenizing(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a tokenizer and a template that have something to differ about."""
    directory = tmp_path_factory.mktemp("tokenizing") / "model"
    write_tokenizer(model, directory)
    return directory


@pytest.fixture(scope="module")
def site(tokenizing: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmSite]:
    router = {
        "router.remote_prefill_tokens": 64,
        "router.remote_prefill_factor": 1e6,
        # A busy machine is not to turn a handover into none.
        "router.handover_seconds": 30.0,
        "router.handover_patience_seconds": 30.0,
        "router.health_interval_seconds": 0.2,
        "router.tokenizers": json.dumps({"tiny": str(tokenizing)}),
    }
    site = VllmSite(
        tmp_path_factory.mktemp("site"),
        tokenizing,
        "--enable-auto-tool-choice",
        "--tool-call-parser=hermes",
        roles=("prefill", "decode"),
        router=router,
        connector={"handover_seconds": 4.0},
    )
    # Small steps: blocks are saved while the prompt is computed.
    site.servers[0].add("--max-num-batched-tokens=64")
    site.servers[0].add("--max-num-seqs=16")
    with site:
        yield site


def prompt(seed: int, tokens: int = PROMPT_TOKENS) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(250) for _ in range(tokens)]


def right(site: VllmSite, tokens: list[int]) -> list[int]:
    """What an engine says that computes all itself: nobody else uses this salt."""
    answer = site.complete(site.servers[1].url, tokens, cache_salt=f"alone-{next(_numbers)}")
    assert answer.cached == 0
    return answer.tokens


def prefilled(site: VllmSite, tokens: list[int]) -> dict[str, Any]:
    """As a proxy does it: what the prefill engine says of the prompt's blocks."""
    answer = site.complete(
        site.servers[0].url,
        tokens,
        max_tokens=1,
        kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False},
    )
    params: dict[str, Any] = answer.body["kv_transfer_params"]
    return params


def decoded(site: VllmSite, tokens: list[int], params: dict[str, Any]) -> Completion:
    return site.complete(site.servers[1].url, tokens, kv_transfer_params=params)


def pulled_blocks(site: VllmSite) -> float:
    """By the decode engine's daemon."""
    return site.daemons[1].metrics()["emberkv_store_pulled_blocks_total"]


def counted(site: VllmSite, name: str) -> float:
    """By the decode engine's connector."""
    return metric(site.servers[1].url, f"vllm:emberkv_{name}_total")


_numbers = itertools.count()


# ---- tokens ----


def test_the_router_s_tokens_are_vllm_s(site: VllmSite, tokenizing: Path) -> None:
    """Ids of the router by the engine's /tokenize and by its own tokenizer, against those that
    the engine computes."""
    server, local = site.servers[1], LocalTokenizer(tokenizing)
    empty = Body("empty text", "/v1/completions", {"prompt": ""})
    bodies = [*varied_bodies(BODIES, seed=7), empty]
    with ThreadPoolExecutor(8) as threads:
        wanted = list(threads.map(lambda body: _computed(server, body), bodies))
        asked = list(threads.map(lambda body: _by_engine(server, body), bodies))
    wrong, made = [], Counter[str]()
    for body, right_ids, engine_ids in zip(bodies, wanted, asked, strict=True):
        if not np.array_equal(engine_ids, right_ids):
            wrong.append(("/tokenize", body))
        try:
            own = local.ids(_parsed(body))
        except NotRenderedError:
            made["left to the engine"] += 1
            continue
        made["by itself"] += 1
        if not np.array_equal(own, right_ids):
            wrong.append(("own tokenizer", body))
    assert not wrong, f"{len(wrong)} differ, the first: {wrong[0]}"
    assert made["by itself"] >= BODIES // 2, made
    local.check_integrity()


def test_hits_are_as_the_router_predicted(site: VllmSite) -> None:
    """Chats by their text, tokens made by the router; both counts are among its metrics."""
    site.settle()
    names = ("compared_hit_tokens_total", "delivered_hit_tokens_total", "local_tokens_total")
    labels = ("", '{source="all"}', '{outcome="different"}')
    before = [site.metric(n, label) for n, label in zip(names, labels, strict=True)]
    talk = [{"role": "system", "content": "You tend a fire. " * 12}]
    delivered = 0
    for turn in range(4):
        talk.append({"role": "user", "content": f"{turn}: what do the embers say? " * 3})
        answer = site.ask(f"{site.router_url}/v1/chat/completions", {"messages": talk})
        assert answer.cached == answer.predicted, f"turn {turn}"
        delivered += answer.cached
        talk.append({"role": "assistant", "content": "They say nothing. " * 4})
        site.settle()
    assert delivered > 300
    after = [site.metric(n, label) for n, label in zip(names, labels, strict=True)]
    assert [a - b for a, b in zip(after, before, strict=True)] == [delivered, delivered, 0]


def _parsed(body: Body) -> RequestBody:
    return parse_body(json.dumps({"model": "tiny", **body.fields}).encode())


def _computed(server: Server, body: Body) -> TokenIds:
    """The prompt that the engine says it has computed."""
    if not body.fields.get("prompt", "some"):  # to which it makes tokens, and no answer
        return np.array(server.post("/tokenize", {"prompt": ""})["tokens"], np.uint32)
    fields = {"model": "tiny", "max_tokens": 1, "return_token_ids": True, **body.fields}
    answer = server.post(body.path, fields)
    ids = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
    return np.array(ids, np.uint32)


def _by_engine(server: Server, body: Body) -> TokenIds | NoTokens:
    read = read_prompt(_parsed(body))
    if isinstance(read, Ask):
        answer = json.dumps(server.post("/tokenize", json.loads(read.body)))
        return read_answer(Fetched(200, answer.encode()))
    return read


# ---- prefill here, decode there ----


def test_a_prompt_goes_by_the_router_from_prefill_to_decode(site: VllmSite) -> None:
    for seed in (1, 2):
        asked = prompt(seed)
        answer = site.complete(site.router_url, asked)
        assert answer.engine == "vllm-1"
        assert answer.tokens == right(site, asked)
        assert (answer.cached, answer.predicted) == (FULL_TOKENS, FULL_TOKENS)
    assert site.metric("remote_prefills_total", '{outcome="done"}') >= 2
    during = site.metric("handover_blocks_total", '{when="during"}')
    after = site.metric("handover_blocks_total", '{when="after"}')
    assert during + after >= 2 * FULL_TOKENS // PAGE_TOKENS
    # The next turn hits at home.
    talk = [*asked, *answer.tokens, *prompt(3, 40)]
    following = site.complete(site.router_url, talk)
    assert following.cached >= PROMPT_TOKENS // PAGE_TOKENS * PAGE_TOKENS


def test_a_proxy_hands_a_prompt_on_by_kv_transfer_params(site: VllmSite) -> None:
    for attempt in range(5):
        asked = prompt(20 + attempt)
        params = prefilled(site, asked)
        assert (params["remote_node_id"], params["remote_blocks"]) == (
            "node-0",
            PROMPT_TOKENS // PAGE_TOKENS,
        )
        loaded, late = counted(site, "loaded_blocks"), counted(site, "late_handovers")
        answer = site.complete(site.servers[1].url, asked, kv_transfer_params=params)
        assert answer.tokens == right(site, asked)
        if counted(site, "late_handovers") == late:  # else: a machine that stood still
            assert counted(site, "loaded_blocks") - loaded == FULL_TOKENS // PAGE_TOKENS
            return
    raise AssertionError("no block came in time in five attempts")


def test_whatever_a_client_makes_up_is_computed(site: VllmSite) -> None:
    for params in (
        {"do_remote_prefill": True, "remote_node_id": "nobody", "remote_blocks": 1 << 40},
        {"do_remote_prefill": True, "remote_node_id": 7, "remote_blocks": []},
        {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [1]},
    ):
        asked = prompt(30)
        answer = site.complete(
            site.servers[1].url, asked, kv_transfer_params=params, cache_salt=str(params)
        )
        assert answer.tokens == right(site, asked)


def test_whoever_dies_while_blocks_travel_the_answer_is_the_same(site: VllmSite) -> None:
    node, engine = site.daemons[0], site.servers[0]
    asked = prompt(40)
    wanted = right(site, asked)

    # The prefill node's daemon ends itself in the middle of what it sends.
    node.kill()
    node.faults = "peer_serve=exit@3"
    node.start()
    site.await_ready()
    site.settle()
    for attempt in range(20):  # what was dead is asked again only after a while
        answer = site.complete(site.router_url, asked)
        assert answer.tokens == wanted
        if not node.is_running:
            break
        asked = prompt(100 + attempt)
        wanted = right(site, asked)
    else:
        raise AssertionError("nothing travelled")
    node.kill()

    # The prefill engine dies when it has answered and most of its blocks are not saved.
    node.faults = "before_commit=delay:0.5"
    node.start()
    site.await_ready()
    site.settle()
    for attempt in range(20):  # an engine saves again only when it has found its daemon again
        tokens = prompt(200 + attempt)
        wanted_now = right(site, tokens)
        params = prefilled(site, tokens)
        before, late = pulled_blocks(site), counted(site, "late_handovers")
        with ThreadPoolExecutor(1) as thread:
            asking = thread.submit(decoded, site, tokens, params)
            while not asking.done() and pulled_blocks(site) == before:
                time.sleep(0.02)
            was_cut = not asking.done()
            if was_cut:
                engine.kill()
            assert asking.result(120).tokens == wanted_now
        if was_cut:
            break
    else:
        raise AssertionError("nothing travelled")
    came = pulled_blocks(site) - before
    assert came == params["remote_blocks"] or counted(site, "late_handovers") > late
