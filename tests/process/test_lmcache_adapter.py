"""LMCache's L2 plugin over a real daemon: what its controllers do with an adapter."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from emberkv_proto.errors import ConfigError
from tests.helpers.daemon_process import MIB, DaemonProcess
from tests.helpers.lmcache_doubles import MemoryObj, ObjectKey, lmcache_doubles
from tests.helpers.resp import value_of

pytestmark = pytest.mark.process
LENGTH = 100_000
SECONDS = 60.0


@pytest.fixture
def adapter_type() -> Iterator[Any]:
    with lmcache_doubles():
        yield import_module("client_sdk.engine.lmcache_adapter").EmberL2Adapter


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path, capacity_bytes=16 * MIB, extent_bytes=4 * MIB) as process:
        yield process


def key(number: int, **fields: Any) -> ObjectKey:
    return ObjectKey(chunk_hash=b"%032d" % number, **fields)


def finished(fd: int, ask: Callable[[], Any]) -> Any:
    """The result of a task, once its event came."""
    for _ in range(50):
        ready, _, _ = select.select([fd], [], [], SECONDS)
        assert ready, "no event"
        os.eventfd_read(fd)
        if (result := ask()) is not None:
            return result
    raise AssertionError("events without a result")


def store(adapter: Any, keys: list[ObjectKey], contents: list[bytes]) -> int:
    task = adapter.submit_store_task(keys, [MemoryObj(content) for content in contents])
    done = finished(adapter.get_store_event_fd(), lambda: adapter.pop_completed_store_tasks())
    return int(done[task])


def look_up(adapter: Any, keys: list[ObjectKey], length: int | None = LENGTH) -> list[bool]:
    layouts = {}
    if length is not None:
        shape = SimpleNamespace(numel=lambda: length // 2)
        layouts = {0: SimpleNamespace(shapes=[shape], dtypes=[SimpleNamespace(itemsize=2)])}
    task = adapter.submit_lookup_and_lock_task(keys, layouts)
    fd = adapter.get_lookup_and_lock_event_fd()
    bits: list[bool] = finished(fd, lambda: adapter.query_lookup_and_lock_result(task)).bits
    assert adapter.query_lookup_and_lock_result(task) is None, "answered twice"
    return bits


def load(adapter: Any, keys: list[ObjectKey], length: int = LENGTH) -> list[bytes | None]:
    targets = [MemoryObj(bytes(length)) for _ in keys]
    task = adapter.submit_load_task(keys, targets)
    loaded = finished(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task)).bits
    return [target.content if bit else None for target, bit in zip(targets, loaded, strict=True)]


def test_objects_are_stored_locked_loaded_and_survive_both_ends(
    daemon: DaemonProcess, adapter_type: Any
) -> None:
    params = {"socket_path": str(daemon.socket_path)}
    keys = [key(number) for number in range(6)]
    contents = [value_of(number, LENGTH) for number in range(6)]
    adapter = adapter_type(params)
    assert store(adapter, keys, contents) == 6 * LENGTH
    assert store(adapter, keys[:1], contents[:1]) == LENGTH, "again is no failure"
    assert look_up(adapter, [*keys, key(99)]) == [True] * 6 + [False]
    assert load(adapter, keys) == contents
    assert adapter.report_status()["locked_objects"] == 6
    adapter.submit_unlock(keys)
    assert adapter.report_status()["locked_objects"] == 0
    adapter.check_integrity()
    adapter.close()
    adapter.close()

    daemon.kill()
    daemon.start()
    other = adapter_type(params)
    assert look_up(other, keys[:3]) == [True] * 3
    assert load(other, [keys[2], keys[5], key(99)]) == [contents[2], contents[5], None]
    other.close()


def test_whatever_stands_in_a_key_keeps_objects_apart(
    daemon: DaemonProcess, adapter_type: Any
) -> None:
    adapter = adapter_type({"socket_path": str(daemon.socket_path)})
    others = [
        key(1, model_name="other"),
        key(1, kv_rank=1),
        key(1, object_group_id=1),
        key(1, cache_salt="tenant"),
    ]
    assert store(adapter, [key(1)], [value_of(1, LENGTH)]) == LENGTH
    assert look_up(adapter, others) == [False] * 4
    assert store(adapter, others, [value_of(other, LENGTH) for other in others]) == 4 * LENGTH
    assert load(adapter, others) == [value_of(other, LENGTH) for other in others]
    assert load(adapter, [key(1)], LENGTH - 2) == [None], "another length is another object"
    assert look_up(adapter, [key(1)], None) == [True], "a length that was met"
    adapter.close()
    apart = adapter_type({"socket_path": str(daemon.socket_path), "isolation_domain": "b"})
    assert look_up(apart, [key(1)]) == [False]
    apart.close()


def test_a_daemon_that_is_away_is_a_miss_and_a_failed_store(
    daemon: DaemonProcess, adapter_type: Any
) -> None:
    adapter = adapter_type({"socket_path": str(daemon.socket_path), "timeout_seconds": 0.5})
    content = value_of(1, LENGTH)
    assert store(adapter, [key(1)], [content]) == LENGTH
    assert look_up(adapter, [key(1)]) == [True]
    daemon.kill()
    assert load(adapter, [key(1)]) == [None]
    adapter.submit_unlock([key(1), key(2)])
    assert look_up(adapter, [key(1)]) == [False]
    assert store(adapter, [key(2)], [content]) == -1
    assert not adapter.report_status()["is_healthy"]
    adapter.close()


def test_what_does_not_fit_fails_and_unknown_parameters_are_refused(
    daemon: DaemonProcess, adapter_type: Any
) -> None:
    with pytest.raises(ConfigError, match="adapter_params"):
        adapter_type({"socket_path": "x", "sockets": 1})
    with pytest.raises(ConfigError, match="adapter_params"):
        adapter_type({})
    adapter = adapter_type({"socket_path": str(daemon.socket_path)})
    assert store(adapter, [key(1)], [bytes(5 * MIB)]) == -1, "longer than an extent"
    assert load(adapter, [key(1)], 5 * MIB) == [None]
    adapter.close()
