"""The page's files and its state, without a browser: guards, bounds, figures, reasons."""

from __future__ import annotations

import random
import re
from math import inf
from pathlib import Path
from typing import Any

import pytest

from emberkv_proto.types import EngineInfo, NamespaceId, NodeId, Tier, TierDigest
from router.candidates import Asked, Candidate, Preferences, estimate_of, make_policy
from router.scoring import Holding, Load, Speeds
from router.surface import ENDPOINTS
from router.ui.pages import FILES, STATIC
from router.ui.reasons import best_rival, reason_of
from router.ui.recent import SHOWN, Considered, Routed
from router.ui.state import MOST_PREFIXES, MOST_ROWS, MOST_TEXT
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.router_client import (
    Got,
    HandIndex,
    HandNode,
    RunningRouter,
    connected,
    request,
    running_router,
)

NAMESPACE = NamespaceId(bytes(32))
PROMPT = list(range(512))
PATHS = {endpoint.path: FILES[endpoint.work] for endpoint in ENDPOINTS if endpoint.work in FILES}


async def get(router: RunningRouter, path: str, **headers: str) -> Got:
    async with connected(router.port) as client:
        given = {"Host": f"127.0.0.1:{router.port}"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        client.send(f"GET {path} HTTP/1.1\r\n{lines}\r\n".encode())
        return await client.read()


async def state_of(router: RunningRouter) -> Any:
    got = await get(router, "/ui/state")
    assert got.status == 200, got.body
    return got.json


async def ask(router: RunningRouter, prompt: list[int]) -> None:
    got = await request(router.port, "/v1/completions", {"model": "m", "prompt": prompt})
    assert got.status == 200


def node(name: str, engine: FakeEngine) -> HandNode:
    return HandNode(
        NodeId(name),
        engines=(EngineInfo(f"engine-{name}", engine.url, "m", NAMESPACE, 16),),
        tiers=(
            TierDigest(Tier.DRAM, 100, 0, capacity_bytes=1000, used_bytes=250),
            TierDigest(Tier.SSD, 7, 0, capacity_bytes=5000, used_bytes=5000),
        ),
        lag_seconds=0.25,
    )


@pytest.mark.parametrize("path", PATHS)
async def test_the_page_comes_with_a_policy_that_lets_it_ask_nobody_else(path: str) -> None:
    async with running_router() as router:
        got = await get(router, path)
    assert got.status == 200
    assert got.headers["content-type"].encode() == PATHS[path][1]
    policy = got.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert got.headers["x-content-type-options"] == "nosniff"


def test_the_page_names_no_other_host_and_has_no_inline_code() -> None:
    html, css, script = ((STATIC / name).read_text() for name, _ in FILES.values())
    for text in (html, css, script):
        assert not re.search(r"(https?:)?//[a-z0-9]", re.sub(r"(?m)^//.*$|^ *//.*$", "", text))
    assert not re.search(r"<script(?![^>]*\ssrc=)", html)
    assert not re.search(r"\son[a-z]+=|\sstyle=|<style", html)
    assert "innerHTML" not in script
    assert "insertAdjacentHTML" not in script
    assert "prefers-color-scheme: dark" in css
    # Every element that the script looks up by id is in the page.
    ids = set(re.findall(r'id="([a-z-]+)"', html))
    assert set(re.findall(r'\$\("([a-z-]+)"\)', script)) <= ids


async def test_nodes_engines_decisions_and_savings_are_told() -> None:
    async with (
        FakeEngine().serving() as a,
        FakeEngine().serving() as b,
        running_router(index=HandIndex(node("na", a), node("nb", b))) as router,
    ):
        for _ in range(4):
            await ask(router, PROMPT)
        await ask(router, list(range(9000, 9400)))
        await router.settled()
        state = await state_of(router)
    assert state["window"]["requests"] == 5
    assert state["window"]["prompt_tokens"] == 4 * 512 + 400
    assert state["window"]["hit_tokens"]["hbm"] == 3 * 512  # predicted after the first
    (na, nb) = state["nodes"]
    assert [tier["used_bytes"] for tier in na["tiers"]] == [250, 5000]
    assert na["liveness"] == "ok"
    assert na["exactness"] == "exact"
    assert na["lag_seconds"] == 0.25
    assert na["requests"] + nb["requests"] == 5
    assert state["index"] == {
        "nodes_ok": 2,
        "nodes_exact": 2,
        "blocks": 214,
        "worst_lag_seconds": 0.25,
        "dropped_rows": 0,
    }
    assert sum(row["requests"] for row in state["engines"]) == 5
    assert all(row["state"] == "healthy" for row in state["engines"])
    assert [item["prompt_tokens"] for item in state["decisions"]] == [400, 512, 512, 512, 512]
    assert state["decisions"][1]["reason"] == "longest hit"
    assert state["decisions"][1]["rival"]["hit_tokens"] == 0
    assert (
        state["decisions"][-1]["reason"]
        == "no hit anywhere: as quick as the next, fewest requests or chance"
    )
    (prefix,) = state["prefixes"]
    assert prefix["requests"] == 4
    assert prefix["engine_count"] == 1
    assert state["totals"]["answers_by_status"] == {"200": 5}
    assert state["totals"]["delivered_hit_tokens"] == 5 * 8
    # 8 tokens of each prompt, by the engines' word, at the first guess of 5,000 a second.
    assert state["totals"]["saved_prefill_seconds"] == pytest.approx(5 * 8 / 5000)


async def test_without_nodes_engines_or_requests_the_state_is_whole() -> None:
    async with running_router() as router:
        state = await state_of(router)
    assert state["is_ready"] is False
    assert state["nodes"] == state["engines"] == state["decisions"] == state["prefixes"] == []
    assert state["index"]["worst_lag_seconds"] is None
    assert state["window"]["requests"] == 0


async def test_a_node_that_was_never_heard_of_has_no_lag() -> None:
    async with running_router(index=HandIndex(HandNode(NodeId("n"), lag_seconds=inf))) as router:
        state = await state_of(router)
    assert state["nodes"][0]["lag_seconds"] is None
    assert state["index"]["worst_lag_seconds"] is None


def test_texts_stand_out_from_what_is_behind_them_in_both_schemes() -> None:
    css = (STATIC / "style.css").read_text()
    light, dark = (dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", part)) for part in schemes(css))
    assert light.keys() == dark.keys()
    for scheme in (light, dark):
        for text in ("ink", "quiet", "ember", "good", "warn", "bad", "focus"):
            for behind in ("page", "card"):
                assert contrast(scheme[text], scheme[behind]) >= 4.5, (text, behind)
        for piece in ("hbm", "dram", "ssd", "peer", "queue", "fetch", "prefill"):
            assert contrast(scheme[piece], scheme["card"]) >= (1.8 if scheme is light else 3), piece


def schemes(css: str) -> tuple[str, str]:
    first, second = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    return first, second


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(color: str) -> float:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


async def test_the_state_of_a_large_fleet_is_bounded() -> None:
    long = "x" * 5000
    nodes = [
        HandNode(
            NodeId(f"{long}{at}"),
            engines=(EngineInfo(f"{long}{at}", f"http://127.0.0.1:{at + 1}", long, NAMESPACE, 16),),
        )
        for at in range(MOST_ROWS + 50)
    ]
    async with FakeEngine().serving() as a:
        nodes[0] = node("na", a)
        patient = running_router(
            index=HandIndex(*nodes),
            health_interval_seconds=60,
            health_timeout_seconds=40,  # the one engine that lives is probed among all at once
        )
        async with patient as router:
            for at in range(60):
                for _ in range(2):
                    await ask(router, [at, *PROMPT])
            got = await get(router, "/ui/state")
    state = got.json
    assert len(got.body) < 600_000
    assert len(state["nodes"]) == len(state["engines"]) == MOST_ROWS
    assert state["node_count"] == state["engine_count"] == MOST_ROWS + 50
    assert len(state["decisions"]) == SHOWN
    assert len(state["prefixes"]) == MOST_PREFIXES
    assert max(len(row["engine"]) for row in state["engines"]) == MOST_TEXT


async def test_however_many_look_the_state_is_reckoned_twice_a_second_at_most() -> None:
    async with running_router() as router:
        first, second = await state_of(router), await state_of(router)
        assert first == second  # uptime and all


async def test_only_the_own_machine_or_the_token_sees_the_state(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t" * 32)
    token.chmod(0o600)
    async with running_router(operator_token_file=token) as router:
        bearer = f"Bearer {'t' * 32}"
        far = {"X-Forwarded-For": "203.0.113.9"}  # a proxy beside the router speaks for somebody
        for headers, status in (
            ({}, 200),
            ({"Host": f"localhost:{router.port}"}, 200),
            ({"Host": f"[::1]:{router.port}"}, 200),
            (far, 401),
            ({**far, "Authorization": "Bearer " + "f" * 32}, 401),
            ({**far, "Authorization": bearer}, 200),
            ({**far, "Authorization": bearer, "Host": "router.example"}, 200),
            ({"Origin": "http://evil.example"}, 403),
            ({"Origin": "http://evil.example", "Authorization": bearer}, 403),
            # A name of somebody else's that resolves to this machine.
            ({"Host": "evil.example"}, 403),
            ({"Host": "evil.example", "Authorization": "Bearer x"}, 403),
            ({"Host": ""}, 403),
        ):
            got = await get(router, "/ui/state", **headers)
            assert got.status == status, headers
            assert "access-control-allow-origin" not in got.headers
            if status != 200:
                assert set(got.json) == {"error"}, "data without a key"
        for path in PATHS:
            page = await get(router, path, **far)
            assert page.status == 200  # the page itself holds no data


async def test_without_a_token_nobody_from_elsewhere_sees_the_state() -> None:
    async with running_router() as router:
        got = await get(router, "/ui/state", **{"X-Forwarded-For": "203.0.113.9"})
        assert got.status == 403
        assert "router.operator_token_file" in got.json["error"]["message"]


async def test_the_page_can_be_switched_off() -> None:
    async with running_router(ui=False) as router:
        for path in (*PATHS, "/ui/state"):
            assert (await get(router, path)).status == 404


SPEEDS = Speeds(1000.0, 100_000.0, 50_000.0, 20_000.0, 0.003, 0.02)


def considered(policy: str, *others: Candidate, no_tokens: str = "") -> Considered:
    """What the policy makes of these, as the chooser would note it."""
    wide = Preferences(0.8, 2, 0.001, 0.1, 0.5)
    picked = make_policy(policy, wide).pick(Asked(1000), others, random.Random(0))
    estimate = estimate_of(picked, 1000)
    routed = Routed(0.0, "e", picked.url, "n", "m", 1000, no_tokens, None, estimate, policy)
    return Considered(routed, others)


def engine(url: str, holding: Holding = Holding(), queued: int = 0) -> Candidate:  # noqa: B008
    return Candidate(url, Load(queued > 0, queued), holding, SPEEDS)


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (considered("cost", engine("a")), "only engine with room"),
        (considered("round_robin", engine("a"), engine("b")), "policy round_robin"),
        (
            considered("cost", engine("a"), engine("b"), no_tokens="no_prompt"),
            "tokens unknown (no prompt): by load alone",
        ),
        (considered("cost", engine("a", Holding(960)), engine("b")), "longest hit"),
        (
            considered("cost", engine("a", Holding(960)), engine("b", Holding(960), queued=900)),
            "sooner free",
        ),
        (
            considered("cost", engine("a", Holding(960), queued=5000), engine("b")),
            "sooner free, though the hit is shorter",
        ),
        (
            considered(
                "cost",
                engine("a", Holding(960), queued=200),
                engine("b", Holding(peer_tokens=960)),
            ),
            "later than the next, but needs no second copy",
        ),
        (
            considered(
                "cost", engine("a", Holding(960), queued=5000), engine("b", Holding(0, 0, 0, 960))
            ),
            "sooner free; pulls from a peer",
        ),
        (
            considered("cost", engine("a", Holding(0, 960)), engine("b", Holding(0, 0, 0, 960))),
            "hit lies nearer",
        ),
        (
            considered("cost", engine("a", Holding(960), queued=25), engine("b", Holding(920))),
            "as quick as the next, computes less",
        ),
        (
            considered("cost", engine("a", Holding(960)), engine("b", Holding(960))),
            "as quick as the next, fewest requests or chance",
        ),
        (
            considered("cost", engine("a"), engine("b")),
            "no hit anywhere: as quick as the next, fewest requests or chance",
        ),
        (considered("cost", engine("a"), engine("b", queued=3000)), "no hit anywhere: sooner free"),
    ],
)
def test_reasons_say_what_decided(item: Considered, reason: str) -> None:
    assert reason_of(item, best_rival(item)) == reason
