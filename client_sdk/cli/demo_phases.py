"""The demo's phases. Each does something to the cluster and says what it expects to see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from client_sdk.cli.demo_run import DemoRun, Holding, resent, until
from client_sdk.cli.demo_settings import MAX_TOKENS, DemoPrompt
from client_sdk.cli.openai_client import UNTOLD, Answer, OpenAiClient
from client_sdk.cli.status import NodeView
from emberkv_proto.types import Tier

SYSTEM = "You are the keeper of a lighthouse. Answer in a few words."
CHAT = (
    "Good evening. Is the lamp lit?",
    "How many ships have passed since noon?",
    "The log says a storm comes from the north-west. What do we do with the small boats?",
    "And if the lamp goes out in the night, does the glass stay warm?",
)
CHAT_TOKENS = 24
CONCURRENCY = 4
USUAL_BLOCKS = 64
"""Longer prompts are left out where any will do: recomputing them takes the demo's time."""
KILL_AFTER = 10
"""Requests of the trace's second half that are answered before engine A is killed."""
SETTLE_SECONDS = 60.0
QUIET_POLLS = 4


@dataclass(frozen=True, slots=True)
class BeforeKill:
    """What daemon A held when it was killed, and what engine A recomputed while it was gone."""

    daemon: NodeView
    recomputed: frozenset[str]


async def reference_phase(run: DemoRun, client: OpenAiClient) -> None:
    """Answer everything with an engine that keeps nothing, one request at a time."""
    run.console.rule("[bold]reference: one engine without any cache[/]", align="left")
    for number, answer in enumerate(await converse(client), 1):
        run.reference[turn_name(number)] = answer

    async def one(prompt: DemoPrompt) -> None:
        run.reference[prompt.name] = await client.complete(list(prompt.token_ids), MAX_TOKENS)

    await run.each("without any cache", run.prompts, one)
    found = sum(answer.hits for answer in run.reference.values())
    run.report.expect(
        "the reference engine finds nothing", found == 0, f"{found} tokens not computed"
    )


async def chat_phase(run: DemoRun) -> None:
    """A conversation through the router; each turn begins with all turns before it."""
    with run.phase("chat") as phase:
        answers = await converse(run.router)
        for number, answer in enumerate(answers, 1):
            phase.add(turn_name(number), answer, run.reference[turn_name(number)])
            run.console.print(
                f"  you: {CHAT[number - 1]}", markup=False, highlight=False, soft_wrap=True
            )
            run.console.print(
                f"  engine: {answer.text!r}   ({answer.hits} of {answer.prompt_tokens} prompt"
                f" tokens found, first token after {answer.ttft_seconds * 1000:.0f} ms)",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
        later = [answer.hits for answer in answers[1:]]
        run.report.expect(
            "each later turn of the chat finds the turns before it",
            all(later),
            f"hit tokens by turn: {[answer.hits for answer in answers]}",
        )


async def trace_phase(run: DemoRun) -> None:
    """The trace through the router; engine A is killed in the middle and comes back."""
    half = len(run.prompts) // 2
    with run.phase("trace, 1st half") as phase:
        await run.play(phase, run.router, run.prompts[:half], CONCURRENCY)
    engine = run.node_a.engine.name

    def restart_in_the_middle(answered: int) -> None:
        if answered == min(KILL_AFTER, len(run.prompts) - half):
            run.console.print(f"  kill -9 {engine}, while it answers")
            run.cluster.kill(engine)
            run.cluster.spawn(engine)

    with run.phase("trace, A dies") as phase:
        await run.play(phase, run.router, run.prompts[half:], CONCURRENCY, restart_in_the_middle)
        run.report.expect(
            "the trace went on when engine A was killed",
            phase.requests == len(run.prompts) - half,
            f"{phase.requests} answers, {phase.interruptions} of them sent again",
        )


async def engine_back_phase(run: DemoRun) -> None:
    """Engine A was started again, empty: the prompts it served come from its daemon."""
    with run.phase("engine A back") as phase:
        await run.cluster.wait_ready(run.node_a.engine.name)
        await until_announced(run)
        half = run.prompts[: len(run.prompts) // 2]
        chosen = both_tiers(run, await run.holdings(half))
        await run.play(phase, run.client(run.node_a.engine_url), chosen)
        found = phase.hits_from(*run.engine.store_sources)
        run.report.expect(
            "engine A, back from kill -9, gets its prefixes from its daemon",
            bool(chosen) and 2 * found >= phase.prompt_tokens,
            f"{found} of {phase.prompt_tokens} prompt tokens",
        )


async def daemon_down_phase(run: DemoRun) -> BeforeKill:
    """Daemon A is killed: engine A answers by recomputing. Returns what there was before.

    The prompts together fill engine A's own pool, so that later ones have to come from the store.
    """
    name = run.node_a.daemon.name
    before = (await settled(run))[run.node_a.node_id]
    with run.phase("daemon A down") as phase:
        chosen = least_in_dram(run, await run.holdings(run.prompts))
        run.console.print(f"  kill -9 {name}: {described(before)}")
        run.cluster.kill(name)
        await run.play(phase, run.client(run.node_a.engine_url), chosen)
        from_store = phase.hits_from("dram", "ssd", "peer")
        told = f", {from_store} tokens from a store" if run.engine.tells_sources else ""
        run.report.expect(
            "engine A serves on without its daemon, by recomputing",
            phase.requests == len(chosen) > 0 and from_store == 0,
            f"{phase.requests} answers{told}",
        )
    return BeforeKill(before, frozenset(prompt.name for prompt in chosen))


async def daemon_back_phase(run: DemoRun, earlier: BeforeKill) -> None:
    """Daemon A is started again: what it held is there, announced, and hit."""
    name, before = run.node_a.daemon.name, earlier.daemon
    with run.phase("daemon A back") as phase:
        await run.cluster.start_one(name)

        async def is_announced() -> bool:
            view = await run.view(run.node_a)
            is_new = view.indexed.incarnation > before.indexed.incarnation
            return is_new and view.index_matches is True and bool(view.indexed.engines)

        seconds = await until(f"{name} announced again", is_announced, SETTLE_SECONDS)
        after = (await settled(run))[run.node_a.node_id]
        run.console.print(f"  recovered {described(after)}, in the index after {seconds:.1f} s")
        for tier in (Tier.DRAM, Tier.SSD):
            had, has = blocks_in(before, tier), blocks_in(after, tier)
            run.report.expect(
                f"daemon A, back from kill -9, recovered its {tier.name}",
                has >= had > 0,
                f"{has} blocks, {had} before",
            )
        others = [p for p in run.prompts if p.name not in earlier.recomputed]
        chosen = both_tiers(run, await run.holdings(others))
        if not run.engine.tells_sources:  # what it still had itself would pass for the store's
            run.console.print(f"  kill -9 {run.node_a.engine.name} too, and start it again")
            run.cluster.kill(run.node_a.engine.name)
            await run.cluster.start_one(run.node_a.engine.name)
            await until_announced(run)
        await run.play(phase, run.client(run.node_a.engine_url), chosen)
        for source in run.engine.store_sources:
            found = phase.hits_from(source)
            run.report.expect(
                f"what was recovered is hit again, {_from(source)}",
                found > 0,
                f"{found} of {phase.prompt_tokens} prompt tokens",
            )


async def peer_phase(run: DemoRun) -> None:
    """Engine A is killed: prompts that only node A holds are answered by engine B."""
    with run.phase("only B up") as phase:
        await settled(run)
        only_a = [
            h
            for h in await run.holdings(run.prompts)
            if h.is_whole_on(run.node_a) and h.on(run.node_b).hit_blocks <= 1
        ]
        chosen = most_blocks(only_a)[: _count(run, 6)]
        run.cluster.kill(run.node_a.engine.name)
        for holding in chosen[:1]:
            for row in await run.where(holding.prompt):
                run.console.print(
                    f"  where {holding.prompt.name}: {row.node_id} holds {row.hit_blocks} of"
                    f" {holding.blocks} blocks; {row.ends_because}",
                    markup=False,
                    soft_wrap=True,
                )
        run.report.expect(
            "the index says that node A holds what node B lacks",
            len(chosen) > 0,
            f"{len(only_a)} prompts whole on node-a and not on node-b",
        )
        await run.play(phase, run.router, [holding.prompt for holding in chosen])
        pulled = phase.hits_from(*run.engine.peer_sources)
        run.report.expect(
            "daemon B pulled blocks from daemon A",
            pulled > 0,
            f"{pulled} of {phase.prompt_tokens} prompt tokens; the rest was recomputed",
        )


async def audit_phase(run: DemoRun) -> None:
    """At the end both daemons hold their invariants, and the index is right about them."""
    from client_sdk.cli.remote import daemon_problems

    views = await settled(run)
    for node in (run.node_a, run.node_b):
        view = views[node.node_id]
        problems = await daemon_problems(node.grpc_address)
        run.report.expect(
            f"the invariants of {node.node_id} hold and the index equals its catalog",
            not problems and view.index_matches is True,
            "; ".join(problems) or described(view),
        )


async def converse(client: OpenAiClient) -> list[Answer]:
    """Have the conversation; each answer becomes part of the next turn's prompt."""
    messages = [{"role": "system", "content": SYSTEM}]
    answers = []
    for question in CHAT:
        messages.append({"role": "user", "content": question})
        turn = list(messages)
        answer = await resent(lambda turn=turn: client.chat(turn, CHAT_TOKENS))  # type: ignore[misc]
        messages.append({"role": "assistant", "content": answer.text})
        answers.append(answer)
    return answers


def turn_name(number: int) -> str:
    return f"chat turn {number}"


def both_tiers(run: DemoRun, holdings: Sequence[Holding]) -> list[DemoPrompt]:
    """Prompts that node A holds whole: those most in DRAM, then those most on SSD only."""
    whole = [h for h in holdings if h.is_whole_on(run.node_a)]
    each = _count(run, 5)
    by_dram = sorted(whole, key=lambda h: h.on(run.node_a).dram_blocks, reverse=True)
    by_ssd = sorted(whole, key=lambda h: h.on(run.node_a).ssd_blocks, reverse=True)
    chosen = {h.prompt.name: h.prompt for h in [*by_dram[:each], *by_ssd[:each]]}
    return list(chosen.values())


def least_in_dram(run: DemoRun, holdings: Sequence[Holding]) -> list[DemoPrompt]:
    """Prompts with the least in node A's DRAM, so many that they fill an engine's pool."""
    usual = [h for h in holdings if 0 < h.blocks <= USUAL_BLOCKS]
    by_dram = sorted(usual, key=lambda h: h.on(run.node_a).dram_blocks / h.blocks)
    chosen, blocks = [], 0
    for holding in by_dram:
        if blocks > run.size.engine_blocks:
            break
        chosen.append(holding.prompt)
        blocks += holding.blocks
    return chosen


def most_blocks(holdings: Sequence[Holding]) -> list[Holding]:
    return sorted(holdings, key=lambda h: h.blocks, reverse=True)


async def settled(run: DemoRun) -> dict[str, NodeView]:
    """Wait until the daemons are at rest and the index counts what they hold; return the views.

    At rest: no event for a few polls, so that saves, writeback and trimming are over.
    """
    quiet_polls = 0
    views: dict[str, NodeView] = {}

    async def is_settled() -> bool:
        nonlocal quiet_polls, views
        earlier = {node_id: view.indexed.seq for node_id, view in views.items()}
        views = {node.node_id: await run.view(node) for node in (run.node_a, run.node_b)}
        is_quiet = all(
            view.index_matches is True and view.indexed.seq == earlier.get(node_id)
            for node_id, view in views.items()
        )
        quiet_polls = quiet_polls + 1 if is_quiet else 0
        return quiet_polls >= QUIET_POLLS

    await until("the index equal to the daemons", is_settled, SETTLE_SECONDS)
    return views


async def until_announced(run: DemoRun) -> None:
    """Wait until engine A's session is known to the index again."""

    async def is_announced() -> bool:
        return bool((await run.view(run.node_a)).indexed.engines)

    await until("engine A announced", is_announced, SETTLE_SECONDS)


def described(view: NodeView) -> str:
    tiers = view.daemon.tiers if view.daemon else ()
    return ", ".join(f"{tier.blocks} blocks in {tier.tier.name}" for tier in tiers)


def blocks_in(view: NodeView, tier: Tier) -> int:
    tiers = view.daemon.tiers if view.daemon else ()
    return sum(row.blocks for row in tiers if row.tier is tier)


def _from(source: str) -> str:
    return "from the store" if source == UNTOLD else f"from {source.upper()}"


def _count(run: DemoRun, usual: int) -> int:
    """Fewer prompts where the whole run has few."""
    return max(2, min(usual, len(run.prompts) // 8))
