"""The models whose tokens are made here, and whether engines make the same. On the event loop.

A tokenizer that differs from its engine's would find no hits and say nothing. So some prompts are
put to the engine too; the first that differs is counted, told in the log, and ends the local
tokens of that model.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from emberkv_proto.errors import ConfigError
from router.metrics import RouterMetrics
from router.request_body import RequestBody
from router.tokenize import LocalIds, TokenIds

if TYPE_CHECKING:
    from router.local_tokenizer import LocalTokenizer

log = logging.getLogger(__name__)
FIRST_CHECKED = 4
CHECKED_EVERY = 256


class LocalTokens:
    """Tokenizers by model."""

    def __init__(self, directories: Mapping[str, Path], metrics: RouterMetrics) -> None:
        """Raises ConfigError: one cannot be read, or what reads it is not installed."""
        self._metrics = metrics
        self._asked: dict[str, int] = dict.fromkeys(directories, 0)
        self._tokenizers: dict[str, LocalTokenizer] = {}
        if not directories:
            return
        try:
            from router.local_tokenizer import LocalTokenizer
        except ImportError as error:
            raise ConfigError(
                f"router.tokenizers needs `pip install emberkv[tokens]`: {error}"
            ) from None
        for model, directory in directories.items():
            self._tokenizers[model] = LocalTokenizer(directory)

    def ids(self, model: str, body: RequestBody) -> LocalIds | None:
        """Ids made here, and whether the engine should be asked too; None: only it can tell."""
        tokenizer = self._tokenizers.get(model)
        if tokenizer is None:
            return None
        from router.local_tokenizer import NotRenderedError

        try:
            ids = tokenizer.ids(body)
        except NotRenderedError:
            self._metrics.local_tokens.labels("left_to_engine").inc()
            return None
        self._metrics.local_tokens.labels("made").inc()
        self._asked[model] += 1
        count = self._asked[model]
        return LocalIds(ids, count <= FIRST_CHECKED or count % CHECKED_EVERY == 0)

    def compared(self, model: str, ours: TokenIds, theirs: TokenIds) -> None:
        """An engine has made them as well."""
        if np.array_equal(ours, theirs):
            self._metrics.local_tokens.labels("equal").inc()
            return
        self._metrics.local_tokens.labels("different").inc()
        shorter = min(len(ours), len(theirs))
        differing = np.flatnonzero(ours[:shorter] != theirs[:shorter])
        at = int(differing[0]) if len(differing) else shorter
        log.debug(
            "tokens of %s differ from %d on: %s here, %s there",
            model,
            at,
            ours[at : at + 8].tolist(),
            theirs[at : at + 8].tolist(),
        )
        if self._tokenizers.pop(model, None) is not None:
            log.error(
                "the tokenizer of %s makes other tokens than its engine (%d here, %d there, the"
                " first difference at %d): the engine is asked from now on",
                model,
                len(ours),
                len(theirs),
                at,
            )

    def check_integrity(self) -> None:
        for tokenizer in self._tokenizers.values():
            tokenizer.check_integrity()
