"""The engines of one model as tables, for the compiled choice; filled with one request's hits."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

from emberkv_proto.types import ChainHits, NodeHit
from router.candidates import Candidate, Preferences
from router.chains import ChainKind
from router.choice_kernel import (
    ACTIVE,
    ASKED_COLUMNS,
    BLOCK_TOKENS,
    COPY_FACTOR,
    ELSEWHERE,
    HIT_COLUMNS,
    IN_DRAM,
    IN_HBM,
    IN_PEER,
    IN_SSD,
    MOST_TOKENS,
    NODE_DRAM,
    NODE_HIT,
    OPEN,
    OWN_DRAM,
    OWN_HBM,
    OWN_HIT,
    PREDICTED,
    QUEUED,
    SPEED_COLUMNS,
    TOLD_COLUMNS,
    pick_cost,
)
from router.engines import Engine
from router.health import BreakerLimits, Health
from router.load import COLUMNS, LoadLedger
from router.predicted import PredictedChains
from router.scoring import Holding, Load, OwnHit, Speeds, holding_from
from router.speeds import LearningLimits, SpeedBook


@dataclass(slots=True)
class EngineRoom:
    """From how much on an engine is full."""

    max_requests: int
    max_queued: int


class Considered(Sequence[Candidate]):
    """The engines that had room when a choice was made, told apart only if somebody looks."""

    __slots__ = ("_engines", "_found", "_hits", "_loads", "_now", "_room", "_slots", "_speeds")

    def __init__(
        self,
        engines: Sequence[Engine],
        speeds: Sequence[Speeds],
        loads: array[float],
        slots: npt.NDArray[np.int64],
        hits: array[int],
        now: float,
        room: EngineRoom,
    ) -> None:
        self._engines = engines
        self._speeds = speeds
        self._loads = loads
        self._slots = slots
        self._hits = hits
        self._now = now
        self._room = room
        self._found: list[Candidate] | None = None

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        return self._candidates()[index]

    def __len__(self) -> int:
        return len(self._candidates())

    def _candidates(self) -> list[Candidate]:
        if self._found is None:
            loads = np.frombuffer(self._loads).reshape(-1, COLUMNS)[self._slots]
            self._found = [
                Candidate(engine.url, self._load(loads[row]), self._holding(row), self._speeds[row])
                for row, engine in enumerate(self._engines)
                if loads[row, ACTIVE] < self._room.max_requests
                and loads[row, QUEUED] < self._room.max_queued
            ]
        return self._found

    def _load(self, row: npt.NDArray[np.float64]) -> Load:
        active, queued, pairs, first, first_pairs, since = row.tolist()
        if not queued:
            return Load(int(active))
        return Load(
            int(active),
            int(queued),
            int(pairs),
            int(first),
            int(first_pairs),
            self._now - since,
        )

    def _holding(self, row: int) -> Holding:
        at = row * HIT_COLUMNS
        hit = self._hits[at : at + HIT_COLUMNS]
        own, dram = hit[OWN_HIT], hit[OWN_DRAM]
        if hit[NODE_HIT] > own:
            own, dram = hit[NODE_HIT], max(0, hit[NODE_DRAM] - hit[OWN_HBM])
        return holding_from(
            OwnHit(own, hit[OWN_HBM], dram), hit[ELSEWHERE], hit[PREDICTED], hit[BLOCK_TOKENS]
        )


@dataclass(slots=True, eq=False)
class Picked:
    """The engine of the choice, what it holds, and whether another one holds more."""

    engine: Engine
    holding: Holding
    is_exploring: bool
    considered: Considered


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the rows of the engines of one kind begin."""

    by_url: dict[str, int]
    by_node: dict[str, list[int]]


class Board:
    """All engines that serve a model, as they were when it was made. Remade when they change."""

    def __init__(
        self,
        engines: list[Engine],
        ledger: LoadLedger,
        book: SpeedBook,
        preferences: Preferences,
    ) -> None:
        self.engines = engines
        self.rows = ledger.rows
        self._numbers = ledger.numbers
        self.speeds_version = book.version
        self._slots = np.array([ledger.slot(engine.url) for engine in engines], np.int64)
        self._all_speeds = [book.of(engine.url) for engine in engines]
        self._speeds = np.empty((len(engines), SPEED_COLUMNS))
        for row, speeds in enumerate(self._all_speeds):
            self._speeds[row] = (
                speeds.prefill_tokens_per_second,
                speeds.prefill_quadratic_seconds,
                speeds.dram_tokens_per_second,
                speeds.ssd_tokens_per_second,
                speeds.peer_tokens_per_second,
                speeds.peer_setup_seconds,
                speeds.decode_request_seconds,
            )
        self._rows_by_url = {engine.url: row for row, engine in enumerate(engines)}
        self._places: dict[ChainKind, _Places] = {}
        for row, engine in enumerate(engines):
            if engine.kind is not None:
                places = self._places.setdefault(engine.kind, _Places({}, {}))
                places.by_url[engine.url] = row * HIT_COLUMNS
                if engine.node_id:
                    places.by_node.setdefault(engine.node_id, []).append(row * HIT_COLUMNS)
        self._hits = array("q", bytes(8 * HIT_COLUMNS * len(engines)))
        self._hit_rows = np.frombuffer(self._hits, np.int64).reshape(-1, HIT_COLUMNS)
        self._none = array("q", self._hits)
        """No hits; of whom, in blocks of how many tokens, is always the same."""
        for row, engine in enumerate(engines):
            if engine.kind is not None:
                self._none[row * HIT_COLUMNS + BLOCK_TOKENS] = engine.kind.block_tokens
        self._asked = array("d", bytes(8 * ASKED_COLUMNS))
        self._asked[2:6] = array(
            "d",
            (
                preferences.near_best_fraction,
                preferences.least_loaded_candidates,
                preferences.tie_seconds,
                preferences.tie_fraction,
            ),
        )
        self._asked[COPY_FACTOR] = preferences.copy_factor
        self._asked_row = np.frombuffer(self._asked)
        # Read and copied as arrays: numpy's own code is in no cache when a request comes.
        self._told = array("d", bytes(8 * TOLD_COLUMNS))
        self._told_row = np.frombuffer(self._told)

    def is_stale(self, engines: list[Engine], ledger: LoadLedger, book: SpeedBook) -> bool:
        return (
            self.engines is not engines
            or self.rows is not ledger.rows
            or self.speeds_version != book.version
        )

    def clear(self) -> None:
        """No hits."""
        self._hits[:] = self._none

    def hold(
        self,
        kind: ChainKind,
        keys: Sequence[int],
        found: ChainHits,
        predicted: PredictedChains,
        now: float,
    ) -> None:
        """Enter who has how much of a chain, for the engines of this kind."""
        places = self._places.get(kind)
        if places is None:
            return
        hits = self._hits
        of_url = places.by_url.get
        for own in reversed(found.engines):  # of an engine's ranks the one that has most stays
            at = of_url(own.url)
            if at is None:
                at = of_url(own.url.rstrip("/"))
            if at is not None:
                hits[at + OWN_HIT] = own.hit_blocks
                hits[at + OWN_HBM] = own.hbm_blocks
                hits[at + OWN_DRAM] = own.dram_blocks
        if found.nodes:
            self._hold_nodes(places, {hit.node_id: hit for hit in found.nodes})
        for url, blocks in predicted.hits(keys, now).items():
            at = of_url(url)
            if at is not None:
                hits[at + PREDICTED] = blocks

    def hold_tokens(self, url: str, tokens: int) -> None:
        """Enter how much of a prompt without known blocks an engine has seen."""
        row = self._rows_by_url.get(url)
        if row is not None:
            self._hits[row * HIT_COLUMNS + PREDICTED] = tokens
            self._hits[row * HIT_COLUMNS + BLOCK_TOKENS] = 1

    def _hold_nodes(self, places: _Places, nodes: Mapping[str, NodeHit]) -> None:
        hits = self._hits
        best, second, best_node = 0, 0, ""
        for node_id, hit in nodes.items():
            blocks = hit.hit_blocks
            if blocks > best:
                best, second, best_node = blocks, best, node_id
            elif blocks > second:
                second = blocks
        for node_id, rows in places.by_node.items():
            found = nodes.get(node_id)
            for at in rows:
                hits[at + ELSEWHERE] = second if node_id == best_node else best
                if found is not None:
                    hits[at + NODE_HIT] = found.hit_blocks
                    hits[at + NODE_DRAM] = found.dram_blocks

    def pick(
        self, prompt_tokens: int, now: float, chance: float, max_requests: int, max_queued: int
    ) -> Picked | None:
        """The engine by `cost`; None where none has room."""
        asked = self._asked
        asked[0], asked[1] = prompt_tokens, now
        asked[6], asked[7], asked[8] = chance, max_requests, max_queued
        row = pick_cost(
            self.rows, self._slots, self._speeds, self._hit_rows, self._asked_row, self._told_row
        )
        if row < 0:
            return None
        most, hbm, dram, ssd, peer = self._told[: IN_PEER + 1]
        holding = Holding(int(hbm), int(dram), int(ssd), int(peer))
        considered = Considered(
            self.engines,
            self._all_speeds,
            self._numbers[:],
            self._slots,
            self._hits[:],
            now,
            EngineRoom(max_requests, max_queued),
        )
        return Picked(self.engines[row], holding, hbm + dram + ssd < most, considered)

    def check_integrity(self) -> None:
        assert len(self._slots) == len(self.engines)
        for row, engine in enumerate(self.engines):
            none = self._none[row * HIT_COLUMNS : (row + 1) * HIT_COLUMNS]
            assert sum(none) == none[BLOCK_TOKENS], f"{engine.url} begins with a hit"
        assert tuple(range(5)) == (MOST_TOKENS, IN_HBM, IN_DRAM, IN_SSD, IN_PEER)
        assert self._told[OPEN] <= len(self.engines)


BoardMaker = Callable[[list[Engine], LoadLedger, SpeedBook, Preferences], Board]


def warm_board() -> None:
    """Compile or load the kernel now, so that no request waits for it (seconds when cold)."""
    ledger, guess = LoadLedger(), Speeds(1.0, 1.0, 1.0, 1.0, 0.0, 0.0)
    engine = Engine("http://127.0.0.1:1", "127.0.0.1", 1, Health(BreakerLimits(1, 1.0), 0.0))
    book = SpeedBook(guess, LearningLimits())
    board = Board([engine], ledger, book, Preferences(1.0, 1, 0.0, 0.0))
    board.clear()
    board.pick(1, 0.0, 0.0, 1, 1)
