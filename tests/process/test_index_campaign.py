"""The index campaign with short stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from emberkv_proto.types import Tier
from tests.helpers.agreement import Catalog
from tests.helpers.cluster import wait_until
from tests.helpers.ports import free_port
from tests.helpers.redis_rows import flush, redis_differences
from tests.helpers.redis_server import redis_server
from tests.process.index_campaign import run_campaign
from tests.process.index_load import RequestLoad

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(400)]
GENEROUS_SECONDS = 60.0
"""The stated bound is for a machine that is not busy with other tests."""


def test_indexes_are_exact_again_after_each_blow_and_requests_are_served_throughout(
    tmp_path: Path,
) -> None:
    with redis_server() as redis:
        report = run_campaign(
            tmp_path,
            pause_seconds=4.0,
            seed=5,
            bound_seconds=GENEROUS_SECONDS,
            is_short=True,
            redis=redis,
        )
    assert not report.findings, report.findings
    assert report.blows == len(report.agreed_seconds) == 10
    assert min(report.requests, report.calls) > 100
    assert report.elsewhere > 0, "no request came to a router that was down"


def test_requests_that_no_router_takes_and_rows_that_differ_are_found(tmp_path: Path) -> None:
    class Nobody:
        name = "nobody"
        endpoint: ClassVar = {"url": f"http://127.0.0.1:{free_port()}"}

    routers: Any = [Nobody(), Nobody()]
    load = RequestLoad(routers, 1, 1)
    try:
        wait_until(lambda: len(load.served.failed) > 0, "a refused request is found")
        assert "nobody is up" in load.served.failed[0]
        for router in routers:
            load.strike(router)
        wait_until(lambda: "no router took a request" in load.served.failed, "and one that is lost")
    finally:
        load.close()
    with redis_server() as redis:
        catalog = Catalog("node-a", 1, 0, {Tier.DRAM: frozenset({1}), Tier.SSD: frozenset()})
        assert redis_differences(redis.url, catalog) == ["Redis: node-a is not known"]
        flush(redis.url)
    (away,) = redis_differences(redis.url, catalog)
    assert "Error" in away
