"""Who may fail (design §8): a scenario for each row, and what must not be lost by it.

A peer that dies or stalls in mid-read is tested closer to the wire as well, in
tests/contract/test_transports.py and tests/cluster/test_peer_pulls.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from dataclasses import replace
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from client_sdk import AsyncClient
from emberkv_proto.errors import StaleIncarnationError, UnavailableError
from emberkv_proto.shm_layout import PoolHeader
from emberkv_proto.types import Tier
from tests.helpers.agreement import await_agreement, wrong_hits
from tests.helpers.chains import NAMESPACE, chain_of, payload_of, read_chain, write_chain
from tests.helpers.cluster import Cluster, NodeProcess, wait_until
from tests.helpers.daemon_process import DaemonProcess
from tests.helpers.engine_process import STEP, EngineProcess
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.processes import descriptors, private_bytes, state_of

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]
WAIT_SECONDS = 60.0


def write(node: NodeProcess, *numbers: int) -> None:
    """Store these chains of six blocks."""
    with node.client() as client:
        for number in numbers:
            assert len(write_chain(client, chain_of(number, 6))) == 6


def read(node: NodeProcess, *numbers: int) -> list[int]:
    """How many blocks of each chain can be read, all bytes being right."""
    with node.client() as client:
        return [read_chain(client, chain_of(number, 6)) for number in numbers]


# ---- engine, kill -9: its session ends; blocks that it had not committed are lost ----


def test_an_engine_that_is_killed_gives_back_all_it_borrowed_and_keeps_what_it_committed(
    tmp_path: Path,
) -> None:
    with Cluster(tmp_path) as cluster:
        (node,) = cluster.nodes
        with EngineProcess("hold", node.socket_path, 1) as engine:
            assert engine.heard() == "holding"
            assert (node.gauge("leases"), node.gauge("staged_parts")) == (1, 6)
            engine.signal(signal.SIGKILL)
            names = ("sessions", "leases", "staged_parts")
            wait_until(lambda: not any(map(node.gauge, names)), "all is given back")
        assert read(node, 1, 2) == [6, 0]
        write(node, 2)
        cluster.await_rest()


def test_an_engine_that_is_stopped_loses_its_lease_and_does_not_lie_when_it_goes_on(
    tmp_path: Path,
) -> None:
    with Cluster(tmp_path, dram_blocks=15, ssd_blocks=0) as cluster:
        (node,) = cluster.nodes
        with EngineProcess("hold", node.socket_path, 1) as engine:
            assert engine.heard() == "holding"
            assert engine.ask() == "right"
            engine.signal(signal.SIGSTOP)
            wait_until(lambda: node.gauge("leases") == 0, "its lease runs out")
            with node.client() as other:
                for number in range(3, 13):
                    write_chain(other, chain_of(number, 6))
            assert read(node, 1) == [0], "its slots did not come back"
            engine.signal(signal.SIGCONT)
            assert engine.ask() in ("LeaseExpiredError", "StaleIncarnationError")
        assert node.counter("expired_leases") >= 1


@pytest.mark.slow
def test_200_engines_that_crash_leave_the_daemon_as_large_as_it_was(tmp_path: Path) -> None:
    with Cluster(tmp_path, ssd_blocks=0) as cluster:
        (node,) = cluster.nodes
        sizes: list[tuple[int, int]] = []
        with EngineProcess("crash", node.socket_path, 200) as engines:
            said = engines.heard()
            while said:
                wait_until(lambda: node.gauge("sessions") == 0, "their sessions end")
                sizes.append((private_bytes(node.pid), descriptors(node.pid)))
                said = engines.ask()
        assert len(sizes) == 200 // STEP
        (warm_bytes, warm_fds), *_, (last_bytes, last_fds) = sizes
        assert abs(last_fds - warm_fds) < 5, sizes  # somebody's scrape may be among them
        assert last_bytes - warm_bytes < 1 << 20, sizes
        assert (node.gauge("leases"), node.gauge("staged_parts")) == (0, 0)
        assert read(node, 0) == [6]


# ---- daemon, kill -9: nothing committed is lost ----


def test_a_daemon_that_is_killed_comes_back_with_all_it_had_under_a_new_incarnation(
    tmp_path: Path,
) -> None:
    with Cluster(tmp_path, nodes=2) as cluster:
        a, b = cluster.nodes
        write(a, 1, 2, 3)
        before, _ = cluster.await_rest()
        a.kill()
        cluster.await_index_state(a, "suspect")
        assert read(b, 1) == [0], "a dead peer is a miss"
        a.start()
        after, _ = cluster.await_rest()
        assert after.incarnation > before.incarnation
        assert after.rows == before.rows
        assert len(after.rows[Tier.DRAM]) == len(after.rows[Tier.SSD]) == 18
        assert read(a, 1, 2, 3) == [6, 6, 6]
        wait_until(lambda: read(b, 1) == [6], "a peer that is back is pulled from")


def test_a_lease_that_outlived_its_daemon_is_void_before_another_block_takes_its_slot(
    tmp_path: Path,
) -> None:
    slow = {"daemon.heartbeat_seconds": 30.0, "daemon.lease_seconds": 60.0}
    with Cluster(tmp_path, dram_blocks=15, ssd_blocks=0, settings=slow) as cluster:
        (node,) = cluster.nodes
        with node.client() as reader:
            write_chain(reader, chain_of(1, 6))
            with reader.acquire(chain_of(1, 6)) as lease:
                views = [lease.view(i) for i in range(lease.ready_blocks)]
                assert len(views) == 6
                node.kill()
                node.start()
                with node.client() as other:
                    for number in range(2, 8):
                        write_chain(other, chain_of(number, 6))
                    assert read_chain(other, chain_of(7, 6)) == 6
                copies = [bytes(view) for view in views]
                assert copies != [payload_of(h) for h in chain_of(1, 6)], "no slot was taken over"
                assert not lease.is_valid
                with pytest.raises(StaleIncarnationError):
                    lease.require_valid()


async def test_an_async_lease_is_void_before_its_loop_has_heard_of_the_daemons_death(
    tmp_path: Path,
) -> None:
    with DaemonProcess(tmp_path) as daemon:
        async with AsyncClient(daemon.socket_path, NAMESPACE, timeout_seconds=30.0) as client:
            staged = await client.stage(chain_of(1, 6))
            for i in staged.granted:
                staged.view(i)[:] = payload_of(chain_of(1, 6)[i])
            await staged.commit()
            lease = await client.acquire(chain_of(1, 6))
            assert lease.is_valid
            daemon.kill()
            assert not lease.is_valid
            with pytest.raises(StaleIncarnationError):
                lease.require_valid()
            await lease.release()


# ---- node reboot: DRAM-only blocks are lost ----


@pytest.mark.parametrize("pool", ["of another boot", "gone"])
def test_after_a_reboot_the_ssd_is_announced_and_dram_starts_cold(
    tmp_path: Path, pool: str
) -> None:
    with Cluster(tmp_path) as cluster:
        (node,) = cluster.nodes
        write(node, 1)
        cluster.await_rest()
        node.kill()
        node.faults = "writeback=fail"
        node.start()
        write(node, 2)  # stays in DRAM only
        before = cluster.await_rest()[0]
        assert (len(before.rows[Tier.DRAM]), len(before.rows[Tier.SSD])) == (12, 6)
        node.kill()
        if pool == "gone":
            node.pool_path.unlink()
        else:
            reboot(node.pool_path)
        node.faults = ""
        node.start()
        (after,) = cluster.await_rest()
        assert after.rows == {Tier.DRAM: frozenset(), Tier.SSD: before.rows[Tier.SSD]}
        chains = [chain_of(1, 6), chain_of(2, 6)]
        assert wrong_hits(cluster.index.address, after, chains) == []
        assert read(node, 1, 2) == [6, 0]


# ---- disk full, I/O error, torn write: the records concerned are lost ----


def test_a_disk_that_is_full_in_mid_record_degrades_the_tier_and_dram_goes_on(
    tmp_path: Path,
) -> None:
    with Cluster(tmp_path) as cluster:
        (node,) = cluster.nodes
        write(node, 1)
        cluster.await_rest()
        node.kill()
        node.faults = "mid_segment_write=fail:ENOSPC@1"
        node.start()
        write(node, 2)
        wait_until(lambda: "No space left" in node.tier_state(Tier.SSD), "the tier says why")
        assert node.tier_state(Tier.SSD).startswith("degraded: ")
        assert node.gauge('tier_ok{tier="ssd"}') == 0
        wait_until(lambda: node.counter("writeback_failed_blocks") >= 1, "it is counted")
        assert read(node, 1, 2) == [6, 6]
        number = 3
        while node.tier_state(Tier.SSD) != "ok":  # there is room again: a later try succeeds
            assert number < 300
            write(node, number)
            cluster.await_rest()
            number += 1
            time.sleep(0.2)
        write(node, number)
        cluster.await_rest()
        node.kill()
        node.pool_path.unlink()
        node.faults = ""
        node.start()
        cluster.await_rest()
        assert read(node, 1, number) == [6, 6], "what was written before and after is on the SSD"
        assert node.counter("corrupt_blocks") == 0


def test_a_read_that_fails_costs_one_block_and_the_index_hears_of_it(tmp_path: Path) -> None:
    with Cluster(tmp_path, dram_blocks=15) as cluster:
        (node,) = cluster.nodes
        for number in range(1, 6):
            write(node, number)
            cluster.await_rest()  # all on the SSD before it is evicted
        node.kill()
        node.pool_path.unlink()
        node.faults = "segment_read=fail:EIO@3"
        node.start()
        cluster.await_rest()
        assert sum(read(node, 1)) < 6
        assert node.counter("ssd_read_errors") == 1
        (catalog,) = cluster.await_rest()
        assert len(catalog.rows[Tier.SSD]) == 29
        assert wrong_hits(cluster.index.address, catalog, [chain_of(1, 6)]) == []
        with node.client() as client:
            assert len(write_chain(client, chain_of(1, 6))) == 1, "the lost block is taken anew"
        assert read(node, 1, 2) == [6, 6]


@pytest.mark.parametrize("point", ["mid_segment_write", "segment_sync"])
def test_a_torn_write_is_cut_off_and_its_blocks_are_written_again(
    tmp_path: Path, point: str
) -> None:
    with Cluster(tmp_path) as cluster:
        (node,) = cluster.nodes
        write(node, 1)
        cluster.await_rest()
        node.kill()
        node.faults = f"{point}=exit@1"  # half a record, or a whole one without its row
        node.start()
        with node.client() as client:
            write_chain(client, chain_of(2, 6))
        assert node.await_end(WAIT_SECONDS) == -signal.SIGKILL
        node.faults = ""
        node.start()
        (catalog,) = cluster.await_rest()
        assert len(catalog.rows[Tier.SSD]) == 12
        node.kill()
        node.pool_path.unlink()
        node.start()
        cluster.await_rest()
        assert read(node, 1, 2) == [6, 6]
        assert node.counter("corrupt_blocks") == 0


# ---- index away: nothing is lost; it is rebuilt from the daemons ----


def test_without_the_index_nodes_serve_what_they_have_and_its_return_rebuilds_it(
    tmp_path: Path,
) -> None:
    with Cluster(tmp_path, nodes=2) as cluster:
        a, b = cluster.nodes
        write(a, 1)
        cluster.await_rest()
        cluster.index.kill()
        write(b, 2)
        assert read(a, 1) == [6]
        assert read(b, 2, 1) == [6, 0], "what only a peer has is a miss"
        cluster.index.start()
        cluster.await_rest()
        wait_until(lambda: read(b, 1) == [6], "peers are found again")


def test_an_index_that_missed_events_for_whatever_reason_agrees_again(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        (node,) = cluster.nodes
        node.kill()
        node.faults = "event_publish=drop%0.5*4,seed=4"
        node.start()
        cluster.index.kill()
        cluster.index.faults = "index_batch=drop%0.5*4,seed=5"
        cluster.index.start()
        numbers = range(1, 15)
        write(node, *numbers)
        (catalog,) = cluster.await_rest()
        chains = [chain_of(number, 6) for number in numbers]
        assert wrong_hits(cluster.index.address, catalog, chains) == []
        assert node.counter("fault_event_publish") == 4


# ---- router away: another takes over ----


async def test_when_a_router_dies_the_other_one_serves_with_the_same_view(tmp_path: Path) -> None:
    async with FakeEngine().serving() as engine:
        cluster = Cluster(
            tmp_path,
            routers=2,
            router_settings={"router.engines": json.dumps([{"url": engine.url}])},
        )

        def scenario() -> None:
            with cluster:
                (node,), (first, second) = cluster.nodes, cluster.routers
                write(node, 1)
                for router in (first, second):
                    await_agreement(
                        router.endpoint["index_address"], node.grpc_address, WAIT_SECONDS
                    )
                assert complete(first.endpoint["url"]) == "ember"
                first.kill()
                assert complete(second.endpoint["url"]) == "ember"
                write(node, 2)
                first.start()
                for router in (first, second):
                    catalog = await_agreement(
                        router.endpoint["index_address"], node.grpc_address, WAIT_SECONDS
                    )
                    assert len(catalog.rows[Tier.DRAM]) == 12
                assert complete(first.endpoint["url"]) == "ember"

        await asyncio.to_thread(scenario)


# ---- peer in mid-pull: the block is a miss, and nothing hangs ----


@pytest.mark.parametrize("what", ["peer_serve=pause@1", "peer_serve=exit@1"])
def test_a_peer_that_fails_in_mid_pull_is_a_miss_and_later_a_hit(tmp_path: Path, what: str) -> None:
    with Cluster(tmp_path, nodes=2) as cluster:
        a, b = cluster.nodes
        write(a, 1)
        cluster.await_rest()
        a.kill()
        a.faults = what
        a.start()
        cluster.await_rest()

        def is_struck() -> bool:
            """Once b asks it. While the index takes it for silent b does not."""
            assert read(b, 1) == [0]
            return state_of(a.pid) in "TZX"

        wait_until(is_struck, "the peer fails in mid-pull")
        if "pause" in what:
            a.resume()
        if "exit" in what:
            assert a.await_end(WAIT_SECONDS) == -signal.SIGKILL
            a.faults = ""
            a.start()
        cluster.await_rest()
        wait_until(lambda: read(b, 1) == [6], "the peer is pulled from again")


def test_a_node_that_dies_with_a_peers_bytes_in_its_pool_has_published_none_of_them(
    tmp_path: Path,
) -> None:
    with Cluster(tmp_path, nodes=2) as cluster:
        a, b = cluster.nodes
        write(a, 1)
        b.kill()
        b.faults = "mid_transfer=exit@1"
        b.start()
        cluster.await_rest()

        def is_gone() -> bool:
            """Once it pulls, which it does not while the index takes the peer for silent."""
            with contextlib.suppress(UnavailableError), b.client() as client:
                assert read_chain(client, chain_of(1, 6)) == 0
            return not b.is_running

        wait_until(is_gone, "the node dies in mid-pull")
        assert b.await_end(WAIT_SECONDS) == -signal.SIGKILL
        b.faults = ""
        b.start()
        catalogs = cluster.await_rest()
        assert [len(catalog.rows[Tier.DRAM]) for catalog in catalogs] == [6, 0]
        wait_until(lambda: read(b, 1) == [6], "it is pulled in the next life")


# ---- what the scenarios need ----


def reboot(pool: Path) -> None:
    """Make the pool look as if the machine had had another boot when it was written."""
    with pool.open("r+b") as file:
        header = PoolHeader.unpack(file.read(128))
        file.seek(0)
        file.write(replace(header, boot_id=bytes(b ^ 0xFF for b in header.boot_id)).pack())


def complete(router_url: str) -> str:
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 1}).encode()
    request = Request(  # noqa: S310 - it is ours, http
        f"{router_url}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urlopen(request, timeout=WAIT_SECONDS) as reply:  # noqa: S310
        text: str = json.loads(reply.read())["choices"][0]["text"]
    return text
