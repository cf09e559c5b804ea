"""Engines that publish their events, and their rows: one holder for each engine and rank.

    announced ──► AWAY ── connected, nothing missing ──► CURRENT: in answers
                  │  ▲                                      │
                  │  └────────── connection lost ───────────┤
                  ├─ for gone_seconds: rows dropped         │
                  └─ announced no longer: forgotten         └─ the same, after gone_seconds

An engine's holder has its node's visible holder as its base, so that a run may alternate between
its HBM and the node's DRAM and SSD. No I/O and no clock of its own; one thread owns it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter

from emberkv_proto.errors import InvalidRequestError, UnavailableError
from emberkv_proto.events import BlocksRemoved, BlocksStored, Event, Keys
from emberkv_proto.types import EngineHit, EngineInfo, IndexKey, NodeId, Tier, TierDigest
from global_index.hbm.decoding import decode_message
from global_index.hbm.endpoints import check_endpoint
from global_index.hbm.places import ChainForm
from global_index.hbm.rows import EngineRows, RowCounts
from global_index.hbm.sequence import EventSequence, Verdict
from global_index.holders import HolderPool
from global_index.index import BlockIndex, Holder, HolderHits

log = logging.getLogger(__name__)

MAX_ENGINES = 4096
MAX_BLOCK_TOKENS = 1 << 16
_HIT_BLOCKS = attrgetter("hit_blocks")


@dataclass(frozen=True, slots=True, order=True)
class EngineKey:
    """An engine's rank as the index tells them apart; ids alone may be alike on two nodes."""

    node_id: NodeId
    engine_id: str
    dp_rank: int

    def __str__(self) -> str:
        return f"{self.node_id}/{self.engine_id}/{self.dp_rank}"


class StreamState(Enum):
    AWAY = "away"
    """Not connected, or not yet sure to have missed nothing."""
    CURRENT = "current"


@dataclass(slots=True)
class StreamCounts:
    """What one engine's stream went through; never goes down."""

    messages: int = 0
    repeated: int = 0
    """Messages that we had already."""
    malformed_messages: int = 0
    malformed_events: int = 0
    unknown_events: int = 0
    other_media: int = 0
    """Events of the engine's own CPU or disk tiers."""
    connects: int = 0
    losses: int = 0
    """Connections lost."""
    gaps: int = 0
    replays: int = 0
    failed_replays: int = 0
    lost: int = 0
    """Times that missed events could not be had again, and the rows were dropped."""
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class EngineView:
    """One followed engine as the index knows it."""

    key: EngineKey
    info: EngineInfo
    state: StreamState
    digest: TierDigest
    """Count and XOR of its HBM rows."""
    pending_blocks: int
    dropped: int
    """Rows refused because the index was full."""
    streamed: StreamCounts
    blocks: RowCounts


@dataclass(frozen=True, slots=True)
class EngineTrace:
    """Which blocks of a chain one engine has in its own HBM; what its node has is the node's."""

    key: EngineKey
    state: StreamState
    hbm: tuple[bool, ...]


@dataclass(slots=True, eq=False)
class _Engine:
    key: EngineKey
    info: EngineInfo
    holder: Holder
    rows: EngineRows
    announced_at: float
    away_since: float
    state: StreamState = StreamState.AWAY
    base: Holder | None = None
    sequence: EventSequence = field(default_factory=EventSequence)
    dropped: int = 0
    counts: StreamCounts = field(default_factory=StreamCounts)
    told: EngineHit | None = None
    """The last answer about it."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Whose streams are to be followed from now on, and whose no longer."""

    begun: tuple[EngineKey, ...]
    ended: tuple[EngineKey, ...]


class EngineDirectory:
    """All followed engines. Costs are those of the index; O(engines) for `sync` and `views`."""

    def __init__(
        self,
        index: BlockIndex,
        holders: HolderPool,
        base_of: Callable[[NodeId], Holder | None],
        gone_seconds: float,
    ) -> None:
        self._index = index
        self._holders = holders
        self._base_of = base_of
        self._gone_seconds = gone_seconds
        self._engines: dict[EngineKey, _Engine] = {}
        self._by_holder: dict[Holder, _Engine] = {}
        self._refused: set[EngineKey] = set()

    @property
    def refused(self) -> int:
        """Announced engines that are not followed: too many, or what they say is nonsense."""
        return len(self._refused)

    # Which engines there are

    def sync(self, announced: Iterable[tuple[NodeId, EngineInfo]], now: float) -> Changes:
        """Take over who is announced now, and drop who is gone for too long."""
        begun: list[EngineKey] = []
        ended: list[EngineKey] = []
        seen: set[EngineKey] = set()
        self._refused = set()
        for node_id, info in announced:
            key = EngineKey(node_id, info.engine_id, info.dp_rank)
            if not info.events_endpoint or key in seen:
                continue
            seen.add(key)
            engine = self._engines.get(key)
            if engine is not None and not _is_same_stream(engine.info, info):
                self._drop(key)
                ended.append(key)
                engine = None
            if engine is not None:
                engine.info, engine.announced_at = info, now
            elif self._add(key, info, now):
                begun.append(key)
        for key in [*self._engines]:
            engine = self._engines[key]
            is_away = engine.state is StreamState.AWAY
            unheard = now - engine.announced_at
            if unheard > self._gone_seconds or (unheard > 0 and is_away):
                self._drop(key)
                ended.append(key)
                continue
            if is_away and now - engine.away_since > self._gone_seconds and engine.rows.rows:
                log.warning("engine %s is away: its rows are dropped", key)
                self._empty(engine)
            self._rebase(engine)
        return Changes(tuple(begun), tuple(ended))

    def forget(self, key: EngineKey) -> Changes:
        """Drop an engine at once; if it is still announced, it is a new one."""
        if key not in self._engines:
            return Changes((), ())
        self._drop(key)
        return Changes((), (key,))

    def rebase(self, node_id: NodeId) -> None:
        """The visible holder of this node has changed, or whether it is in answers."""
        for engine in self._engines.values():
            if engine.key.node_id == node_id:
                self._rebase(engine)

    def info(self, key: EngineKey) -> EngineInfo:
        return self._engines[key].info

    # What a stream says

    def counts(self, key: EngineKey) -> StreamCounts:
        return self._engines[key].counts

    def sequence(self, key: EngineKey) -> EventSequence:
        """To ask what is wanted; `offer` is what moves it."""
        return self._engines[key].sequence

    def offer(self, key: EngineKey, seq: int, payload: bytes) -> Verdict:
        """Judge a message, and take it over if it is the next one.

        One that cannot be read is counted and changes nothing.
        """
        engine = self._engines[key]
        verdict = engine.sequence.offer(seq, payload)
        if verdict is Verdict.NEXT:
            self._take(engine, payload)
        elif verdict is Verdict.KNOWN:
            engine.counts.repeated += 1
        return verdict

    def begin_again(self, key: EngineKey) -> None:
        """The engine has restarted: its cache is empty, and its messages begin with 0."""
        engine = self._engines[key]
        engine.counts.restarts += 1
        self._empty(engine)

    def lose(self, key: EngineKey, next_seq: int) -> None:
        """What was before `next_seq` is missed for good: what is in the cache is unknown."""
        engine = self._engines[key]
        engine.counts.lost += 1
        engine.sequence.skip_to(next_seq)
        self._apply(engine, engine.rows.lose())

    def on_current(self, key: EngineKey) -> None:
        """Connected, and nothing is missing."""
        engine = self._engines[key]
        engine.counts.connects += engine.state is StreamState.AWAY
        engine.state = StreamState.CURRENT

    def on_away(self, key: EngineKey, now: float) -> None:
        """The connection is lost."""
        engine = self._engines.get(key)  # None: it is forgotten, and its stream just ends
        if engine is not None and engine.state is StreamState.CURRENT:
            engine.counts.losses += 1
            engine.state, engine.away_since = StreamState.AWAY, now

    # Questions

    def hits(self, found: HolderHits) -> list[EngineHit]:
        """What a query of the index has found, of the engines that are current, longest first."""
        hits = []
        for holder, hit, hbm, dram in found.rows():
            engine = self._by_holder.get(holder)
            if engine is None or engine.state is not StreamState.CURRENT:
                continue
            told = engine.told
            if (
                told is None
                or told.hit_blocks != hit
                or told.hbm_blocks != hbm
                or told.dram_blocks != dram
                or told.url != engine.info.url
            ):
                # Many chains have the beginning in common that most engines hold of them.
                key, ssd = engine.key, hit - hbm - dram
                told = engine.told = EngineHit(
                    key.engine_id, key.dp_rank, engine.info.url, key.node_id, hit, hbm, dram, ssd
                )
            hits.append(told)
        hits.sort(key=_HIT_BLOCKS, reverse=True)
        return hits

    def explain(self, keys: Keys) -> list[EngineTrace]:
        """Every followed engine's blocks of a chain, those left out of answers included."""
        blocks = [
            {
                holding.holder
                for holding in self._index.holdings(IndexKey(key))
                if Tier.HBM in holding.tiers
            }
            for key in keys.tolist()
        ]
        return [
            EngineTrace(engine.key, engine.state, tuple(engine.holder in block for block in blocks))
            for engine in self._engines.values()
        ]

    def views(self) -> list[EngineView]:
        return [
            EngineView(
                engine.key,
                engine.info,
                engine.state,
                self._index.digest(engine.holder, Tier.HBM),
                engine.rows.pending_blocks,
                engine.dropped,
                engine.counts,
                engine.rows.counts,
            )
            for engine in self._engines.values()
        ]

    def live_holders(self) -> list[Holder]:
        return [*self._by_holder]

    def check_integrity(self) -> None:
        """Assert that each engine has its own holder, and the rows that its account says."""
        assert len(self._by_holder) == len(self._engines) <= MAX_ENGINES
        for key, engine in self._engines.items():
            assert engine.key == key
            assert self._by_holder[engine.holder] is engine
            engine.rows.check_integrity()
            engine.sequence.check_integrity()
            if not engine.dropped:
                assert self._index.digest(engine.holder, Tier.HBM).blocks == engine.rows.rows

    # Inside

    def _add(self, key: EngineKey, info: EngineInfo, now: float) -> bool:
        try:
            _check(info)
            if len(self._engines) >= MAX_ENGINES:
                raise UnavailableError(f"{MAX_ENGINES} engines are followed already")
            self._holders.reserve(1)
        except (InvalidRequestError, UnavailableError) as error:
            self._refused.add(key)
            log.debug("engine %s is not followed: %s", key, error)
            return False
        form = ChainForm(
            info.namespace_id,
            info.block_tokens,
            info.engine_block_tokens,
            scheme=info.hash_scheme,
        )
        engine = _Engine(key, info, self._holders.take(), EngineRows(form), now, now)
        self._engines[key] = self._by_holder[engine.holder] = engine
        self._rebase(engine)
        log.info("following the events of engine %s at %s", key, info.events_endpoint)
        return True

    def _drop(self, key: EngineKey) -> None:
        engine = self._engines.pop(key)
        self._empty(engine)  # by its own keys, so that the sweep finds nothing
        del self._by_holder[engine.holder]
        self._holders.retire(engine.holder)
        self._holders.unreserve(1)
        log.info("engine %s is followed no longer", key)

    def _empty(self, engine: _Engine) -> None:
        engine.sequence.begin()
        self._apply(engine, engine.rows.clear())

    def _take(self, engine: _Engine, payload: bytes) -> None:
        counts = engine.counts
        try:
            message = decode_message(payload)
        except InvalidRequestError as error:
            counts.malformed_messages += 1
            log.warning("engine %s: %s", engine.key, error)
            return
        counts.messages += 1
        counts.malformed_events += message.malformed
        counts.unknown_events += message.unknown
        counts.other_media += message.other_media
        self._apply(engine, engine.rows.apply(message.events))

    def _rebase(self, engine: _Engine) -> None:
        base = self._base_of(engine.key.node_id) if engine.key.node_id else None
        if base != engine.base:
            self._index.set_base(engine.holder, base)
            engine.base = base

    def _apply(self, engine: _Engine, changes: Iterable[Event]) -> None:
        for change in changes:
            match change:
                case BlocksStored(tier, keys):
                    applied = self._index.apply_stored(engine.holder, tier, keys)
                    engine.dropped += applied.dropped
                case BlocksRemoved(tier, keys):
                    self._index.apply_removed(engine.holder, tier, keys)


def _is_same_stream(old: EngineInfo, new: EngineInfo) -> bool:
    return (
        old.events_endpoint == new.events_endpoint
        and old.replay_endpoint == new.replay_endpoint
        and old.namespace_id == new.namespace_id
        and old.block_tokens == new.block_tokens
        and old.engine_block_tokens == new.engine_block_tokens
        and old.hash_scheme is new.hash_scheme
    )


def _check(info: EngineInfo) -> None:
    check_endpoint(info.events_endpoint)
    if info.replay_endpoint:
        check_endpoint(info.replay_endpoint)
    if not 0 < info.block_tokens <= MAX_BLOCK_TOKENS:
        raise InvalidRequestError(f"block_tokens {info.block_tokens} is not possible")
    if info.engine_block_tokens and info.block_tokens % info.engine_block_tokens:
        raise InvalidRequestError(
            f"block_tokens {info.block_tokens} is no multiple of the engine's"
            f" {info.engine_block_tokens}"
        )
