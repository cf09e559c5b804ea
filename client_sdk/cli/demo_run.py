"""What the phases of the demo share: cluster, prompts, reference answers, report."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import aiohttp
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from client_sdk.cli.chain_story import NodeWhere
from client_sdk.cli.cluster import Cluster
from client_sdk.cli.cluster_plan import NodePlan
from client_sdk.cli.demo_settings import MAX_TOKENS, DemoEngine, DemoPrompt, DemoSize
from client_sdk.cli.openai_client import Answer, OpenAiClient
from client_sdk.cli.report import DemoReport, PhaseReport
from client_sdk.cli.status import NodeView, read_status
from client_sdk.cli.where import WhereQuery, run_where
from client_sdk.index_client import IndexClient
from emberkv_proto.errors import DeadlineError, EmberError, UnavailableError
from emberkv_proto.hashing import block_hashes, index_keys
from emberkv_proto.types import NodeHit, NodeId

POLL_SECONDS = 0.1
RESEND_LIMIT = 5
RESEND_PAUSE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Holding:
    """What the index says of a prompt: how much of its full blocks each node holds."""

    prompt: DemoPrompt
    blocks: int
    by_node: dict[NodeId, NodeHit]

    def on(self, node: NodePlan) -> NodeHit:
        node_id = NodeId(node.node_id)
        return self.by_node.get(node_id, NodeHit(node_id, 0, 0, 0))

    def is_whole_on(self, node: NodePlan) -> bool:
        return self.blocks > 0 and self.on(node).hit_blocks == self.blocks


@dataclass(slots=True)
class DemoRun:
    """One run. Phases read and add to it; it decides nothing."""

    console: Console
    cluster: Cluster
    session: aiohttp.ClientSession
    engine: DemoEngine
    prompts: Sequence[DemoPrompt]
    size: DemoSize
    report: DemoReport = field(default_factory=DemoReport)
    reference: dict[str, Answer] = field(default_factory=dict)
    """Answers of the run without a cache, by the prompt's or turn's name."""

    @property
    def node_a(self) -> NodePlan:
        return self.cluster.plan.nodes[0]

    @property
    def node_b(self) -> NodePlan:
        return self.cluster.plan.nodes[1]

    def client(self, url: str) -> OpenAiClient:
        return OpenAiClient(self.session, url, self.engine.model)

    @property
    def router(self) -> OpenAiClient:
        return self.client(self.cluster.plan.router_url)

    @contextmanager
    def phase(self, name: str) -> Iterator[PhaseReport]:
        """A phase of the report; its time is taken."""
        phase = PhaseReport(name)
        self.report.phases.append(phase)
        self.console.rule(f"[bold]{escape(name)}[/]", align="left")
        began = time.monotonic()
        try:
            yield phase
        finally:
            phase.seconds = time.monotonic() - began

    async def play(
        self,
        phase: PhaseReport,
        client: OpenAiClient,
        prompts: Sequence[DemoPrompt],
        concurrency: int = 1,
        after_each: Callable[[int], None] | None = None,
    ) -> list[Answer]:
        """Send the prompts in order, so many at a time, and add their answers to the phase.

        A request whose engine dies under it is sent again, as a client would.

        Args:
            after_each: called with the number of prompts answered so far.
        """
        answers: list[Answer] = []

        async def one(prompt: DemoPrompt) -> None:
            answer = await resent(lambda: client.complete(list(prompt.token_ids), MAX_TOKENS))
            phase.add(prompt.name, answer, self.reference[prompt.name])
            answers.append(answer)
            if after_each is not None:
                after_each(len(answers))

        await self.each(phase.name, prompts, one, concurrency)
        return answers

    async def each(
        self,
        title: str,
        prompts: Sequence[DemoPrompt],
        action: Callable[[DemoPrompt], Awaitable[None]],
        concurrency: int = 1,
    ) -> None:
        """Run `action` on all prompts with a progress bar; the first failure ends it."""
        waiting = iter(prompts)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        is_shown = self.console.is_terminal
        with Progress(
            *columns, console=self.console, transient=True, disable=not is_shown
        ) as progress:
            bar = progress.add_task(escape(title), total=len(prompts))

            async def worker() -> None:
                for prompt in waiting:
                    await action(prompt)
                    progress.advance(bar)

            workers = [asyncio.ensure_future(worker()) for _ in range(concurrency)]
            try:
                await asyncio.gather(*workers)
            finally:
                for task in workers:
                    task.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    async def holdings(self, prompts: Sequence[DemoPrompt]) -> list[Holding]:
        """What the index says of each prompt."""
        index = IndexClient(self.cluster.plan.index_address, timeout_seconds=5.0)
        found = []
        block_tokens = self.engine.block_tokens
        try:
            engines = [engine for node in await index.nodes() for engine in node.engines]
            if not engines:
                raise UnavailableError("no engine is announced, so no namespace is known")
            for prompt in prompts:
                tokens = list(prompt.token_ids)
                hashes = block_hashes(engines[0].namespace_id, tokens, block_tokens)
                hits = await index.query(index_keys(hashes)) if hashes else []
                by_node = {hit.node_id: hit for hit in hits}
                found.append(Holding(prompt, len(hashes), by_node))
        finally:
            await index.close()
        return found

    async def where(self, prompt: DemoPrompt) -> tuple[NodeWhere, ...]:
        """As `emberkv where`."""
        plan = self.cluster.plan
        query = WhereQuery(
            plan.index_address, plan.router_url, self.engine.model, "", prompt.token_ids
        )
        return (await run_where(query)).nodes

    async def view(self, node: NodePlan) -> NodeView:
        """As `emberkv status`, one node."""
        views = await read_status(self.cluster.plan.index_address)
        for view in views:
            if view.indexed.node_id == node.node_id:
                return view
        raise UnavailableError(f"the index does not know {node.node_id}")


async def resent(
    send: Callable[[], Awaitable[Answer]], attempts_left: int = RESEND_LIMIT
) -> Answer:
    """Send until an answer came whole; a few times at most."""
    try:
        return await send()
    except UnavailableError:
        if not attempts_left:
            raise
    await asyncio.sleep(RESEND_PAUSE_SECONDS)
    answer = await resent(send, attempts_left - 1)
    return replace(answer, interruptions=answer.interruptions + 1)


async def until(what: str, is_so: Callable[[], Awaitable[bool]], deadline_seconds: float) -> float:
    """Poll until it is so; return how long that took.

    Raises:
        DeadlineError: it was not so in time.
    """
    began = time.monotonic()
    while True:
        problem = "it is not so"
        try:
            if await is_so():
                return time.monotonic() - began
        except EmberError as error:
            problem = str(error)
        if time.monotonic() - began > deadline_seconds:
            raise DeadlineError(f"{what}: not within {deadline_seconds:.0f} s ({problem})")
        await asyncio.sleep(POLL_SECONDS)
