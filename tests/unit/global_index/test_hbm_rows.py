"""An engine's events in, rows of our blocks out: the same as a naive account says."""

from __future__ import annotations

import base64
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from client_sdk.engine.vllm_connector.chains import RequestChain
from emberkv_proto.events import BlocksRemoved, BlocksStored, Event
from emberkv_proto.hashing import block_hashes, chain_root, index_key, lora_key
from emberkv_proto.types import NamespaceId, Tier
from global_index.hbm import rows as rows_module
from global_index.hbm.decoding import decode_message
from global_index.hbm.events import (
    EngineCleared,
    EngineEvent,
    EngineHash,
    EngineRemoved,
    EngineStored,
    MediaAt,
)
from global_index.hbm.places import ChainForm
from global_index.hbm.rows import EngineRows

SPACE = NamespaceId(b"n" * 16)
FORM = ChainForm(SPACE, 4)
SAMPLE = Path(__file__).parents[2] / "data" / "vllm_kv_events.jsonl"


def stored(
    hashes: list[EngineHash],
    tokens: list[int],
    *,
    parent: EngineHash | None = None,
    size: int = 4,
    group: int = 0,
    salt: str = "",
    adapter: str = "",
    media: tuple[tuple[MediaAt, ...], ...] = (),
    is_full: bool = True,
) -> EngineStored:
    return EngineStored(
        tuple(hashes),
        parent,
        np.array(tokens, np.uint32),
        size,
        group,
        is_full,
        salt,
        adapter,
        media,
        len(hashes),
    )


def removed(*hashes: EngineHash, group: int = 0) -> EngineRemoved:
    return EngineRemoved(hashes, group)


class Table:
    """What an index holds after the changes, which must each change something."""

    def __init__(self) -> None:
        self.keys: set[int] = set()

    def take(self, changes: list[Event]) -> None:
        for change in changes:
            match change:
                case BlocksStored(Tier.HBM, keys):
                    assert not self.keys.intersection(keys.tolist()), "stored twice"
                    self.keys.update(keys.tolist())
                case BlocksRemoved(Tier.HBM, keys):
                    assert self.keys.issuperset(keys.tolist()), "removed when absent"
                    self.keys.difference_update(keys.tolist())
                case other:
                    raise AssertionError(f"{other} is of no HBM row")


def keys_of(tokens: list[int], *, size: int = 4, salt: str = "", **more: object) -> list[int]:
    hashes = block_hashes(SPACE, tokens, size, salt=salt.encode(), **more)  # type: ignore[arg-type]
    return [index_key(block) for block in hashes]


@pytest.fixture
def table() -> Table:
    return Table()


@pytest.fixture
def engine(table: Table) -> EngineRows:
    return EngineRows(FORM)


def tell(engine: EngineRows, table: Table, *events: EngineEvent) -> None:
    table.take(engine.apply(events))
    engine.check_integrity()
    assert len(table.keys) == engine.rows


PROMPT = list(range(12))


def test_a_chain_is_stored_grows_and_leaves(engine: EngineRows, table: Table) -> None:
    tell(engine, table, stored([1, 2], PROMPT[:8]))
    tell(engine, table, stored([3], PROMPT[8:], parent=2))
    assert table.keys == set(keys_of(PROMPT))
    tell(engine, table, removed(2))
    assert table.keys == {keys_of(PROMPT)[0], keys_of(PROMPT)[2]}
    tell(engine, table, stored([2], PROMPT[4:8], parent=1))
    assert table.keys == set(keys_of(PROMPT))
    tell(engine, table, EngineCleared())
    assert table.keys == set()
    assert engine.counts.cleared == 1


def test_a_child_waits_for_its_parent(engine: EngineRows, table: Table) -> None:
    tell(engine, table, stored([3], PROMPT[8:], parent=2))
    tell(engine, table, stored([2], PROMPT[4:8], parent=1))
    assert table.keys == set()
    assert engine.pending_blocks == 2
    tell(engine, table, stored([1], PROMPT[:4]))
    assert table.keys == set(keys_of(PROMPT))
    assert engine.pending_blocks == 0


def test_a_child_removed_while_it_waits_is_no_row(engine: EngineRows, table: Table) -> None:
    tell(engine, table, stored([2], PROMPT[4:8], parent=1), removed(2))
    tell(engine, table, stored([1], PROMPT[:4]))
    assert table.keys == {keys_of(PROMPT)[0]}


def test_a_block_stored_twice_leaves_with_its_last_copy(engine: EngineRows, table: Table) -> None:
    tell(engine, table, stored([1, 2], PROMPT[:8]), stored([1, 2], PROMPT[:8]), removed(1))
    assert table.keys == set(keys_of(PROMPT[:8]))
    tell(engine, table, removed(1))
    assert table.keys == {keys_of(PROMPT)[1]}
    tell(engine, table, removed(1))
    assert engine.counts.unmatched_removals == 1


def test_two_engine_hashes_of_one_block_of_ours_are_one_row(
    engine: EngineRows, table: Table
) -> None:
    tell(engine, table, stored([1], PROMPT[:4]), stored([b"other"], PROMPT[:4]), removed(1))
    assert table.keys == {keys_of(PROMPT)[0]}
    tell(engine, table, removed(b"other"))
    assert table.keys == set()


def test_our_block_is_there_while_all_its_engine_blocks_are(table: Table) -> None:
    engine = EngineRows(ChainForm(SPACE, 8))
    prompt = list(range(16))
    ours = keys_of(prompt, size=8)
    tell(engine, table, stored([1, 2, 3], prompt[:6], size=2))
    assert table.keys == set()
    tell(engine, table, stored([4, 5, 6, 7], prompt[6:14], size=2, parent=3))
    assert table.keys == {ours[0]}
    tell(engine, table, stored([8], prompt[14:], size=2, parent=7))
    assert table.keys == set(ours)
    tell(engine, table, removed(6))
    assert table.keys == {ours[0]}
    tell(engine, table, removed(2), stored([6], prompt[10:12], size=2, parent=5))
    assert table.keys == {ours[1]}
    branch = [*prompt[:6], 90, 91]
    tell(engine, table, stored([40], branch[6:], size=2, parent=3))
    assert table.keys == {ours[1]}
    tell(engine, table, stored([2], prompt[2:4], size=2, parent=1))
    assert table.keys == {*ours, *keys_of(branch, size=8)}


def test_a_block_is_there_when_every_counted_group_has_it(engine: EngineRows, table: Table) -> None:
    tell(engine, table, stored([1, 2], PROMPT[:8]))
    tell(engine, table, stored([1], PROMPT[:4], group=2))
    assert table.keys == {keys_of(PROMPT)[0]}, "a second group makes it open what is there"
    tell(engine, table, stored([2], PROMPT[4:8], group=2, parent=1))
    assert table.keys == set(keys_of(PROMPT[:8]))
    tell(engine, table, removed(1, group=2))
    assert table.keys == {keys_of(PROMPT)[1]}


def test_window_groups_are_counted_and_change_nothing(engine: EngineRows, table: Table) -> None:
    tell(engine, table, stored([1], PROMPT[:4]))
    tell(engine, table, stored([1], PROMPT[:4], group=1, is_full=False), removed(1, group=1))
    assert table.keys == {keys_of(PROMPT)[0]}
    assert engine.counts.other_groups == 2


def test_entries_for_parts_of_blocks_are_left_out(engine: EngineRows, table: Table) -> None:
    tell(engine, table, stored([1], PROMPT[:4]), stored([9], [7, 7], parent=1, size=2))
    tell(engine, table, stored([8], [7, 7, 7], parent=1))
    assert table.keys == {keys_of(PROMPT)[0]}
    assert engine.counts.odd_sizes == 2


def test_blocks_without_tokens_are_found_if_they_were_known(
    engine: EngineRows, table: Table
) -> None:
    tell(engine, table, stored([1], PROMPT[:4]), removed(1))
    tell(engine, table, stored([1], []), stored([2], [], parent=1))
    assert table.keys == {keys_of(PROMPT)[0]}
    assert engine.counts.without_tokens == 1


def test_an_unknown_key_takes_its_descendants_out(engine: EngineRows, table: Table) -> None:
    event = replace(stored([1, 2], PROMPT[:8]), understood_blocks=1)
    tell(engine, table, event, stored([3], PROMPT[8:], parent=2))
    assert table.keys == {keys_of(PROMPT)[0]}
    assert engine.counts.not_understood == 2


def test_adapters_count_when_their_weights_are_known(table: Table) -> None:
    engine = EngineRows(replace(FORM, adapters=(("bot", "weights-1"),)))
    tell(engine, table, stored([1], PROMPT[:4], adapter="bot"), stored([2], PROMPT[:4]))
    tell(engine, table, stored([3], PROMPT[:4], adapter="else"))
    own = keys_of(PROMPT[:4], extra_keys=(lora_key("bot", "weights-1"),))
    assert table.keys == {*own, *keys_of(PROMPT[:4])}
    assert engine.counts.not_understood == 1


def test_lost_messages_cost_no_descendants(engine: EngineRows, table: Table) -> None:
    tell(engine, table, stored([1, 2], PROMPT[:8]))
    table.take(engine.lose())
    engine.check_integrity()
    assert (engine.rows, table.keys) == (0, set())
    tell(engine, table, stored([3], PROMPT[8:], parent=2))
    assert table.keys == {keys_of(PROMPT)[2]}


def test_memory_is_bounded(
    engine: EngineRows, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "MAX_RESIDENT_BLOCKS", 50)
    monkeypatch.setattr(rows_module, "MAX_IDLE_BLOCKS", 20)
    monkeypatch.setattr(rows_module, "MAX_PENDING_BLOCKS", 10)
    for n in range(0, 300, 3):
        tell(engine, table, stored([n, n + 1], [n] * 8))
        tell(engine, table, stored([n + 2], [n] * 4, parent=-n - 1))
        if n % 2:
            tell(engine, table, removed(n), removed(n + 1))
    assert engine.counts.over_capacity > 0
    assert engine.counts.orphans > 0
    assert engine.pending_blocks <= 10


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 3))
def test_what_is_forgotten_for_want_of_room_costs_rows_and_never_makes_any(
    rng: Random, pages: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, limit in (("RESIDENT", 12), ("IDLE", 4), ("PENDING", 3)):
            patch.setattr(rows_module, f"MAX_{name}_BLOCKS", limit)
        engine, table = EngineRows(ChainForm(SPACE, 2 * pages)), Table()
        copies: Counter[tuple[int, ...]] = Counter()
        for _ in range(60):
            path = tuple(rng.choices((0, 1), k=rng.randint(1, 6)))
            blocks = [path[:n] for n in range(rng.randint(1, len(path)), len(path) + 1)]
            if rng.random() < 0.5:
                copies.update(blocks)
                before = blocks[0][:-1]
                event: EngineEvent = stored(
                    [name_of(block) for block in blocks],
                    [token for block in blocks for token in (block[-1], 7)],
                    parent=name_of(before) if before else None,
                    size=2,
                )
            else:
                copies[path] = max(0, copies[path] - 1)
                event = removed(name_of(path))
            tell(engine, table, event)
            possible = {
                keys_of([token for value in block for token in (value, 7)], size=2 * pages)[-1]
                for block in +copies
                if len(block) % pages == 0
                and all(copies[block[: len(block) - n]] for n in range(pages))
            }
            assert table.keys <= possible


class Request(SimpleNamespace):
    """What the connector reads of an engine's request."""

    cache_salt = None
    lora_request = None
    prompt_embeds = None
    mm_features: tuple[object, ...] = ()


@pytest.mark.parametrize("engine_block", [4, 8, 16])
def test_the_connector_and_the_events_of_a_request_agree(engine_block: int, table: Table) -> None:
    """Salt, images that begin in the middle of blocks and span several, blocks of several pages."""
    tokens = [(7 * i * i + 3) % 50000 for i in range(70)]
    images = [("digest-a", 3, 22), ("digest-b", 30, 2), ("digest-b", 32, 20)]
    position = [SimpleNamespace(offset=o, length=n) for _, o, n in images]
    features = [
        SimpleNamespace(identifier=name, mm_position=place)
        for (name, _, _), place in zip(images, position, strict=True)
    ]
    request = Request(prompt_token_ids=tokens, cache_salt="tenant", mm_features=features)
    theirs = RequestChain(request, SPACE, 16).grow(tokens)  # type: ignore[arg-type]
    media = tuple(
        tuple(
            MediaAt(name, offset - start)
            for name, offset, length in images
            if offset < start + engine_block and offset + length > start
        )
        for start in range(0, 64, engine_block)
    )
    names: list[EngineHash] = [100 + n for n in range(len(media))]
    cut = 3
    engine = EngineRows(ChainForm(SPACE, 16))
    events = [
        stored(
            names[:cut],
            tokens[: cut * engine_block],
            size=engine_block,
            salt="tenant",
            media=media[:cut],
        ),
        stored(
            names[cut:],
            tokens[cut * engine_block : 64],
            size=engine_block,
            parent=names[cut - 1],
            media=media[cut:],
        ),
    ]
    tell(engine, table, *events)
    assert table.keys == {index_key(block) for block in theirs}
    assert len(table.keys) == 4


@pytest.mark.parametrize("run", ["int_hashes", "bytes_hashes", "kill9_restart_bs128"])
@pytest.mark.parametrize("pages", [1, 2])
def test_a_real_engines_stream_gives_its_rows(run: str, pages: int, table: Table) -> None:
    """Against an account that knows each block's whole prompt, from the same messages."""
    messages = []
    for line in SAMPLE.read_text().splitlines():
        row = json.loads(line)
        if row["run"] == run and row["source"] == "pub":
            messages.append(decode_message(base64.b64decode(row["frames"][2])))
    size = next(e.block_tokens for m in messages for e in m.events if isinstance(e, EngineStored))
    engine = EngineRows(ChainForm(SPACE, size * pages))
    prompts: dict[EngineHash, tuple[list[int], str]] = {}
    parents: dict[EngineHash, EngineHash | None] = {}
    copies: Counter[EngineHash] = Counter()
    for message in messages:
        for event in message.events:
            match event:
                case EngineStored(hashes=hashes, parent=parent):
                    for number, block in enumerate(hashes):
                        before, salt = prompts[parent] if parent is not None else ([], event.salt)
                        own = event.tokens[number * size : (number + 1) * size].tolist()
                        prompts[block], parents[block] = ([*before, *own], salt), parent
                        parent = block
                        copies[block] += 1
                case EngineRemoved(hashes=hashes):
                    copies.subtract(hashes)
                case EngineCleared():
                    copies.clear()
        tell(engine, table, *message.events)
        expected = set()
        for block, (tokens, salt) in prompts.items():
            page: EngineHash | None = block
            run_of_pages = []
            while page is not None and len(run_of_pages) < pages:
                run_of_pages.append(page)
                page = parents[page]
            if len(tokens) % (size * pages) == 0 and all(copies[p] > 0 for p in run_of_pages):
                expected.add(keys_of(tokens, size=size * pages, salt=salt)[-1])
        assert table.keys == expected
    assert engine.counts.unmatched_removals == 0


def name_of(block: tuple[int, ...]) -> EngineHash:
    """What the engine calls the block at the end of this path."""
    number = int("1" + "".join(map(str, block)), 2)
    return number if number % 3 else str(number).encode()


class EngineHistory(RuleBasedStateMachine):
    """Prompts over a small alphabet, whose blocks come and go in any order."""

    @initialize(pages=st.integers(1, 3))
    def begin(self, pages: int) -> None:
        self.pages = pages
        self.engine, self.table = EngineRows(ChainForm(SPACE, 2 * pages)), Table()
        self.copies: Counter[tuple[int, ...]] = Counter()
        self.told: set[tuple[int, ...]] = set()
        """Blocks whose place in the chain was ever told."""

    @rule(path=st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple), first=st.data())
    def store(self, path: tuple[int, ...], first: st.DataObject) -> None:
        """The path's last blocks; engine block n is the path up to n."""
        begin = first.draw(st.integers(0, len(path) - 1))
        blocks = [path[: n + 1] for n in range(begin, len(path))]
        event = stored(
            [name_of(block) for block in blocks],
            [token for block in blocks for token in (block[-1], 7)],
            parent=name_of(path[:begin]) if begin else None,
            size=2,
        )
        self.copies.update(blocks)
        self.told.update(blocks)
        self.tell(event)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.copies:
            block = data.draw(st.sampled_from(sorted(self.copies)))
            self.copies[block] -= 1
            self.copies = +self.copies
            self.tell(removed(name_of(block)))

    @rule()
    def clear(self) -> None:
        self.copies.clear()
        self.told.clear()
        self.tell(EngineCleared())

    @rule()
    def lose(self) -> None:
        self.table.take(self.engine.lose())
        self.copies.clear()

    def tell(self, event: EngineEvent) -> None:
        self.table.take(self.engine.apply([event]))

    @invariant()
    def rows_are_right(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.check_integrity()
        expected = set()
        for block in self.copies:
            pages = [block[: len(block) - n] for n in range(self.pages)]
            chain = [block[:n] for n in range(1, len(block) + 1)]
            if (
                len(block) % self.pages == 0
                and all(self.copies[page] for page in pages)
                and all(part in self.told for part in chain)
            ):
                tokens = [token for value in block for token in (value, 7)]
                expected.add(keys_of(tokens, size=2 * self.pages)[-1])
        assert self.table.keys == expected


TestEngineHistory = EngineHistory.TestCase
TestEngineHistory.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_root_is_no_row(engine: EngineRows) -> None:
    assert engine.rows == 0
    assert chain_root(SPACE) not in block_hashes(SPACE, PROMPT, 4)


def test_event_that_names_a_block_twice_costs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "MAX_IDLE_BLOCKS", 1)
    rows, table = EngineRows(FORM), Table()
    table.take(rows.apply([stored([1, 1, 1, 2], [5, 6, 7, 8], size=1)]))
    rows.check_integrity()
    table.take(rows.apply([removed(2), removed(1, 1, 1), stored([3], [9], size=1), removed(3)]))
    rows.check_integrity()
    assert not table.keys


def test_blocks_told_of_in_a_circle_have_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "MAX_IDLE_BLOCKS", 1)
    rows, table = EngineRows(FORM), Table()
    table.take(rows.apply([stored([1, 2], [5, 6], size=1)]))
    table.take(rows.apply([removed(1), stored([9], [9], size=1), removed(9)]))  # 1 is forgotten
    table.take(rows.apply([stored([2, 1], [6, 5], size=1)]))
    table.take(rows.apply([stored([3], [7], parent=2, size=1)]))
    rows.check_integrity()
    assert rows.counts.orphans == 1
    assert not table.keys
