"""Runs in vLLM's environment: vLLM's own scheduler with our half of it, and a worker made of lists.

`python -m tests.helpers.vllm_scheduler_model MODEL SEEDS` drives random requests through each of
SITES, SEEDS times: shared prefixes, chunked prefill, few pages, loads and saves that end steps
later, loads that fail, parts that the store loses. Each slot of a page says which token of which
prefix was written there, so the worker sees every page that a layer would read and that holds
anything else. A page of a state has one slot: the token after which it is the state. Prints counts
as JSON.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched import output as sched_output
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from client_sdk.engine.vllm_connector import connector as connector_module
from client_sdk.engine.vllm_connector.plan import LoadPlan, SavePlan, StepPlan, StepReport
from emberkv_proto.groups import needed_from, usable_blocks
from emberkv_proto.layout import Namespace
from emberkv_proto.types import BlockHash, Source

MAX_STEPS = 3000
Slots = list[bytes | None]


def full(page: int) -> Any:
    return FullAttentionSpec(block_size=page, **SHAPE)


def window(page: int, tokens: int) -> Any:
    return SlidingWindowSpec(block_size=page, sliding_window=tokens, **SHAPE)


def chunked(page: int, tokens: int) -> Any:
    return ChunkedLocalAttentionSpec(block_size=page, attention_chunk_size=tokens, **SHAPE)


def state(page: int, checkpoints: int = 0) -> Any:
    return MambaSpec(
        block_size=page,
        shapes=((2, 64),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
        num_prefill_checkpoint_blocks=checkpoints,
        prefill_checkpoint_alignment=1 if checkpoints else None,
    )


SHAPE = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
SITES: dict[str, tuple[list[Any], int, int]] = {
    "windows": ([window(4, 10), window(4, 10), full(4)], 4, 66),
    "window alone": ([window(4, 11)], 4, 24),
    "chunks": ([full(4), chunked(4, 16)], 4, 50),
    "blocks of pages": ([full(4), window(4, 14), chunked(4, 16)], 8, 66),
    "unequal pages": ([full(8), window(4, 18)], 16, 36),
    "states": ([state(4), full(4)], 4, 60),
    "states alone": ([state(4)], 4, 30),
    "states and windows": ([full(4), state(4), window(4, 10)], 8, 80),
    "states on wider pages": ([state(8), full(4)], 8, 60),
    "states within a step": ([state(4, 1), full(4)], 4, 60),
}
"""Groups of layers, tokens of a block, pages: enough for one request, not for all."""
if not hasattr(sched_output, "KVConnectorBlockState"):  # nobody is told of states before 0.32
    SITES = {name: site for name, site in SITES.items() if not name.startswith("states")}


@dataclass
class Store:
    """A daemon that holds parts in dicts; stands where the connector wants its client."""

    namespace: Namespace
    parts: list[dict[BlockHash, list[Slots]]] = field(default_factory=list)

    def connect(self) -> None:
        self.parts = [{} for _ in self.namespace.groups]

    def close(self) -> None:
        pass

    def acquire(self, hashes: Sequence[BlockHash], **_: Any) -> Lease:
        return Lease(self.usable(hashes))

    def start_prefetch(self, *_: Any) -> Sent:
        return Sent()

    def usable(self, hashes: Sequence[BlockHash]) -> int:
        held = [[name in part for name in hashes] for part in self.parts]
        return usable_blocks(self.namespace.groups, self.namespace.block_tokens, held)


class Sent:
    def cancel(self) -> None:
        pass


class Lease:
    is_valid = is_complete = True

    def __init__(self, blocks: int) -> None:
        self.usable_blocks = self.ready_blocks = blocks
        self.sources = [Source.DRAM] * blocks

    def release(self) -> None:
        pass


@dataclass
class Late:
    """A load or save that ends in `step`."""

    step: int
    plan: Any
    expected: list[Slots] = field(default_factory=list)


class Site:
    """One life of a scheduler, its worker and its store."""

    def __init__(self, model: str, name: str, seed: int) -> None:
        self.rng = random.Random(f"{name} {seed}")
        specs, block_tokens, pages = SITES[name]
        config = EngineArgs(
            model=model,
            enforce_eager=True,
            dtype="float32",
            max_model_len=112,
            max_num_batched_tokens=self.rng.choice([16, 24, 48]),
            max_num_seqs=4,
            async_scheduling=False,
            kv_transfer_config=KVTransferConfig(
                kv_connector="EmberConnector",
                kv_connector_module_path="client_sdk.engine.vllm_connector",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={"block_tokens": block_tokens},
            ),
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = pages
        config.cache_config.block_size = specs[0].block_size
        if any(isinstance(spec, MambaSpec) for spec in specs):
            config.cache_config.mamba_cache_mode = "align"
        groups = [KVCacheGroupSpec([f"layer.{n}"], spec) for n, spec in enumerate(specs)]
        cache = KVCacheConfig(pages, [], groups)
        block_size, hash_size = resolve_kv_cache_block_sizes(cache, config)
        self.scheduler = Scheduler(
            config, cache, StructuredOutputManager(config), block_size, hash_size
        )
        assert self.scheduler.connector is not None
        half = self.scheduler.connector._scheduler
        assert half is not None, "the connector is off"
        self.half, self.store = half, half._client
        self.hasher = get_request_block_hasher(hash_size, sha256)
        self.groups = half._shape.groups
        self.slots: dict[int, Slots] = {}
        self.step = 0
        self.loading: list[Late] = []
        self.saving: list[Late] = []
        self.leaving: set[str] = set()
        self.cancelled: set[int] = set()
        self.counts: Counter[str] = Counter()

    # ---- requests ----

    def run(self) -> None:
        """Serve requests until all are finished and every page is free."""
        stems = [self.tokens(self.rng.randrange(20, 64)) for _ in range(3)]
        open_requests = 14
        while open_requests or self.scheduler.requests:
            if open_requests and self.rng.random() < 0.3:
                open_requests -= 1
                stem = self.rng.choice(stems)
                prompt = stem[: self.rng.randrange(1, len(stem) + 1)]
                self.add(
                    f"r{open_requests}", prompt + self.tokens(self.rng.randrange(0, 12)) or [1]
                )
            if self.rng.random() < 0.2:
                self.scheduler.reset_prefix_cache()
            self.lose_parts()
            self.one_step()
            assert self.step < MAX_STEPS, "the engine stands still"
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "pages were lost"
        assert not self.half._saves
        assert self.half.holds.is_empty
        assert self.half._stats.data.get("errors", 0) == 0

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(250) for _ in range(count)]

    def add(self, name: str, prompt: list[int]) -> None:
        params = SamplingParams(
            temperature=0, max_tokens=self.rng.randrange(1, 32), ignore_eos=True
        )
        params.update_from_generation_config({}, None)
        self.scheduler.add_request(Request(name, prompt, params, None, block_hasher=self.hasher))

    def lose_parts(self) -> None:
        for part in self.store.parts:
            if part and self.rng.random() < 0.1:
                part.pop(self.rng.choice(list(part)))

    # ---- steps ----

    def one_step(self) -> None:
        self.step += 1
        output = self.scheduler.schedule()
        plan = output.kv_connector_metadata
        assert isinstance(plan, StepPlan)
        assert plan.computes == bool(output.num_scheduled_tokens)
        self.half.check_integrity()
        self.counts["preempted"] += len(plan.preempted)
        done = KVConnectorOutput(finished_sending=set(), finished_recving=set())
        report = StepReport()
        for late in self.saving:
            if late.plan.request_id in plan.preempted:
                self.cancelled.add(late.plan.number)
        for copy in output.kv_cache_block_copies or ():
            self.slots[copy.dst_block_id] = list(self.slots[copy.src_block_id])
        sampled = [self.compute(name, n) for name, n in output.num_scheduled_tokens.items()]
        self.loading += [Late(self.later(), load) for load in plan.loads]
        for save in plan.saves:
            self.saving.append(Late(self.later(), save, self.expected(save)))
        self.loading = [late for late in self.loading if not self.end_load(late, done, report)]
        self.saving = [late for late in self.saving if not self.end_save(late, report)]
        self.leaving |= plan.finished
        busy = {late.plan.request_id for late in self.saving}
        done.finished_sending = self.leaving - busy
        self.leaving &= busy
        if not report.is_empty:
            done.kv_connector_worker_meta = report
        names = list(output.num_scheduled_tokens)
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                names,
                {name: number for number, name in enumerate(names)},
                sampled,
                kv_connector_output=done,
            ),
        )
        self.half.check_integrity()

    def later(self) -> int:
        return self.step + self.rng.choice([0, 0, 1, 3, 8])

    def compute(self, name: str, count: int) -> list[int]:
        """Read what the first new token reads, write the new ones; return what is sampled."""
        request = self.scheduler.requests[name]
        tables = self.scheduler.kv_cache_manager.get_block_ids(name)
        end = request.num_computed_tokens
        begin = end - count
        written = prefixes(request.all_token_ids[:end])
        for number, group in enumerate(self.groups):
            if group.is_state:
                self.pass_on_state(name, number, tables[number], written, begin)
                continue
            for token in range(needed_from(group.stored, 1, begin), begin):
                assert self.slot(number, tables[number], token) == (number, written[token]), (
                    f"{name} reads at {begin} of group {number} what is not token {token}"
                )
            for token in range(begin, end):
                page = tables[number][token // group.page_tokens]
                assert page, "a token is written to the null page"
                slots = self.slots.setdefault(page, [])
                slots += [None] * (group.page_tokens - len(slots))
                slots[token % group.page_tokens] = tag(number, written[token])
        return [written[-1][0]] if end == request.num_tokens else []

    def pass_on_state(
        self, name: str, number: int, table: Sequence[int], written: Sequence[bytes], begin: int
    ) -> None:
        """Read the state after `begin` tokens, write the one after all of `written`."""
        size, end = self.groups[number].page_tokens, len(written)
        if begin:
            page = table[(begin - 1) // size]
            held = self.slots.get(page) if page else None
            assert held == [tag(number, written[begin - 1])], (
                f"{name} goes on at {begin} of group {number} from another state"
            )
        checkpoint = (end - 1) // size * size
        between = checkpoint // size - 1
        if begin < checkpoint < end and table[between]:  # what kernels export on their way
            self.slots[table[between]] = [tag(number, written[checkpoint - 1])]
        page = table[(end - 1) // size]
        assert page, "a state is written to the null page"
        self.slots[page] = [tag(number, written[-1])]

    def slot(self, number: int, table: Sequence[int], token: int) -> tuple[int, bytes] | None:
        size = self.groups[number].page_tokens
        page = table[token // size]
        slots = self.slots.get(page) if page else None
        value = slots[token % size] if slots else None
        return (value[0], value[1:]) if value else None

    # ---- loads and saves ----

    def end_load(self, late: Late, done: KVConnectorOutput, report: StepReport) -> bool:
        if late.step > self.step:
            return False
        plan: LoadPlan = late.plan
        good = self.rng.random() > 0.15
        for part in plan.groups:
            held = self.store.parts[part.group]
            good = good and all(
                name in held
                for name in part.hashes[self.first_block(part.group, part.skip_pages) :]
            )
            assert 0 not in part.pages, "the null page would be filled"
            if good:
                pages = [held.get(name, []) for name in part.hashes]
                size = self.groups[part.group].pages_per_block
                flat = [
                    (block * size + n, p) for block, b in enumerate(pages) for n, p in enumerate(b)
                ]
                wanted = {n - part.skip_pages: p for n, p in flat if n >= part.skip_pages}
                assert sorted(wanted) == list(range(len(part.pages)))
                for n, page in enumerate(part.pages):
                    self.slots[page] = list(wanted[n])
                    self.counts["loaded pages"] += 1
        if not good:
            for part in plan.groups:
                for page in part.pages:
                    self.slots[page] = []
            report.failed_loads.add(plan.request_id)
            done.failed_recving.add(plan.request_id)
            self.counts["failed loads"] += 1
        self.counts["loads"] += 1
        assert done.finished_recving is not None
        done.finished_recving.add(plan.request_id)
        return True

    def first_block(self, group: int, skip_pages: int) -> int:
        return skip_pages // int(self.groups[group].pages_per_block)

    def expected(self, save: SavePlan) -> list[Slots]:
        """What the pages of a save hold once the step is over."""
        group = self.groups[save.group]
        request = self.scheduler.requests[save.request_id]
        written = prefixes(request.all_token_ids)
        known = self.half._known[save.request_id].chain.hashes
        first = known.index(save.hashes[0]) * group.pages_per_block
        if group.is_state:
            last = (first + 1) * self.half._shape.block_tokens - 1
            return [[tag(save.group, written[last])]]
        assert len(save.pages) == len(save.hashes) * group.pages_per_block
        return [
            [
                tag(save.group, written[page * group.page_tokens + n])
                for n in range(group.page_tokens)
            ]
            for page in range(first, first + len(save.pages))
        ]

    def end_save(self, late: Late, report: StepReport) -> bool:
        if late.step > self.step:
            return False
        plan: SavePlan = late.plan
        report.saves_ended[plan.number] = 1
        if plan.number in self.cancelled:
            self.counts["cancelled saves"] += 1
            return True
        group = self.groups[plan.group]
        length = 1 if group.is_state else group.page_tokens
        found = [self.slots[page][:length] for page in plan.pages]
        assert found == late.expected, f"save {plan.number} reads pages that others have written"
        size = self.groups[plan.group].pages_per_block
        for number, name in enumerate(plan.hashes):
            pages = late.expected[number * size : (number + 1) * size]
            self.store.parts[plan.group].setdefault(name, pages)
            self.counts["saved blocks"] += 1
        return True


def prefixes(tokens: Sequence[int]) -> list[bytes]:
    """For each token, a digest of it and all before it."""
    digest, digests = b"", []
    for token in tokens:
        digest = hashlib.blake2b(digest + token.to_bytes(4, "little"), digest_size=8).digest()
        digests.append(digest)
    return digests


def tag(group: int, digest: bytes) -> bytes:
    return bytes([group]) + digest


def main(model: str, seeds: int) -> None:
    init_none_hash(sha256)
    vars(connector_module)["SyncClient"] = lambda path, namespace, **_: Store(namespace)
    counts: dict[str, Counter[str]] = {name: Counter() for name in SITES}
    for name, seed in itertools.product(SITES, range(seeds)):
        site = Site(model, name, seed)
        try:
            site.run()
        except BaseException:
            print(f"{name}: seed {seed}, step {site.step}", file=sys.stderr)
            raise
        counts[name] += site.counts
    print(json.dumps(counts))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
