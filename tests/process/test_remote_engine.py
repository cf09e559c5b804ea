"""Engines that share no memory with their daemon: what they put and get over NIXL."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from client_sdk import SyncClient
from client_sdk.engine.tensor_memory import TensorMemory
from client_sdk.remote_client import Piece, RemoteClient
from client_sdk.remote_pool import RemotePool
from client_sdk.session import RemoteAddress
from client_sdk.transport.base import Segment
from client_sdk.transport.connections import ReadLimits
from emberkv_proto.errors import (
    DeadlineError,
    EmberError,
    InvalidRequestError,
    LeaseExpiredError,
    UnavailableError,
    UnknownStageError,
)
from emberkv_proto.types import AcquirePolicy, StageState
from tests.helpers.daemon_process import DaemonProcess
from tests.helpers.processes import pids_with
from tests.helpers.remote_engine import (
    NAMESPACE,
    PART_BYTES,
    PIECE_BYTES,
    PIECES,
    SETTINGS,
    chain,
    fill,
    gather,
    payload,
    remote_engine,
)

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(240),  # seconds of waiting for silence, and seven processes to start
    pytest.mark.skipif(
        find_spec("nixl_cu12") is None,
        reason="nixl_cu12 is not installed: pip install --no-deps nixl-cu12==1.5.1",
    ),
]
MIB = 1 << 20
BLOCKS = 12
GUARD = 0xA5
WAIT_SECONDS = 60.0
PROGRESS_SECONDS = 6.0
"""Well above what a busy machine keeps a living process from its turn."""


def await_true(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited too long until {what}"
        time.sleep(0.05)


class Node(DaemonProcess):
    """A daemon that takes engines of other hosts, with room for two chains of 12 blocks."""

    def __init__(self, directory: Path, faults: str = "") -> None:
        super().__init__(
            directory,
            capacity_bytes=32 * MIB,
            extent_bytes=16 * MIB,
            settings={
                "transport.kind": "ucx",
                "transport.rdma": "off",
                "transport.agents": 1,
                "transport.engine_agents": 1,
                "transport.progress_seconds": PROGRESS_SECONDS,
                "daemon.lease_seconds": 8.0,
                "daemon.stage_seconds": 8.0,
                "daemon.heartbeat_seconds": 0.5,
                "dram.high_watermark": 1.0,
                "dram.low_watermark": 0.9,
            },
            faults=faults,
        )

    @property
    def grpc(self) -> str:
        return str(self.endpoints["grpc_address"])

    def client(self) -> SyncClient:
        return SyncClient(self.socket_path, NAMESPACE, timeout_seconds=10.0)

    def metric(self, name: str) -> float:
        return self.metrics()[f"emberkv_store_{name}"]

    @property
    def quarantines(self) -> float:
        return self.metric("transport_quarantines_total")

    def agents(self) -> list[int]:
        """Its agents into whose memory engines write."""
        return [
            pid
            for pid in pids_with("transport.ucx_agent")
            if b"emberkv-taker" in Path(f"/proc/{pid}/cmdline").read_bytes()
            and parent_of(pid) == self.pid
        ]

    def is_quiet(self) -> bool:
        """Whether nothing is staged, and nothing is written that was given up."""
        with self.operator() as operator:
            staged = operator.status().staged_blocks
        return staged == 0 and self.metric("transport_quarantined_bytes") == 0


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@dataclass(frozen=True)
class Engine:
    client: RemoteClient
    pool: RemotePool
    view: memoryview
    pieces: list[list[Piece]]

    def put(self, number: int) -> int:
        hashes = chain(number, BLOCKS)
        for block_hash, own in zip(hashes, self.pieces, strict=True):
            fill(self.view, own, payload(block_hash))
        return self.client.put(hashes, self.pieces).committed_blocks

    def get(self, number: int) -> list[bytes]:
        """Into memory full of guard bytes."""
        self.view[:] = bytes([GUARD]) * len(self.view)
        hashes = chain(number, BLOCKS)
        count = self.client.get(hashes, self.pieces, policy=AcquirePolicy.BEST_EFFORT)
        return [gather(self.view, own) for own in self.pieces[:count]]


@contextmanager
def engine_of(node: Node) -> Iterator[Engine]:
    """Its pages are a torch tensor, as those of an engine on a GPU are."""
    pages = torch.zeros(PIECES, BLOCKS, PIECE_BYTES, dtype=torch.uint8)
    memory = TensorMemory([pages])
    pieces = [[memory.piece(pages[p, block]) for p in range(PIECES)] for block in range(BLOCKS)]
    assert memory.view is not None
    with ExitStack() as stack:
        limits = ReadLimits(connect_seconds=10.0, progress_seconds=PROGRESS_SECONDS)
        pool = RemotePool(memory.regions, SETTINGS, limits)
        stack.callback(pool.close)
        client = stack.enter_context(
            RemoteClient(
                RemoteAddress(node.grpc),
                NAMESPACE,
                pool,
                view=memory.view,
                timeout_seconds=10.0,
                move_seconds=20.0,
            )
        )
        yield Engine(client, pool, memory.view, pieces)
        pool.check_integrity()
        client.check_integrity()


def write_locally(node: Node, number: int) -> None:
    hashes = chain(number, BLOCKS)
    with node.client() as client:
        result = client.put(hashes, b"".join(map(payload, hashes)))
    assert result.committed_blocks == BLOCKS


def read_locally(node: Node, number: int) -> list[bytes]:
    buffer = bytearray(BLOCKS * PART_BYTES)
    with node.client() as client:
        count = client.get(chain(number, BLOCKS), buffer, policy=AcquirePolicy.BEST_EFFORT)
    return [bytes(buffer[i * PART_BYTES : (i + 1) * PART_BYTES]) for i in range(count)]


def whole(number: int) -> list[bytes]:
    return [payload(block_hash) for block_hash in chain(number, BLOCKS)]


def assert_slots_are_others(node: Node, first: int) -> None:
    """All slots of the pool are written and read by others, now and a while later."""
    await_true(node.is_quiet, "the slots of the write that failed came back")
    for number in (first, first + 1):
        write_locally(node, number)
    time.sleep(1.0)  # in which a late byte would come
    assert_are_whole(node, first)
    with node.operator() as operator:
        assert operator.check() == []


def assert_are_whole(node: Node, first: int) -> None:
    for number in (first, first + 1):
        assert read_locally(node, number) == whole(number)


def test_what_is_put_over_nixl_is_read_on_the_node_and_the_reverse(tmp_path: Path) -> None:
    with Node(tmp_path) as node, engine_of(node) as engine:
        assert engine.put(1) == BLOCKS
        assert read_locally(node, 1) == whole(1)
        assert engine.get(1) == whole(1)
        hashes = chain(1, BLOCKS)
        again = engine.client.put(hashes, engine.pieces)
        assert again.committed_blocks == 0
        assert set(again.states) == {StageState.PRESENT}

        write_locally(node, 2)
        assert engine.get(2) == whole(2)
        assert engine.get(3) == []
        assert node.metric("transport_placed_bytes_total") == BLOCKS * PART_BYTES

        refuses_what_is_not_lent(engine, node)
        with node.operator() as operator:
            assert operator.check() == []
            assert operator.status().staged_blocks == 0


def refuses_what_is_not_lent(engine: Engine, node: Node) -> None:
    pool, session = engine.pool, engine.client.session
    with node.client() as other, other.stage(chain(9, 1)) as local:
        with session.stage(chain(8, 2)) as staged:
            where, offset = staged.transport, staged.offset(0)
            for stage_id, target, length in (
                (staged.id, offset, PART_BYTES + 1),
                (staged.id, local.offset(0), 16),  # another session's slot
                (staged.id + 1, offset, 16),
                (local.id, local.offset(0), 16),  # mapped: not for the network
            ):
                with pytest.raises(UnknownStageError):
                    pool.write(where, stage_id, [Segment(0, target, length)], 10.0)
            with pytest.raises(LeaseExpiredError):
                pool.read(where, staged.id, [Segment(0, offset, 16)], 10.0)
            with pytest.raises(InvalidRequestError):
                pool.write(where, staged.id, [Segment(BLOCKS * PART_BYTES, offset, 1)], 10.0)
            with pytest.raises(InvalidRequestError):
                staged.view(0)
            pool.write(where, staged.id, [Segment(0, offset, PART_BYTES)], 10.0)
            staged.commit([0], [0])
            with pytest.raises(UnknownStageError):
                pool.write(where, staged.id, [Segment(0, offset, 16)], 10.0)
        session.heartbeat()  # the daemon answers in order: it has heard of the abort
        with pytest.raises(UnknownStageError):
            pool.write(where, staged.id, [Segment(0, staged._offsets[1], 16)], 10.0)
    with session.acquire(chain(2, 3)) as lease:
        where, offset = lease.transport, lease.offset(2)
        pool.read(where, lease.id, [Segment(0, offset, PART_BYTES)], 10.0)
    session.heartbeat()
    with pytest.raises(LeaseExpiredError):
        pool.read(where, lease.id, [Segment(0, offset, PART_BYTES)], 10.0)


def test_engines_that_die_or_stop_in_mid_put_leave_slots_that_others_use(tmp_path: Path) -> None:
    with Node(tmp_path) as node:
        with remote_engine(node.grpc, 1, BLOCKS, "peer_write=exit@3") as engine:
            assert engine.line() == "writing"
            await_true(lambda: node.quarantines == 1, "the killed engine's write was given up")
            assert_slots_are_others(node, 100)
        with remote_engine(node.grpc, 2, BLOCKS, "peer_write=pause@3") as engine:
            assert engine.line() == "writing"
            await_true(lambda: node.quarantines == 2, "the stopped engine's write was given up")
            assert_slots_are_others(node, 200)
            engine.signal(signal.SIGCONT)
            assert engine.line().endswith("Error")
            time.sleep(0.5)
            assert_are_whole(node, 200)
        assert node.metric("transport_replaced_agents_total") >= 2
        with engine_of(node) as last:  # the next engine finds the daemon whole
            assert last.put(5) == BLOCKS
            assert read_locally(node, 5) == whole(5)


def test_a_stopped_agent_of_the_daemon_is_killed_before_its_slots_are_used(
    tmp_path: Path,
) -> None:
    """Bytes are under way to it and stay so: nobody else can say that they will not come."""
    with Node(tmp_path) as node, engine_of(node) as engine:
        assert engine.put(1) == BLOCKS
        (agent,) = node.agents()
        os.kill(agent, signal.SIGSTOP)
        with pytest.raises(EmberError):
            engine.put(2)
        await_true(lambda: agent not in node.agents(), "the stopped agent was replaced")
        assert_slots_are_others(node, 100)
        await_true(lambda: bool(node.agents()), "there is another agent")
        assert engine.put(3) == BLOCKS
        assert read_locally(node, 3) == whole(3)


def test_a_daemon_that_stops_or_dies_in_mid_get_is_a_miss_and_writes_nothing_later(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path, faults="peer_serve=pause@2,peer_serve=exit@3")
    with node, engine_of(node) as engine:
        assert engine.put(1) == BLOCKS  # the first to be served
        with pytest.raises((UnavailableError, DeadlineError)):
            engine.get(1)
        assert set(engine.view) == {GUARD}
        os.kill(node.pid, signal.SIGCONT)
        time.sleep(1.0)
        assert set(engine.view) == {GUARD}
        # A session that was lost meanwhile may only be opened again after a pause.
        await_true(lambda: has_died_of_a_get(node, engine), "the daemon took it back and died")
        assert set(engine.view) == {GUARD}
        node.faults = ""
        node.kill()
        node.start()


def has_died_of_a_get(node: Node, engine: Engine) -> bool:
    with pytest.raises(EmberError):
        engine.get(1)
    return not node.is_running
