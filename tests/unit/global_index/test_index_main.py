"""Settings and the command line: a user's mistake is one line and exit status 2."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import uvloop

from client_sdk.settings import load_settings
from emberkv_proto import __version__
from emberkv_proto.errors import ConfigError
from global_index.__main__ import main
from global_index.config import IndexSection, IndexSettings
from global_index.dict_index import DictIndex
from global_index.embedded import open_index
from global_index.memory_index import MemoryIndex


@pytest.fixture(scope="module", autouse=True)
def libuv() -> None:
    """libuv opens one pipe at its first loop and keeps it for the whole process."""
    uvloop.new_event_loop().close()


def test_settings_of_a_list_of_nodes_are_read() -> None:
    settings = load_settings(IndexSettings, None, ["index.nodes=[h1:7100,'[::1]:7100']"], {})
    assert settings.index.nodes == ("h1:7100", "[::1]:7100")


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("index.nodes=[localhost]", "host:port"),
        ("index.nodes=['h:99999']", "host:port"),
        ("index.nodes=['h:1','h:1']", "twice"),
        ("index.gone_seconds=1", "suspect_seconds"),
        ("index.capacity_blocks=-1", "capacity_blocks"),
        ("index.backend=rust", "backend"),
        ("index.capcity_blocks=1", "capacity_blocks"),
    ],
)
def test_wrong_setting_is_one_line_that_names_it(
    override: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--set", override]) == 2
    error = capsys.readouterr().err
    assert word in error
    assert error.count("\n") == 1


def test_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = ["--set", f"index.port={port}", "--set", "index.backend=python"]
        assert main(arguments) == 2
    error = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}" in error


def test_version_is_the_contract_s(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert __version__ in capsys.readouterr().out


def test_backend_is_chosen_by_name() -> None:
    assert isinstance(open_index(IndexSection(backend="python")), DictIndex)
    assert isinstance(open_index(IndexSection(backend="numba")), MemoryIndex)


def test_missing_numba_falls_back_or_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "global_index.memory_index", None)
    assert isinstance(open_index(IndexSection(backend="auto")), DictIndex)
    with pytest.raises(ConfigError, match=r"index\.backend"):
        open_index(IndexSection(backend="numba"))


@pytest.mark.process
def test_process_serves_until_sigterm_and_needs_no_kernel_cache(tmp_path: Path) -> None:
    """With a cache directory that cannot be written the kernels are compiled without one."""
    blocker = tmp_path / "file"
    blocker.write_text("")
    environment = os.environ | {"NUMBA_CACHE_DIR": str(blocker / "below")}
    wanted = ("port=0", "metrics_port=0", "backend=numba", "capacity_blocks=4096")
    arguments = [part for setting in wanted for part in ("--set", f"index.{setting}")]
    process = subprocess.Popen(
        [sys.executable, "-m", "global_index", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    lines = []
    try:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if "serving on" in line:
                break
        process.terminate()
        assert process.wait(timeout=90) == 0, "".join(lines)
    finally:
        process.kill()
        process.wait(timeout=90)
        process.stderr.close()  # type: ignore[union-attr]
    assert any("serving on" in line for line in lines), "".join(lines)


def test_loop_is_left_clean_after_a_refused_start() -> None:
    assert main(["--set", "index.host=256.256.256.256", "--set", "index.backend=python"]) == 2
    asyncio.run(asyncio.sleep(0))
