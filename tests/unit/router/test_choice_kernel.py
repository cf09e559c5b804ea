"""The compiled choice picks what CostPolicy picks, whatever the engines hold and do."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberkv_proto.types import ChainHits, EngineHit, NamespaceId, NodeHit, NodeId
from router.candidates import Asked, Candidate, CostPolicy, Preferences
from router.chains import ChainKind
from router.engines import EngineTable
from router.health import BreakerLimits
from router.load import LoadLedger
from router.predicted import PredictedChains
from router.scoring import Speeds, holding_from, own_hit
from router.speeds import LearningLimits, SpeedBook

board_module = pytest.importorskip("router.board", reason="numba cannot be used here")
pytestmark = pytest.mark.timeout(400)  # compiling takes long where it was not done before
KIND = ChainKind(NamespaceId(b"k" * 16), 16)
KEYS = list(range(1, 41))
WANTED = Preferences(0.8, 2, 0.001, 0.1, 0.7)
GUESS = Speeds(5000.0, 200_000.0, 40_000.0, 30_000.0, 0.003, 0.02, 1e-8)


class Chance(random.Random):
    """One number of chance for every choice."""

    def __init__(self, chance: float) -> None:
        super().__init__(0)
        self._chance = chance

    def choice(self, seq):  # type: ignore[no-untyped-def]
        return seq[int(self._chance * len(seq))]


counts = st.integers(0, len(KEYS))
engine_states = st.fixed_dictionaries(
    {
        "node": st.sampled_from(["", "a", "b", "c"]),
        "charges": st.lists(st.integers(0, 4000), max_size=3),
        "hit": st.none() | st.tuples(counts, counts, counts),
        "predicted": counts,
    }
)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    board_module.warm_board()


@settings(max_examples=300)
@given(
    states=st.lists(engine_states, min_size=1, max_size=9),
    nodes=st.dictionaries(st.sampled_from("abcd"), st.tuples(counts, counts), max_size=4),
    prompt=st.integers(1, 2000),
    chance=st.floats(0, 1, exclude_max=True),
)
def test_it_picks_what_the_policy_picks(states, nodes, prompt: int, chance: float) -> None:  # type: ignore[no-untyped-def]
    now = [0.0]
    table = EngineTable(BreakerLimits(3, 2.0), 60.0)
    ledger = LoadLedger(lambda: now[0])
    book = SpeedBook(GUESS, LearningLimits(), lambda: now[0])
    predicted = PredictedChains(10.0)
    node_hits = {
        name: NodeHit(NodeId(name), max(hit), min(hit), max(hit) - min(hit))
        for name, hit in nodes.items()
        if max(hit)
    }
    own: dict[str, EngineHit] = {}
    engines = []
    for number, state in enumerate(states):
        engine = table.add(f"http://127.0.0.1:{number + 1}", 0.0)
        engine.node_id, engine.kind = state["node"], KIND
        engines.append(engine)
        for tokens in state["charges"]:
            ledger.charge(engine.url, tokens, tokens * 7)
        if state["hit"]:
            hbm, dram, ssd = sorted(state["hit"])
            node = NodeId(state["node"])
            own[engine.url] = EngineHit("e", 0, engine.url, node, ssd, hbm, dram - hbm, ssd - dram)
        predicted.note(engine.url, KEYS[: state["predicted"]], 0.0)
    now[0] = 0.25
    candidates = [
        Candidate(
            engine.url,
            ledger.load(engine.url),
            holding_from(
                own_hit(node_hits.get(engine.node_id), own.get(engine.url)),
                max(
                    (hit.hit_blocks for name, hit in node_hits.items() if name != engine.node_id),
                    default=0,
                )
                if engine.node_id
                else 0,
                predicted.hit_blocks(engine.url, KEYS, now[0]),
                KIND.block_tokens,
            ),
            book.of(engine.url),
        )
        for engine in engines
    ]
    wanted = CostPolicy(WANTED).pick(Asked(prompt), candidates, Chance(chance))
    board = board_module.Board(engines, ledger, book, WANTED)
    board.clear()
    board.hold(KIND, KEYS, ChainHits((*node_hits.values(),), (*own.values(),)), predicted, now[0])
    picked = board.pick(prompt, now[0], chance, 100, 10**9)
    board.check_integrity()
    ledger.check_integrity()
    assert picked is not None
    assert picked.engine.url == wanted.url
    assert picked.holding == wanted.holding
    most = max(candidate.holding.node_tokens for candidate in candidates)
    assert list(picked.considered) == candidates
    assert picked.is_exploring == (wanted.holding.node_tokens < most)


def test_full_engines_are_passed_over_and_none_is_picked_where_all_are() -> None:
    table = EngineTable(BreakerLimits(3, 2.0), 60.0)
    ledger, book = LoadLedger(), SpeedBook(GUESS, LearningLimits())
    engines = [table.add(f"http://127.0.0.1:{port}", 0.0) for port in (1, 2)]
    board = board_module.Board(engines, ledger, book, WANTED)
    ledger.charge(engines[0].url, 10)
    for _ in range(20):
        picked = board.pick(100, 1.0, 0.0, 1, 10**9)
        assert picked is not None
        assert picked.engine is engines[1]
    ledger.charge(engines[1].url, 500)
    assert board.pick(100, 1.0, 0.0, 1, 10**9) is None
    assert board.pick(100, 1.0, 0.0, 9, 10) is None


def test_a_board_is_stale_once_engines_speeds_or_rows_are_others() -> None:
    table = EngineTable(BreakerLimits(3, 2.0), 60.0)
    ledger, book = LoadLedger(), SpeedBook(GUESS, LearningLimits())
    engines = [table.add("http://127.0.0.1:1", 0.0)]
    board = board_module.Board(engines, ledger, book, WANTED)
    assert not board.is_stale(engines, ledger, book)
    assert board.is_stale([*engines], ledger, book)
    for port in range(100):
        ledger.slot(f"http://127.0.0.1:{port}")
    assert board.is_stale(engines, ledger, book), "the rows were moved"
