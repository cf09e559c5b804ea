"""Orders to the router: who may give them, what they change, what stands in the log."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from client_sdk.operator_gate import OperatorGate
from router.config import RouterSection
from router.live import LIVE, compare, with_live_changes
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.router_client import connected, request, running_router

PATH = "/admin/policy"


async def test_a_policy_is_switched_live_and_the_order_is_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "router.audit")
    async with (
        FakeEngine().serving() as one,
        FakeEngine().serving() as two,
        running_router(one.url, two.url) as router,
    ):
        shown = await request(router.port, PATH)
        assert shown.json["policy"] == "cost"
        assert "lmetric" in shown.json["policies"]
        got = await request(router.port, PATH, {"policy": "round_robin"})
        assert got.json["policy"] == "round_robin"
        engines = [
            (await request(router.port, "/v1/completions", {"prompt": [i]})).headers[
                "x-emberkv-engine"
            ]
            for i in range(4)
        ]
        assert engines == sorted([one.url, two.url]) * 2
        (line,) = [r.getMessage() for r in caplog.records if r.name == "router.audit"]
        assert line.startswith("policy cost -> round_robin by ipv4:127.0.0.1:")
        for body in ({"policy": "best"}, {"policy": None}, {}, b"[]", b"{"):
            assert (await request(router.port, PATH, body)).status == 400
        assert (await request(router.port, PATH)).json["policy"] == "round_robin"


async def test_a_web_page_gives_no_orders(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        got = await request(
            router.port, PATH, {"policy": "max_hit"}, {"Origin": "http://evil.example"}
        )
        assert got.status == 403
        assert (await request(router.port, PATH)).json["policy"] == "cost"
        assert any("refused" in r.getMessage() for r in caplog.records)


async def test_a_proxy_on_this_machine_gives_no_orders_without_the_token() -> None:
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        passed_on = {"X-Forwarded-For": "10.0.0.9"}
        got = await request(router.port, PATH, {"policy": "max_hit"}, passed_on)
        assert got.status == 403
        assert (await request(router.port, PATH)).json["policy"] == "cost"


async def test_other_machines_need_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text("s" * 32)
    token.chmod(0o600)
    monkeypatch.setattr("client_sdk.operator_gate.is_loopback", lambda peer: False)
    async with FakeEngine().serving() as engine:
        async with running_router(engine.url) as router:
            assert (await request(router.port, PATH, {"policy": "max_hit"})).status == 403
        async with running_router(engine.url, operator_token_file=token) as router:
            assert (await request(router.port, PATH, {"policy": "max_hit"})).status == 401
            wrong = {"Authorization": "Bearer " + "t" * 32}
            assert (await request(router.port, PATH, {"policy": "max_hit"}, wrong)).status == 401
            right = {"Authorization": "Bearer " + "s" * 32}
            got = await request(router.port, PATH, {"policy": "max_hit"}, right)
            assert got.json["policy"] == "max_hit"


async def test_the_gate_sees_the_clients_address() -> None:
    seen = []

    class Gate(OperatorGate):
        def check(self, peer: str, authorization: str | bytes | None) -> None:
            seen.append(peer)
            super().check(peer, authorization)

    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        router.router.admin._gate = Gate()
        async with connected(router.port) as client:
            client.send(b"GET /admin/policy HTTP/1.1\r\nHost: r\r\n\r\n")
            assert (await client.read()).status == 200
            host, port = client.writer.get_extra_info("sockname")
            assert seen == [f"ipv4:{host}:{port}"]


def test_every_live_key_is_a_setting_and_only_those_are_taken_over() -> None:
    assert LIVE.keys() <= RouterSection.model_fields.keys()
    old = RouterSection()
    new = RouterSection(policy="lmetric", queue_seconds=3.0, port=8123, retries=5)
    changes = compare(old, new)
    assert changes.live == ("policy", "queue_seconds")
    assert changes.needs_restart == ("port", "retries")
    taken = with_live_changes(old, new)
    assert (taken.policy, taken.queue_seconds) == ("lmetric", 3.0)
    assert (taken.port, taken.retries) == (old.port, old.retries)
    assert compare(old, old).live == compare(old, old).needs_restart == ()


async def test_a_reload_changes_limits_and_policy_and_names_the_rest() -> None:
    async with FakeEngine().serving() as engine, running_router(engine.url) as router:
        cfg = router.router._cfg
        wanted = cfg.model_copy(
            update={"policy": "lmetric", "max_inflight_per_engine": 3, "retries": 9}
        )
        changes = router.router.reconfigure(wanted)
        assert changes.needs_restart == ("retries",)
        assert (await request(router.port, PATH)).json["policy"] == "lmetric"
        # An order's policy stays over a reload that changes another key.
        await request(router.port, PATH, {"policy": "max_hit"})
        router.router.reconfigure(wanted.model_copy(update={"queue_seconds": 1.0}))
        assert (await request(router.port, PATH)).json["policy"] == "max_hit"
