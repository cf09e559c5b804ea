"""Dynamo's `RadixTree` (ai-dynamo-runtime, Apache-2.0) through its Python binding, as a child.

Its events are JSON; they are written before the clock starts and read by it inside `apply_event`.
Questions are lists of numbers, as its callers have them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial

from dynamo.llm import RadixTree

from benchmarks._index_load import Adapter, Keys, Load
from benchmarks._workers import serve


class DynamoTree(Adapter):
    def __init__(self) -> None:
        self._tree = RadixTree()

    def stored(self, keys: Keys, parent: int | None) -> bytes:
        blocks = [{"block_hash": key, "tokens_hash": key} for key in keys.tolist()]
        return _event({"stored": {"parent_hash": parent, "blocks": blocks}})

    def removed(self, keys: Keys) -> bytes:
        return _event({"removed": {"block_hashes": keys.tolist()}})

    def tell(self, node: int, events: Sequence[bytes]) -> Callable[[], object]:
        if len(events) == 1:
            return partial(self._tree.apply_event, node, events[0])
        return partial(self._apply, node, events)

    def _apply(self, node: int, events: Sequence[bytes]) -> None:
        """Its binding takes an event a call."""
        for event in events:
            self._tree.apply_event(node, event)

    def question(self, keys: Keys) -> Callable[[], dict[int, int]]:
        chain = keys.tolist()

        def ask() -> dict[int, int]:
            scores = self._tree.find_matches(chain).scores
            return {worker: hit for (worker, _), hit in scores.items()}

        return ask

    def drain(self) -> None:
        self._tree.find_matches([1])  # answered in turn, after the events


def _event(data: dict[str, object]) -> bytes:
    return json.dumps({"event_id": 0, "data": data}).encode()


if __name__ == "__main__":
    serve(Load(DynamoTree()).verbs)
