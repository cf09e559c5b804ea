"""The reference engine with a real daemon: saves, loads, and goes on when the daemon does not."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from client_sdk.engine.torch_engine.__main__ import main
from client_sdk.engine.torch_engine.config import EngineSection
from emberkv_proto.types import Source
from tests.helpers.daemon_process import ROOT, DaemonProcess
from tests.helpers.torch_engines import (
    TINY,
    Heard,
    Listener,
    ask,
    running_engine,
    tiny_config,
    uncached_answers,
)

pytestmark = pytest.mark.process
PROMPTS = [[n, *range(100, 160), n] for n in range(3)]
ANSWER = 6


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path / "d", ssd_bytes=8 << 20) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    return uncached_answers(PROMPTS, ANSWER)


@pytest.fixture(scope="module")
def libuv() -> None:
    """libuv opens one pipe at its first loop and keeps it for the whole process."""
    uvloop.new_event_loop().close()


def config(daemon: DaemonProcess, **changes: Any) -> EngineSection:
    return tiny_config(
        socket_path=str(daemon.socket_path),
        store_timeout_seconds=3.0,
        **{"load_patience_seconds": 20.0, **changes},
    )


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in 120 s"
        time.sleep(0.01)


def tokens_of(heard: list[Heard]) -> list[tuple[int, ...]]:
    return [one.tokens for one in heard]


def test_a_new_engine_loads_from_the_daemon_what_the_old_one_saved(
    daemon: DaemonProcess, expected: list[tuple[int, ...]]
) -> None:
    cfg = config(daemon)
    with running_engine(cfg) as engine:
        assert tokens_of(ask(engine, PROMPTS, ANSWER)) == expected
    with daemon.operator() as operator:
        status = operator.status()
        assert status.leases == status.staged_blocks == 0
    with running_engine(cfg) as engine:
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            heard = ask(engine, [prompt], ANSWER)[0]
            assert heard.tokens == tokens
            assert heard.cached == {Source.DRAM: (len(prompt) - 1) // 4 * 4}
    with daemon.operator() as operator:
        assert operator.check() == []
        assert operator.status().leases == 0


def test_the_daemon_hears_who_the_engine_is(daemon: DaemonProcess) -> None:
    with running_engine(config(daemon, engine_id="e7")) as engine, daemon.operator() as operator:
        until(lambda: [e.engine_id for e in operator.status().engines] == ["e7"])
        info = operator.status().engines[0]
        assert (info.url, info.model) == ("http://127.0.0.1:1", engine.cfg.model)
        assert info.namespace_id == engine.engine.namespace.id
        assert info.block_tokens == engine.cfg.block_tokens
        daemon.kill()
        daemon.start()
        until(lambda: _engines(daemon) == ["e7"])


def _engines(daemon: DaemonProcess) -> list[str]:
    with daemon.operator() as operator:
        return [engine.engine_id for engine in operator.status().engines]


def test_answers_stay_the_same_while_the_daemon_dies_and_comes_back(
    daemon: DaemonProcess, expected: list[tuple[int, ...]]
) -> None:
    cfg = config(daemon, prefix_cache=False)
    with running_engine(cfg) as engine:
        listeners = [Listener() for _ in PROMPTS]
        for prompt, listener in zip(PROMPTS, listeners, strict=True):
            engine.submit(prompt, ANSWER, b"", listener.events.put)
        daemon.kill()
        assert tokens_of([listener.answer() for listener in listeners]) == expected
        assert tokens_of(ask(engine, PROMPTS, ANSWER)) == expected
        daemon.start()

        def saves_again() -> bool:
            assert tokens_of(ask(engine, PROMPTS, ANSWER)) == expected
            return engine.count("loaded_blocks") > 0

        until(saves_again)
        heard = ask(engine, PROMPTS, ANSWER)
        assert tokens_of(heard) == expected
        assert all(one.cached == {Source.DRAM: 60} for one in heard)


def test_a_stopped_daemon_costs_no_more_than_the_deadline(
    daemon: DaemonProcess, expected: list[tuple[int, ...]]
) -> None:
    with running_engine(config(daemon)) as engine:
        ask(engine, PROMPTS, ANSWER)
    with running_engine(config(daemon, load_patience_seconds=0.2)) as engine:
        until(lambda: _engines(daemon) == ["engine"])
        daemon.pause()
        try:
            began = time.monotonic()
            heard = ask(engine, PROMPTS, ANSWER)
            assert time.monotonic() - began < 20.0
        finally:
            daemon.resume()
        assert tokens_of(heard) == expected


def test_preemption_swaps_through_the_daemon(daemon: DaemonProcess) -> None:
    prompts = [[n, *range(40)] for n in range(3)]
    with running_engine(config(daemon, num_blocks=24, prefix_cache=False)) as engine:
        heard = ask(engine, prompts, 30)
        assert engine.count("preempted") > 0
        assert engine.count("loaded_blocks") > 0
    assert tokens_of(heard) == uncached_answers(prompts, 30)


def test_the_engine_process_loads_serves_and_ends_after_the_last_answer(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    prompt = list(range(60))
    with running_engine(config(daemon)) as engine:
        expected = ask(engine, [prompt], 100)[0].tokens
    endpoint, config_file = tmp_path / "engine.url", tmp_path / "engine.yaml"
    config_file.write_text(json.dumps({"engine": TINY}))
    command = [sys.executable, "-m", "client_sdk.engine.torch_engine", "--config", config_file]
    for setting in (
        "port=0",
        f"endpoint_file={endpoint}",
        f"socket_path={daemon.socket_path}",
        "load_patience_seconds=20",
    ):
        command += ["--set", f"engine.{setting}"]
    body = {
        "prompt": prompt,
        "max_tokens": 100,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        try:
            until(lambda: endpoint.exists() or process.poll() is not None)
            request = urllib.request.Request(  # noqa: S310 - our own http URL
                json.loads(endpoint.read_text())["url"] + "/v1/completions",
                json.dumps(body).encode(),
            )
            with urllib.request.urlopen(request, timeout=90) as response:  # noqa: S310
                first = response.readline()
                process.send_signal(signal.SIGTERM)  # in mid-answer, which is still finished
                said = _events(first + response.read())
            assert process.wait(60) == 0
        finally:
            if process.poll() is None:
                process.kill()
    tokens = [token for event in said[:-1] for token in event["choices"][0]["token_ids"]]
    assert tuple(tokens) == expected
    assert said[-1]["usage"]["prompt_tokens_details"]["dram_tokens"] == 56


def _events(stream: bytes) -> list[Any]:
    parts = stream.decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


@pytest.mark.usefixtures("libuv")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "engine.prot=1"], "did you mean 'port'"),
        (["--set", "engine.heads=3"], "multiple of kv_heads"),
        (["--config", "/nowhere/engine.yaml"], "cannot be read"),
        (["--set", "engine.port=0", "--set", f"engine.socket_path=/{'s' * 120}"], "107"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
