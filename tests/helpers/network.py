"""Two network namespaces, for one test where that is allowed; otherwise it is skipped.

                 bridge (this namespace, .254)
                 /                          \\
    a: control 10.213.N.1            b: control 10.213.N.2
    a: data    10.214.N.1  ────────  b: data    10.214.N.2      the link that can be cut
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

SIDES = ("a", "b")
_NUMBERS = itertools.count(os.getpid())
"""Never one twice: the kernel takes the devices of a deleted namespace away some time later."""


@dataclass(frozen=True)
class TwoHosts:
    """Names and addresses of what stands in the picture."""

    number: int

    def namespace(self, side: str) -> str:
        return f"ember{self.number}{side}"

    def control(self, side: str) -> str:
        return f"10.213.{self.number}.{1 + SIDES.index(side)}"

    def data(self, side: str) -> str:
        return f"10.214.{self.number}.{1 + SIDES.index(side)}"

    def bridge_address(self) -> str:
        return f"10.213.{self.number}.254"

    def inside(self, side: str, command: list[str]) -> list[str]:
        """The command, run in the namespace of a side."""
        return ["ip", "netns", "exec", self.namespace(side), *command]

    def cut(self) -> None:
        _ip("-n", self.namespace("a"), "link", "set", "data", "down")

    def mend(self) -> None:
        _ip("-n", self.namespace("a"), "link", "set", "data", "up")


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    if shutil.which("ip") is None:
        pytest.skip("there is no ip(8): apt-get install iproute2")
    hosts = TwoHosts(next(_NUMBERS) % 250)
    bridge = f"emberbr{hosts.number}"
    with ExitStack() as stack:
        try:
            for side in SIDES:
                _ip("netns", "add", hosts.namespace(side))
                stack.callback(_ip, "netns", "del", hosts.namespace(side))
        except PermissionError as error:
            pytest.skip(f"network namespaces need root: {error}")
        try:
            _ip("link", "add", bridge, "type", "bridge")
        except PermissionError as error:
            pytest.skip(f"the kernel makes no bridge: {error}")
        stack.callback(_ip, "link", "del", bridge)
        _ip("addr", "add", f"{hosts.bridge_address()}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for side in SIDES:
            outer = f"emberv{hosts.number}{side}"
            inner = hosts.namespace(side)
            _ip("link", "add", outer, "type", "veth", "peer", "name", "control", "netns", inner)
            _ip("link", "set", outer, "master", bridge, "up")
            _set_up(inner, "control", hosts.control(side))
            _ip("-n", inner, "link", "set", "lo", "up")
        a, b = map(hosts.namespace, SIDES)
        _ip("-n", a, "link", "add", "data", "type", "veth", "peer", "name", "data", "netns", b)
        for side in SIDES:
            _set_up(hosts.namespace(side), "data", hosts.data(side))
        yield hosts


def _set_up(namespace: str, device: str, address: str) -> None:
    _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", device)
    _ip("-n", namespace, "link", "set", device, "up")


def _ip(*arguments: str) -> None:
    """Raises PermissionError with what ip says."""
    done = subprocess.run(
        ["ip", *arguments], capture_output=True, text=True, timeout=90, check=False
    )
    if done.returncode:
        raise PermissionError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
