"""What the service manager hears, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from client_sdk.aio import timeout
from store_daemon.notify import ServiceManager


@contextmanager
def manager_socket(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(address)
        heard.settimeout(30)
        yield heard


@pytest.mark.parametrize("is_abstract", [False, True])
def test_the_manager_hears_each_turn_of_the_daemons_life(tmp_path: Path, is_abstract: bool) -> None:
    name = f"emberkv-test-{os.getpid()}"
    bound = f"\0{name}" if is_abstract else str(tmp_path / "notify")
    told = f"@{name}" if is_abstract else bound
    with manager_socket(bound) as heard:
        manager = ServiceManager.of_environment({"NOTIFY_SOCKET": told}, os.getpid())
        manager.starting("reading the SSD")
        manager.ready("serving 3 blocks")
        manager.reloading()
        manager.stopping()
        manager.close()
        words = [heard.recv(4096).decode().split("\n") for _ in range(4)]
    assert words[0] == ["STATUS=recovering: reading the SSD"]
    assert words[1] == ["READY=1", "STATUS=serving 3 blocks", f"MAINPID={os.getpid()}"]
    assert words[2][0] == "RELOADING=1"
    assert int(words[2][1].removeprefix("MONOTONIC_USEC=")) > 0
    assert words[3] == ["STOPPING=1", "STATUS=draining"]


async def test_the_watchdog_is_kept_only_while_all_is_well(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    healthy = [True]
    with manager_socket(path) as heard:
        environ = {"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "20000", "WATCHDOG_PID": "7"}
        manager = ServiceManager.of_environment(environ, 7)
        assert manager.watchdog_seconds == 0.02
        task = asyncio.ensure_future(manager.keep_watchdog(lambda: healthy[0]))
        async with timeout(30):
            for _ in range(3):
                assert await asyncio.to_thread(heard.recv, 100) == b"WATCHDOG=1"
        healthy[0] = False
        heard.setblocking(False)
        await asyncio.sleep(0.05)
        with contextlib.suppress(BlockingIOError):
            while True:
                heard.recv(100)
        await asyncio.sleep(0.1)
        with pytest.raises(BlockingIOError):
            heard.recv(100)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        manager.close()


async def test_outside_of_a_service_nothing_is_said_and_nothing_fails() -> None:
    manager = ServiceManager.of_environment({}, 1)
    manager.ready("x")
    manager.stopping()
    await manager.keep_watchdog(lambda: True)
    manager.close()


def test_another_process_watchdog_is_not_ours() -> None:
    environ = {"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "8"}
    assert ServiceManager.of_environment(environ, 7).watchdog_seconds == 0.0
    assert ServiceManager.of_environment({"WATCHDOG_USEC": "junk"}, 7).watchdog_seconds == 0.0


def test_a_manager_that_is_gone_or_unknown_costs_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        manager = ServiceManager(str(tmp_path / "nobody"))
        manager.ready("x")
        manager.close()
        ServiceManager("vsock:2:1234").ready("x")
    assert "cannot be told READY=1" in caplog.text
    assert "vsock:2:1234" in caplog.text
