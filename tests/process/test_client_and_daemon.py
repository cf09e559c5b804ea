"""The SDK against a real store daemon: processes that die, stop, come back, or may not enter."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from client_sdk import AsyncClient, OperatorClient, SyncClient, put_pipeline
from emberkv_proto.errors import EmberError, StaleIncarnationError, UnavailableError
from emberkv_proto.hashing import block_hashes, checksum, lora_key
from emberkv_proto.layout import Group, GroupKind, KvLayout, Namespace
from emberkv_proto.types import AcquirePolicy, BlockHash, EngineInfo, Source, StageState, Tier
from tests.helpers.daemon_process import MIB, ROOT, DaemonProcess

pytestmark = pytest.mark.process

LAYOUT = KvLayout(dtype="float32", layers=2, kv_heads=2, head_dim=16)
PART_BYTES = 2 * 2 * 16 * 2 * 16 * 4
NAMESPACE = Namespace(
    model="m",
    weights_id="w",
    kv_dtype="float32",
    layout_fingerprint=LAYOUT.fingerprint,
    block_tokens=16,
    groups=(Group(GroupKind.FULL, 2, PART_BYTES),),
)
TOKENS = list(range(1000, 1000 + 16 * 12))
HASHES = block_hashes(NAMESPACE.id, TOKENS, 16)

WRITER = """
import sys, time
from tests.process.test_client_and_daemon import *
with SyncClient(sys.argv[1], NAMESPACE, timeout_seconds=30.0) as client:
    with client.stage(HASHES) as staged:
        for i in staged.granted:
            staged.view(i)[:] = payload(HASHES[i])
        if sys.argv[2] == "hang":
            print("staged", flush=True)
            time.sleep(60)
        print(staged.commit(), flush=True)
"""


def payload(block_hash: BlockHash) -> bytes:
    return random.Random(block_hash).randbytes(PART_BYTES)


def start_writer(daemon: DaemonProcess, mode: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, os.fspath(daemon.socket_path), mode],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


def store(client: SyncClient, hashes: list[BlockHash]) -> None:
    with client.stage(hashes) as staged:
        for i in staged.granted:
            staged.view(i)[:] = payload(hashes[i])
        assert staged.commit() == len(hashes)


def check_readable(client: SyncClient, hashes: list[BlockHash]) -> None:
    """All of it hits, byte for byte."""
    with client.acquire(hashes, deadline_seconds=30.0) as lease:
        assert lease.usable_blocks == len(hashes)
        assert lease.wait(len(hashes), 30.0) == len(hashes)
        for i, block_hash in enumerate(hashes):
            assert bytes(lease.view(i)) == payload(block_hash)
            lease.verify(i)
        lease.check_integrity()
        assert lease.is_valid


def wait_until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.02)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path / "node") as daemon:
        yield daemon
        with daemon.operator() as operator:
            assert operator.check() == []


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[SyncClient]:
    with SyncClient(daemon.socket_path, NAMESPACE, timeout_seconds=30.0) as client:
        yield client
        client.check_integrity()


def test_prefault_maps_the_daemons_pool_before_the_first_copy(client: SyncClient) -> None:
    mapped = client.prefault(30.0)
    assert mapped >= 1 << 20
    store(client, HASHES)
    check_readable(client, HASHES)


LONG_CHAIN = block_hashes(NAMESPACE.id, list(range(16 * 300)), 16)


def test_a_put_of_many_batches_comes_back_whole(client: SyncClient) -> None:
    put = client.put(LONG_CHAIN, b"".join(map(payload, LONG_CHAIN)))
    assert put.committed_blocks == len(LONG_CHAIN)
    check_readable(client, LONG_CHAIN)


def test_a_put_whose_daemon_is_killed_leaves_whole_blocks_only(
    daemon: DaemonProcess, client: SyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, at = b"".join(map(payload, LONG_CHAIN)), iter(range(1, len(LONG_CHAIN) + 1))

    def kill_in_the_middle(part: memoryview) -> int:
        if next(at) == 200:
            daemon.kill()
        return checksum(part)

    monkeypatch.setattr(put_pipeline, "checksum", kill_in_the_middle)
    with pytest.raises(EmberError, match="of 300 blocks are known to be committed") as caught:
        client.put(LONG_CHAIN, written)
    known = int(str(caught.value).rpartition("; ")[2].split()[0])
    daemon.start()
    wait_until(lambda: client.is_connected)
    hit = client.probe(LONG_CHAIN).hit_blocks
    # Killed in the middle of a commit it has published some of the batch, each of them whole.
    assert known <= hit <= 192, "a batch that was not copied yet was committed"
    check_readable(client, LONG_CHAIN[:hit])
    monkeypatch.undo()
    assert client.put(LONG_CHAIN, written).committed_blocks == 300 - hit
    check_readable(client, LONG_CHAIN)


def test_what_one_process_commits_another_reads_byte_identical(
    daemon: DaemonProcess, client: SyncClient
) -> None:
    writer = start_writer(daemon, "commit")
    output, _ = writer.communicate(timeout=90)
    assert (writer.returncode, output.strip()) == (0, str(len(HASHES)))
    assert client.probe(HASHES).hit_blocks == len(HASHES)
    assert client.probe(HASHES).tiers == (frozenset({Tier.DRAM}),) * len(HASHES)
    check_readable(client, HASHES)
    assert client.stage(HASHES).states == [StageState.PRESENT] * len(HASHES)


def test_ranks_of_a_hybrid_model_read_only_their_windows(daemon: DaemonProcess) -> None:
    """Full, window and state layers, one rank each; windows and states are stored where needed."""
    groups = (
        Group(GroupKind.FULL, 2, PART_BYTES),
        Group(GroupKind.SLIDING_WINDOW, 2, PART_BYTES, window_tokens=3 * 16),
        Group(GroupKind.MAMBA, 2, PART_BYTES),
    )
    namespace = replace(NAMESPACE, groups=groups)
    hashes = block_hashes(namespace.id, TOKENS, 16)
    first_needed = (0, 9, 11)
    with contextlib.ExitStack() as ranks:
        clients = [
            ranks.enter_context(
                SyncClient(daemon.socket_path, namespace, part=part, timeout_seconds=30.0)
            )
            for part in range(3)
        ]
        for client, start in zip(clients, first_needed, strict=True):
            parent = hashes[start - 1] if start else None
            with client.stage(hashes[start:], parent=parent) as staged:
                for i in staged.granted:
                    staged.view(i)[:] = payload(hashes[start + i])
                staged.commit()
        for client, start in zip(clients, first_needed, strict=True):
            assert client.probe(hashes).hit_blocks == 12
            with client.acquire(hashes) as lease:
                assert lease.usable_blocks == lease.ready_blocks == 12
                assert [i for i in range(12) if lease.needs(i)] == list(range(start, 12))
                for i in range(start, 12):
                    lease.verify(i)
                    assert bytes(lease.view(i)) == payload(hashes[i])
                lease.check_integrity()
            assert client.acquire(hashes[:11]).usable_blocks == 0, "the state is at 12 only"


def test_engine_killed_between_stage_and_commit_leaves_nothing(
    daemon: DaemonProcess, client: SyncClient
) -> None:
    writer = start_writer(daemon, "hang")
    assert writer.stdout is not None
    try:
        assert writer.stdout.readline() == "staged\n"
        assert client.stage(HASHES).states == [StageState.IN_PROGRESS] * len(HASHES)
        assert client.acquire(HASHES).usable_blocks == 0
    finally:
        writer.kill()
        writer.communicate(timeout=90)
    wait_until(lambda: client.status().staged_blocks == 0)
    assert client.probe(HASHES).hit_blocks == 0
    with daemon.operator() as operator:
        assert operator.check() == []
    store(client, HASHES)
    check_readable(client, HASHES)


def test_daemon_killed_and_restarted_serves_its_dram_blocks_again(
    daemon: DaemonProcess, client: SyncClient
) -> None:
    store(client, HASHES[:8])
    before = client.incarnation
    lease = client.acquire(HASHES[:8])
    view = lease.view(0)
    staged = client.stage(HASHES[8:])
    assert staged.granted == [0, 1, 2, 3]
    daemon.kill()
    with pytest.raises(UnavailableError):
        client.probe(HASHES)
    assert not lease.is_valid
    with pytest.raises(StaleIncarnationError):
        lease.view(0)
    with pytest.raises(StaleIncarnationError):
        staged.commit()
    assert bytes(view) == payload(HASHES[0]), "a mapping lives as long as its views"
    daemon.start()
    wait_until(lambda: client.is_connected)  # the background thread re-opens the session
    assert client.incarnation > before
    assert client.counters.reconnects == 1
    check_readable(client, HASHES[:8])
    assert client.probe(HASHES).hit_blocks == 8, "what was only staged is gone"
    lease.release()
    staged.abort()
    store(client, HASHES[8:])
    check_readable(client, HASHES)


def test_stopped_daemon_costs_the_timeout_and_is_found_again_when_it_goes_on(
    daemon: DaemonProcess,
) -> None:
    with SyncClient(daemon.socket_path, NAMESPACE, timeout_seconds=0.4) as client:
        store(client, HASHES)
        daemon.pause()
        try:
            said = []
            began = time.monotonic()
            for _ in range(5):
                with pytest.raises(UnavailableError) as caught:
                    client.probe(HASHES)
                said.append(str(caught.value))
            assert time.monotonic() - began < 30.0
            # Another call may have to wait for the background thread's attempt.
            held_back = sum("next attempt in" in words for words in said)
            assert held_back >= 2, f"waited, not held back: {said}"
        finally:
            daemon.resume()
        wait_until(lambda: client.is_connected)
        check_readable(client, HASHES)


def test_drained_daemon_ends_cleanly_and_is_a_miss_then(
    daemon: DaemonProcess, client: SyncClient
) -> None:
    store(client, HASHES)
    assert daemon.terminate() == 0
    with pytest.raises(UnavailableError):
        client.probe(HASHES)
    daemon.start()
    wait_until(lambda: client.is_connected)
    check_readable(client, HASHES)


def test_operator_drains_the_daemon_over_its_socket(daemon: DaemonProcess) -> None:
    with daemon.operator() as operator:
        assert operator.status().state == "serving"
        operator.drain()
    wait_until(lambda: not daemon.socket_path.exists())
    daemon.terminate()
    daemon.start()


def test_wrong_socket_path_names_the_path_and_the_fix(tmp_path: Path) -> None:
    path = tmp_path / "elsewhere.sock"
    with (
        SyncClient(path, NAMESPACE, timeout_seconds=30.0) as client,
        pytest.raises(UnavailableError, match=r"elsewhere\.sock; start the store daemon, or point"),
    ):
        client.connect()
    with (
        OperatorClient(path) as operator,
        pytest.raises(UnavailableError, match=r"elsewhere\.sock"),
    ):
        operator.status()


def test_lease_lives_by_heartbeats_and_expires_on_both_sides_without(tmp_path: Path) -> None:
    quick = {"daemon.lease_seconds": 3.0, "daemon.heartbeat_seconds": 0.2}
    with (
        DaemonProcess(tmp_path / "node", settings=quick) as daemon,
        SyncClient(daemon.socket_path, NAMESPACE, timeout_seconds=30.0) as client,
        daemon.operator() as operator,
    ):
        store(client, HASHES)
        with client.acquire(HASHES) as lease:
            time.sleep(4.0)
            assert lease.is_valid
            assert operator.status().leases == 1
            lease.verify(0)
            # Silence the client: hold the lock its heartbeats need.
            with client._connection._lock:
                time.sleep(3.2)
                assert not lease.is_valid
                wait_until(lambda: operator.status().leases == 0)
            assert not lease.is_valid, "a late heartbeat revives nothing"
        check_readable(client, HASHES)


OTHERS = {
    "dtype": replace(NAMESPACE, kv_dtype="float16"),
    "layout": replace(NAMESPACE, layout_fingerprint=replace(LAYOUT, order="other").fingerprint),
    "weights": replace(NAMESPACE, weights_id="w2"),
    "model": replace(NAMESPACE, model="m2"),
    "domain": replace(NAMESPACE, isolation_domain="tenant"),
}


def test_another_namespace_never_hits_not_even_with_the_right_hashes(
    daemon: DaemonProcess, client: SyncClient
) -> None:
    store(client, HASHES)
    for name, other in OTHERS.items():
        with SyncClient(daemon.socket_path, other, timeout_seconds=30.0) as stranger:
            own = block_hashes(other.id, TOKENS, 16)
            assert not set(own) & set(HASHES), name
            for hashes in (own, HASHES):
                assert stranger.probe(hashes).hit_blocks == 0, name
                with stranger.acquire(hashes, policy=AcquirePolicy.BEST_EFFORT) as lease:
                    assert lease.usable_blocks == 0, name
            store(stranger, own)
    check_readable(client, HASHES)


def test_another_lora_or_salt_never_hits(daemon: DaemonProcess, client: SyncClient) -> None:
    store(client, HASHES)
    chains = [
        block_hashes(NAMESPACE.id, TOKENS, 16, salt=b"tenant"),
        block_hashes(NAMESPACE.id, TOKENS, 16, extra_keys=[lora_key("bot", "1")]),
        block_hashes(NAMESPACE.id, TOKENS, 16, extra_keys=[lora_key("bot", "2")]),
    ]
    for chain in chains:
        assert client.probe(chain).hit_blocks == 0
        assert client.acquire(chain).usable_blocks == 0
        store(client, chain)
    for chain in [HASHES, *chains]:
        check_readable(client, chain)


def test_engine_is_announced_while_its_session_lives(
    daemon: DaemonProcess, client: SyncClient
) -> None:
    engine = EngineInfo("e1", "http://127.0.0.1:1", "m", NAMESPACE.id, 16)
    with SyncClient(
        daemon.socket_path, NAMESPACE, engine=engine, timeout_seconds=30.0
    ) as announced:
        announced.connect()
        assert client.status().engines == (engine,)
        store(announced, HASHES)
    wait_until(lambda: client.status().engines == ())


async def test_async_client_speaks_to_the_same_daemon(
    daemon: DaemonProcess, client: SyncClient
) -> None:
    store(client, HASHES[:8])
    async with AsyncClient(daemon.socket_path, NAMESPACE, timeout_seconds=30.0) as other:
        async with await other.acquire(HASHES) as lease:
            assert lease.usable_blocks == 8
            assert bytes(lease.view(3)) == payload(HASHES[3])
        async with await other.stage(HASHES[8:], HASHES[7]) as staged:
            for i in staged.granted:
                staged.view(i)[:] = payload(HASHES[8 + i])
            assert await staged.commit() == 4
    check_readable(client, HASHES)


def test_full_pool_evicts_for_new_blocks_but_never_what_is_leased(
    daemon: DaemonProcess, client: SyncClient
) -> None:
    store(client, HASHES)
    with client.acquire(HASHES) as lease:
        for i in range(0, 2400, 100):
            chain = block_hashes(NAMESPACE.id, range(i * 16, i * 16 + 1600), 16)
            with client.stage(chain) as staged:
                for j in staged.granted:
                    staged.view(j)[:] = payload(chain[j])
                staged.commit()
        assert lease.is_valid
        for i, block_hash in enumerate(HASHES):
            assert bytes(lease.view(i)) == payload(block_hash)
    assert client.status().tiers[0].used_bytes <= daemon.capacity_bytes


def test_blocks_that_went_to_ssd_are_waited_for_and_come_back_whole(tmp_path: Path) -> None:
    with (
        DaemonProcess(tmp_path / "node", capacity_bytes=2 * MIB, ssd_bytes=32 * MIB) as daemon,
        SyncClient(daemon.socket_path, NAMESPACE, timeout_seconds=30.0) as client,
    ):
        chains = [
            block_hashes(NAMESPACE.id, TOKENS, 16, salt=number.to_bytes(2, "little"))
            for number in range(40)
        ]
        for number, chain in enumerate(chains):  # 7.5 MiB through 2 MiB of DRAM
            store(client, chain)
            count = 12 * (number + 1)
            wait_until(lambda count=count: client.status().tiers[1].blocks >= count)
        with client.acquire(chains[0], deadline_seconds=30.0) as lease:
            assert set(lease.sources) == {Source.SSD}
        for chain in chains:
            check_readable(client, chain)
        with daemon.operator() as operator:
            assert operator.check() == []


ENTER_AS = """
import os, sys
from tests.process.test_client_and_daemon import *
os.setgid(0); os.setuid(int(sys.argv[2]))
with SyncClient(sys.argv[1], NAMESPACE, timeout_seconds=30.0) as client:
    try:
        client.connect()
    except Exception as error:
        print(type(error).__name__, error)
    else:
        print("entered")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
@pytest.mark.parametrize(("uid", "expected"), [(12345, "entered"), (12346, "AccessDeniedError")])
def test_only_allowed_users_enter(uid: int, expected: str) -> None:
    directory = Path(tempfile.mkdtemp(prefix="emberkv-uid-"))
    try:
        directory.chmod(0o755)
        with DaemonProcess(directory, settings={"daemon.allowed_uids": "[12345]"}) as daemon:
            output = subprocess.run(
                [sys.executable, "-c", ENTER_AS, os.fspath(daemon.socket_path), str(uid)],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=90,
                check=True,
            ).stdout
            assert output.startswith(expected)
            if expected != "entered":
                assert f"uid {uid}" in output
                assert "allowed_uids" in output
    finally:
        shutil.rmtree(directory)
