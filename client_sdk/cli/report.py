"""What the demo saw: phases, named expectations, and the table and JSON made of them."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from client_sdk.cli.openai_client import SOURCES, UNTOLD, Answer
from emberkv_proto import __version__

MANY_DIFFERENCES = 5


@dataclass(frozen=True, slots=True)
class Expectation:
    """Something that must hold for the demo to pass, and what was seen."""

    name: str
    held: bool
    seen: str


@dataclass(slots=True)
class PhaseReport:
    """The requests of one phase."""

    name: str
    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: Counter[str] = field(default_factory=Counter)
    cold_ttfts: list[float] = field(default_factory=list)
    """Of the same prompts in the run without any cache."""
    warm_ttfts: list[float] = field(default_factory=list)
    """Of this phase's requests that found at least half of their prompt."""
    interruptions: int = 0
    differences: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, name: str, answer: Answer, reference: Answer) -> None:
        """Count an answer and compare it, token for token, with the one made without a cache."""
        self.requests += 1
        self.prompt_tokens += answer.prompt_tokens
        self.hit_tokens.update(answer.hit_tokens)
        self.interruptions += answer.interruptions
        self.cold_ttfts.append(reference.ttft_seconds)
        if 2 * answer.hits >= answer.prompt_tokens:
            self.warm_ttfts.append(answer.ttft_seconds)
        if (answer.token_ids, answer.prompt_tokens) != (
            reference.token_ids,
            reference.prompt_tokens,
        ):
            self.differences.append(
                f"{name}: {list(answer.token_ids)} != {list(reference.token_ids)}"
            )

    def hits_from(self, *sources: str) -> int:
        return sum(self.hit_tokens[source] for source in sources)

    def to_json(self) -> dict[str, Any]:
        return {
            "phase": self.name,
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "hit_tokens": {source: self.hit_tokens[source] for source in (*SOURCES, UNTOLD)},
            "ttft_p50_cold_seconds": median(self.cold_ttfts),
            "ttft_p50_warm_seconds": median(self.warm_ttfts),
            "warm_requests": len(self.warm_ttfts),
            "interruptions": self.interruptions,
            "identical": not self.differences,
            "differences": self.differences,
            "seconds": round(self.seconds, 3),
        }


@dataclass(slots=True)
class DemoReport:
    """All phases and expectations of one run."""

    phases: list[PhaseReport] = field(default_factory=list)
    expectations: list[Expectation] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether everything held and there was something to hold."""
        return bool(self.expectations) and all(e.held for e in self.expectations)

    def expect(self, name: str, held: bool, seen: str) -> None:
        self.expectations.append(Expectation(name, held, seen))

    def expect_identical(self) -> None:
        """One difference anywhere fails the demo."""
        requests = sum(phase.requests for phase in self.phases)
        differences = [d for phase in self.phases for d in phase.differences]
        seen = f"{requests} answers, {len(differences)} differences"
        if differences:
            seen += "; " + "; ".join(differences[:MANY_DIFFERENCES])
        self.expect(
            "every answer equals the one made without a cache",
            requests > 0 and not differences,
            seen,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "version": __version__,
            "machine": f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}",
            "seconds": round(self.seconds, 1),
            "phases": [phase.to_json() for phase in self.phases],
            "expectations": [
                {"name": e.name, "held": e.held, "seen": e.seen} for e in self.expectations
            ],
        }


def median(seconds: Sequence[float]) -> float | None:
    return statistics.median(seconds) if seconds else None


def write_json(report: DemoReport, path: Path) -> None:
    path.write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")


def print_report(console: Console, report: DemoReport) -> None:
    title = "prompt tokens found, by source; p50 of the time to the first token"
    is_untold = any(phase.hit_tokens[UNTOLD] for phase in report.phases)
    sources = (UNTOLD,) if is_untold else SOURCES
    table = Table(title=title, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("phase", no_wrap=True)
    for heading in (
        "requests",
        "prompt\ntokens",
        *(("found",) if is_untold else SOURCES),
        "cold\nms",
        "warm\nms",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("identical", no_wrap=True)
    for phase in report.phases:
        table.add_row(*_cells(phase, sources))
    console.print(table)
    console.print(
        "cold: the same prompts in an engine without any cache, one at a time;"
        " warm: requests of the phase that found at least half of their prompt",
        style="dim",
        soft_wrap=True,
    )
    _print_expectations(console, report.expectations)
    verdict = "[green]all held[/]" if report.ok else "[bold red]FAILED[/]"
    console.print(f"{verdict} in {report.seconds:.0f} s")


def _cells(phase: PhaseReport, sources: Sequence[str]) -> Iterable[str]:
    yield phase.name
    yield str(phase.requests)
    yield str(phase.prompt_tokens)
    for source in sources:
        yield str(phase.hit_tokens[source])
    for ttfts in (phase.cold_ttfts, phase.warm_ttfts):
        middle = median(ttfts)
        yield "-" if middle is None else f"{middle * 1000:.0f}"
    if not phase.requests:
        yield "-"
    else:
        yield "[red]no[/]" if phase.differences else "yes"


def _print_expectations(console: Console, expectations: Sequence[Expectation]) -> None:
    for expectation in expectations:
        mark = "[green]held  [/]" if expectation.held else "[bold red]FAILED[/]"
        line = f"{mark} {escape(expectation.name)}: [dim]{escape(expectation.seen)}[/]"
        console.print(line, soft_wrap=True)
