"""A real SGLang server on the CPU, to be asked, killed and started again."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._vllm import ANSWER_SECONDS, START_SECONDS, HttpServer
from tests.helpers.sglang_process import environment, python

PAGE_TOKENS = 32
ADMIN_KEY = "admin-of-a-test"
STORAGE = "/hicache/storage-backend"


def make_model(directory: Path) -> None:
    """Write the tiny seeded model that the vLLM tests use, with SGLang's environment."""
    subprocess.run(
        [python(), "-m", "client_sdk.engine.tiny_llama", directory],
        check=True,
        timeout=START_SECONDS,
        env=environment(),
        capture_output=True,
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """What a prompt led to."""

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of each output token: they tell of every byte that was read, where the token may not."""
    stored_tokens: int
    """How many of the prompt's came from the storage backend."""
    cached_tokens: int


class SglangServer(HttpServer):
    """`with SglangServer(...) as server:` answers on `server.url`; its host pool is on."""

    name = "SGLang"
    start_seconds = 900.0

    def __init__(self, directory: Path, model: Path, *options: str, **variables: str) -> None:
        command = [
            str(python()),
            "-m",
            "sglang.launch_server",
            f"--model-path={model}",
            "--served-model-name=tiny",
            "--device=cpu",
            "--attention-backend=torch_native",
            "--sampling-backend=pytorch",
            "--dtype=float32",
            f"--page-size={PAGE_TOKENS}",
            "--max-total-tokens=8192",
            "--context-length=4096",
            "--mem-fraction-static=0.5",
            "--disable-cuda-graph",
            "--disable-overlap-schedule",
            "--skip-tokenizer-init",
            "--enable-hierarchical-cache",
            "--hicache-ratio=2",
            "--hicache-write-policy=write_through",
            "--hicache-storage-prefetch-policy=wait_complete",
            "--enable-metrics",
            "--enable-cache-report",
            f"--admin-api-key={ADMIN_KEY}",
            *options,
        ]
        super().__init__(directory, command, environment(**variables))

    def ask(self, tokens: Sequence[int], salt: str | None = None) -> Answer:
        """Complete a prompt greedily, by 16 tokens."""
        body: dict[str, Any] = {
            "input_ids": list(tokens),
            "sampling_params": {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True},
            "return_logprob": True,
        }
        if salt is not None:
            body["cache_salt"] = salt
        answer = self.post("/generate", body)
        told = answer["meta_info"]
        details = told["cached_tokens_details"] or {}
        return Answer(
            tuple(answer["output_ids"]),
            tuple(float(row[0]) for row in told["output_token_logprobs"]),
            int(details.get("storage") or 0),
            int(told["cached_tokens"]),
        )

    def forget(self) -> None:
        """Empty the device's and the host's pool; the storage stays."""
        self.administer("POST", "/flush_cache?timeout=60", None)

    def attach(self, config: dict[str, Any], policy: str = "wait_complete") -> str:
        """Attach our backend to the running server; what it says."""
        return self.administer(
            "PUT",
            STORAGE,
            {
                "hicache_storage_backend": "dynamic",
                "hicache_storage_backend_extra_config_json": json.dumps(config),
                "hicache_storage_prefetch_policy": policy,
            },
        )

    def detach(self) -> str:
        return self.administer("DELETE", STORAGE, None)

    def administer(self, method: str, path: str, body: dict[str, Any] | None) -> str:
        request = urllib.request.Request(  # noqa: S310
            self.url + path,
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:  # noqa: S310
            said: str = answer.read().decode()
        return said

    def counter(self, name: str) -> float:
        """One of the backend's counters: `loaded_pages` and the like."""
        wanted = f"sglang:emberkv_{name}_total"
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith(wanted)]
        return sum(float(line.split()[-1]) for line in lines)


def storage_options(config: dict[str, Any]) -> list[str]:
    return [
        "--hicache-storage-backend=dynamic",
        f"--hicache-storage-backend-extra-config={json.dumps(config)}",
    ]
