"""vLLM, SGLang and LMCache on one daemon at once: each has its own back, and nothing of others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import _vllm
from tests.helpers.cluster import wait_until
from tests.helpers.daemon_process import MIB, DaemonProcess
from tests.helpers.lmcache_bench import LmcacheBench, assert_all_was_stored_and_loaded
from tests.helpers.resp import TOKEN
from tests.helpers.sglang_process import extra_config
from tests.helpers.sglang_server import PAGE_TOKENS, SglangServer, storage_options

pytestmark = pytest.mark.timeout(3000)
PROMPT_TOKENS = 490
"""With the answer no further page is filled."""
FULL = (PROMPT_TOKENS - 1) // PAGE_TOKENS * PAGE_TOKENS
PAGES = FULL // PAGE_TOKENS
PATIENT: dict[str, Any] = {"timeout_seconds": 60.0, "load_seconds": 60.0}


@contextmanager
def open_daemon(directory: Path) -> Iterator[DaemonProcess]:
    directory.mkdir()
    token = directory / "token"
    token.touch(0o600)
    token.write_text(TOKEN)
    settings = {
        "daemon.lease_seconds": 180.0,
        "daemon.stage_seconds": 180.0,
        "resp.port": 0,
        "resp.token_file": token,
    }
    with DaemonProcess(directory, capacity_bytes=256 * MIB, settings=settings) as daemon:
        wait_until(lambda: (daemon.data_dir / "endpoints.json").exists(), "the door is open")
        yield daemon


def resp_adapter(daemon: DaemonProcess) -> dict[str, Any]:
    host, _, port = daemon.endpoints["resp_address"].rpartition(":")
    address = {"host": host, "port": int(port), "password": TOKEN}
    return {"type": "resp", "num_workers": 2, **address}


def plugin(daemon: DaemonProcess) -> dict[str, Any]:
    return {
        "type": "plugin",
        "module_path": "client_sdk.engine.lmcache_adapter",
        "class_name": "EmberL2Adapter",
        "adapter_params": {"socket_path": str(daemon.socket_path)},
    }


def await_blocks(daemon: DaemonProcess, blocks: int) -> None:
    """Wait until the saves, which nobody waits for, have ended; no more may come."""
    with daemon.operator() as operator:
        wait_until(
            lambda: operator.status().tiers[0].blocks >= blocks, f"{blocks} blocks are saved"
        )
        assert operator.check() == []
        assert operator.status().tiers[0].blocks == blocks


def test_lmcaches_own_resp_client_and_our_plugin_in_it_share_a_daemon(tmp_path: Path) -> None:
    with (
        open_daemon(tmp_path / "daemon") as daemon,
        closing_bench(tmp_path / "resp", resp_adapter(daemon)) as through_the_door,
        closing_bench(tmp_path / "plugin", plugin(daemon)) as through_the_pool,
    ):
        # Both use the same keys; a lookup that found the other's would find too many.
        assert_all_was_stored_and_loaded(through_the_door.results())
        assert_all_was_stored_and_loaded(through_the_pool.results())
        with daemon.operator() as operator:
            assert operator.check() == []
        assert daemon.metrics()["emberkv_store_resp_values_stored_total"] > 0


@contextmanager
def closing_bench(directory: Path, adapter: dict[str, Any]) -> Iterator[LmcacheBench]:
    bench = LmcacheBench(directory, adapter)
    try:
        yield bench
    finally:
        bench.end()


def test_vllm_and_sglang_have_their_own_back_and_nothing_of_each_other(
    model: Path, tmp_path: Path
) -> None:
    if not _vllm.python().exists():
        pytest.skip("NOT RUN: vLLM beside SGLang; `make test-vllm` installs vLLM")
    rng = random.Random(5)
    first, second = ([rng.randrange(250) for _ in range(PROMPT_TOKENS)] for _ in range(2))
    with open_daemon(tmp_path / "daemon") as daemon:
        config = extra_config(daemon.socket_path, prefetch_threshold=PAGE_TOKENS, **PATIENT)
        sglang = SglangServer(tmp_path / "sglang", model, *storage_options(config))
        vllm = _vllm.Engine(
            tmp_path / "vllm",
            model,
            kv_transfer_config=_vllm.transfer_config(daemon.socket_path, **PATIENT),
        )
        with sglang, vllm:
            _ask_both(daemon, sglang, vllm, first, second)
            with closing_bench(tmp_path / "lmcache", resp_adapter(daemon)) as lmcache:
                _find_again(sglang, vllm, first, second)
                assert_all_was_stored_and_loaded(lmcache.results())
            with daemon.operator() as operator:
                assert operator.check() == []
            assert sglang.counter("errors") == 0


def _ask_both(
    daemon: DaemonProcess,
    sglang: SglangServer,
    vllm: _vllm.Engine,
    first: list[int],
    second: list[int],
) -> None:
    """What one has stored is asked of the other, which finds nothing and stores its own."""
    assert vllm.generate([{"tokens": first}])[0]["cached"] == 0
    await_blocks(daemon, PAGES)
    for number, prompt in enumerate((first, second), 2):
        answer = sglang.ask(prompt)
        assert (answer.cached_tokens, answer.stored_tokens) == (0, 0)
        await_blocks(daemon, number * PAGES)
    assert vllm.generate([{"tokens": second}])[0]["cached"] == 0
    await_blocks(daemon, 4 * PAGES)


def _find_again(
    sglang: SglangServer, vllm: _vllm.Engine, first: list[int], second: list[int]
) -> None:
    """Each forgets what is in its own cache and has all full pages back from the daemon."""
    vllm.forget()
    sglang.forget()
    for prompt in (first, second):
        assert vllm.generate([{"tokens": prompt}])[0]["cached"] == FULL
        assert sglang.ask(prompt).stored_tokens == FULL
