"""Runs in vLLM's environment: an engine in this process, told what to do line by line.

The first line of standard input is the engine's options, each further one a request; each gets
one line of JSON on standard output. What the engine prints goes to standard error; some versions
print while they are imported, so that is done late.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM


def prompt(row: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"prompt_token_ids": row["tokens"]}
    if row.get("salt"):
        made["cache_salt"] = row["salt"]
    return made


def generate(llm: LLM, job: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    rows = job["prompts"]
    adapters = [
        LoRARequest(row["lora"]["name"], row["lora"]["id"], row["lora"]["path"])
        if row.get("lora")
        else None
        for row in rows
    ]
    outputs = llm.generate(
        [prompt(row) for row in rows],
        SamplingParams(temperature=0, max_tokens=job.get("max_tokens", 16), ignore_eos=True),
        lora_request=adapters if any(adapters) else None,
        use_tqdm=False,
    )
    return [
        {
            "tokens": list(output.outputs[0].token_ids),
            "finish": output.outputs[0].finish_reason,
            "cached": output.num_cached_tokens,
        }
        for output in outputs
    ]


class _LeftOut:
    """Statistics of steps without output, which `LLM` of vLLM 0.27 does not record."""

    def __init__(self, llm: LLM) -> None:
        self._core, self._loggers = llm.llm_engine.engine_core, llm.llm_engine.logger_manager
        self._get_output, self._record = self._core.get_output, self._loggers.record
        self._stats: list[Any] = []
        self._core.get_output, self._loggers.record = self._got_output, self._recorded

    def record(self) -> None:
        for stats in tuple(self._stats):
            self._recorded(scheduler_stats=stats, iteration_stats=None)

    def _got_output(self) -> Any:
        outputs = self._get_output()
        stats = outputs.scheduler_stats
        if stats is not None and stats.kv_connector_stats:
            self._stats.append(stats)
        return outputs

    def _recorded(self, scheduler_stats: Any, **more: Any) -> None:
        self._stats = [stats for stats in self._stats if stats is not scheduler_stats]
        self._record(scheduler_stats=scheduler_stats, **more)


def counters(llm: LLM, left_out: _LeftOut) -> dict[str, float]:
    """The connector's own metrics, and the engine's count of preemptions."""
    left_out.record()
    wanted = ("vllm:emberkv_", "vllm:num_preemptions")
    return {
        metric.name: metric.value for metric in llm.get_metrics() if metric.name.startswith(wanted)
    }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    from vllm import LLM
    from vllm.config import KVEventsConfig, KVTransferConfig

    options = json.loads(sys.stdin.readline())
    transfer = options.pop("kv_transfer_config", None)
    if transfer is not None:
        options["kv_transfer_config"] = KVTransferConfig(**transfer)
    events = options.pop("kv_events_config", None)
    if events is not None:
        options["kv_events_config"] = KVEventsConfig(**events)
    llm = LLM(**options)
    left_out = _LeftOut(llm)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        answer: object
        if job["do"] == "generate":
            answer = generate(llm, job)
        elif job["do"] == "forget":
            answer = llm.reset_prefix_cache()
        elif job["do"] == "reset_all":
            answer = llm.reset_prefix_cache(reset_connector=True)
        else:
            answer = counters(llm, left_out)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
