"""Pages that must not be given to others while their blocks are saved.

A request keeps the pages that its layers still read. Those that a window or a state leaves behind
are free at once, in the middle of the request, while a save may be reading them: vLLM's count of a
page's users keeps them, one more of which we are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


class PageHolds:
    """Pages held for saves, by the number of the save. The scheduler's thread uses it."""

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._held: dict[int, tuple[int, ...]] = {}

    def bind(self, pool: BlockPool) -> None:
        """The engine's pages, before the first `hold`."""
        self._pool = pool

    @property
    def is_empty(self) -> bool:
        return not self._held

    def hold(self, save: int, pages: Sequence[int]) -> None:
        """Keep pages that a request owns now, until `release`."""
        assert self._pool is not None, "the engine has not shown its pages"
        assert save not in self._held
        self._held[save] = tuple(pages)
        self._pool.touch([self._pool.blocks[page] for page in pages])

    def release(self, save: int) -> None:
        """The save has ended on all ranks. No effect where nothing was held for it."""
        pages = self._held.pop(save, ())
        if pages:
            assert self._pool is not None
            # As vLLM frees a request: the end of a prefix is of less use than its begin.
            self._pool.free_blocks([self._pool.blocks[page] for page in reversed(pages)])

    def check_integrity(self, saves: Iterable[int]) -> None:
        """Assert that pages are held for saves under way only, and are in use."""
        assert self._held.keys() <= {*saves}
        for pages in self._held.values():
            assert self._pool is not None
            assert all(self._pool.blocks[page].ref_cnt > 0 for page in pages)
