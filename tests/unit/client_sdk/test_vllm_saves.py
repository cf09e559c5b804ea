"""A save writes to its slots only as long as they are its own."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from client_sdk.attached_pool import AttachedPool
from client_sdk.borrowed import StagedBlocks
from client_sdk.engine.vllm_connector.device import Fence, HostDevice
from client_sdk.engine.vllm_connector.identity import PageGroup
from client_sdk.engine.vllm_connector.pages import EnginePages
from client_sdk.engine.vllm_connector.pieces import Piece
from emberkv_proto.convert import u64s_to_wire
from emberkv_proto.errors import UnavailableError
from emberkv_proto.layout import Group, GroupKind
from emberkv_proto.types import BlockHash
from emberkv_proto.v1 import store_pb2
from tests.helpers.anonymous_pool import AnonymousPool

PART, BLOCKS = 4096, 3
SECONDS = 30.0
OURS = "client_sdk.engine.vllm_connector"
THEIRS = "vllm.distributed.kv_transfer.kv_connector.v1"


@dataclass
class Stats:
    data: dict[str, int] = field(default_factory=dict)


BASES: dict[str, dict[str, type]] = {
    "base": {"KVConnectorMetadata": object, "KVConnectorWorkerMetadata": object},
    "metrics": {"KVConnectorPromMetrics": object, "KVConnectorStats": Stats},
}


@pytest.fixture
def transfer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, without vLLM: it takes base classes from there, and nothing that they do."""
    for name, bases in BASES.items():
        module = ModuleType(f"{THEIRS}.{name}")
        vars(module).update(bases)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    package = __import__(OURS, fromlist=["pages"])
    known = {f"{OURS}.{name}" for name in ("plan", "stats", "transfer")}
    for name in known:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield __import__(f"{OURS}.transfer", fromlist=["WorkerHalf"])
    for name in known:
        sys.modules.pop(name, None)
        package.__dict__.pop(name.rpartition(".")[2], None)


class Session:
    """As much of a session as staged blocks ask."""

    def __init__(self, pool: AttachedPool) -> None:
        self.pool = self.shape = pool
        self.terms = SimpleNamespace(lease_seconds=SECONDS, incarnation=1)
        self.is_alive = True

    def lend(self, borrowed: object) -> None:
        pass

    give_back = lend


class Saver:
    """As much of a client as a save asks."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.committed: list[int] = []
        self.is_closed = False

    def connect(self) -> None:
        raise UnavailableError("later")

    def close(self) -> None:
        self.is_closed = True

    @contextmanager
    def stage(self, hashes: tuple[BlockHash, ...], **_: object) -> Iterator[StagedBlocks]:
        answer = store_pb2.StageResponse(
            stage_id=1,
            states=bytes(len(hashes)),
            offsets=u64s_to_wire([number * PART for number in range(len(hashes))]),
        )
        staged: Any = StagedBlocks(self._session, hashes, answer, time.monotonic())  # type: ignore[arg-type]
        staged.commit = lambda blocks, sums: self.committed.extend(blocks)
        yield staged
        staged._end()


class SlowDevice(HostDevice):
    """Before its work is done, the session may have ended."""

    def __init__(self, session: Session, ends_session: bool) -> None:
        self._session = session
        self._ends_session = ends_session

    def fence(self) -> Fence:
        def wait() -> None:
            self._session.is_alive = not self._ends_session

        return Fence(wait)


class Rig:
    """A worker's half with pages of sevens, and the pool that they are saved into."""

    def __init__(self, transfer: Any, ends_session: bool = False) -> None:
        with AnonymousPool(BLOCKS * PART) as memory:
            self.pool = AttachedPool(memory.descriptor, BLOCKS * PART, PART)
        session = Session(self.pool)
        self.saver = Saver(session)
        group = PageGroup(Group(GroupKind.FULL, 1, PART), ("layer",), 16, PART, 1)
        sevens = torch.full((BLOCKS, PART), 7, dtype=torch.uint8)
        pages = EnginePages({"layer": sevens}, group, BLOCKS)
        self.half = transfer.WorkerHalf(
            [transfer.GroupLink(pages, self.saver, self.saver)],
            SlowDevice(session, ends_session),
            load_seconds=SECONDS,
            verifies=False,
        )
        hashes = tuple(BlockHash(bytes([number]) * 32) for number in range(BLOCKS))
        self.half.save([transfer.SavePlan(1, "request", 0, hashes, None, (0, 1, 2), None)])
        self.half.leave({"request"})


@pytest.mark.parametrize("ends_session", [False, True])
def test_slots_of_a_session_that_ended_before_the_copy_are_not_written(
    transfer: Any, ends_session: bool
) -> None:
    rig = Rig(transfer, ends_session)
    assert rig.half.take(wait_seconds=SECONDS).sent == {"request"}
    rig.half.close()
    assert rig.saver.committed == ([] if ends_session else [0, 1, 2])
    assert set(rig.pool.mapping.array.tolist()) == ({0} if ends_session else {7})
    assert rig.half.take_stats().data.get("lost_saves", 0) == ends_session


@pytest.mark.parametrize(("owner", "copy"), [(EnginePages, "save"), (Piece, "store")])
def test_a_close_waits_for_the_copy_under_way_and_ends_the_session_after_it(
    transfer: Any, monkeypatch: pytest.MonkeyPatch, owner: type, copy: str
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    closed_in_mid_copy: list[bool] = []
    copies = getattr(owner, copy)

    def slow(*args: Any) -> None:
        begun.set()
        assert go_on.wait(SECONDS)
        copies(*args)
        closed_in_mid_copy.append(rig.saver.is_closed)

    with monkeypatch.context() as patched:
        patched.setattr(owner, copy, slow)
        rig = Rig(transfer)
        assert begun.wait(SECONDS)
        closer = threading.Thread(target=rig.half.close)
        closer.start()
        closer.join(0.2)
        assert closer.is_alive(), "closed while a copy was under way"
        go_on.set()
        closer.join(SECONDS)
        assert not closer.is_alive()
        assert rig.half.take(wait_seconds=SECONDS).sent == {"request"}
    assert closed_in_mid_copy == [False]
