"""deploy/emberkv-store.service agrees with the daemon that it starts."""

from __future__ import annotations

import configparser
import importlib.util
from pathlib import Path

from client_sdk.server_main import USER_MISTAKE
from store_daemon.config import DaemonSection

UNIT = Path(__file__).parents[3] / "deploy" / "emberkv-store.service"


def service() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(UNIT.read_text())
    return parser["Service"]


def test_it_waits_for_readiness_and_for_the_drain() -> None:
    unit, defaults = service(), DaemonSection()
    assert unit["Type"] == "notify"
    assert float(unit["TimeoutStopSec"]) > 2 * defaults.drain_seconds
    assert float(unit["WatchdogSec"]) >= 10
    assert "-HUP" in unit["ExecReload"]


def test_it_starts_our_module_and_gives_up_on_a_users_mistake() -> None:
    unit = service()
    words = unit["ExecStart"].split()
    assert words[1] == "-m"
    assert importlib.util.find_spec(words[2]) is not None
    assert unit["RestartPreventExitStatus"] == str(USER_MISTAKE)


def test_its_directories_are_the_defaults_and_the_pool_survives_it() -> None:
    unit, defaults = service(), DaemonSection()
    assert defaults.socket_path.parent == Path("/run") / unit["RuntimeDirectory"]
    assert defaults.data_dir == Path("/var/lib") / unit["StateDirectory"]
    assert unit["RemoveIPC"] == "no"
