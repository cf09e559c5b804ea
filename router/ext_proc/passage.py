"""A request that Envoy carries to an engine: its charge, and what its answer tells.

Where Envoy shows the answer's body, its first bytes end the prefill and its last ones tell the
delivered hit; where it shows only the head, the head ends the prefill.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType

from router import usage
from router.decision import Chooser, Decision, Plan
from router.engines import Engine
from router.health import FAILED_STATUSES
from router.hit_counts import count_hits
from router.load import Charge, LoadLedger
from router.metrics import RouterMetrics
from router.relay import KEPT_STREAM_PIECES
from router.scoring import attention_pairs
from router.speeds import SpeedBook
from router.tenants import Visit
from router.trip import work_until_first_byte


class Passage:
    """From the choice until Envoy's stream ends; use as a context manager, once.

    `engines` are those Envoy may try, in order; the charge is on the first until Envoy says that
    another one answered.
    """

    def __init__(
        self,
        chooser: Chooser,
        ledger: LoadLedger,
        speeds: SpeedBook,
        metrics: RouterMetrics,
        plan: Plan,
        decision: Decision,
        engines: Sequence[Engine],
        visit: Visit | None,
    ) -> None:
        self._ledger = ledger
        self._metrics = metrics
        self._plan = plan
        self._decision = decision
        self._engines = engines
        self._visit = visit
        self.engine = engines[0]
        self._status = 0
        self._is_stream = False
        self._kept: deque[bytes] = deque(maxlen=0)
        self._kept_bytes = 0
        self._has_begun = False
        """A byte of the body was shown."""
        self._is_over = False
        self._held = ExitStack()
        self._charge: Charge = ledger.charge(self.engine.url, *self._work())
        self._held.callback(lambda: self._charge.release())
        self._watched = self._held.enter_context(speeds.watch(self.engine.url))
        self._is_watched = True
        chooser.note_routed(decision)

    def __enter__(self) -> Passage:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._status or (self._has_begun and not self._is_over):
            self._metrics.aborts.inc()
        elif not self._is_over:
            # The body was not shown: whether it was whole nobody knows.
            self._charge.finished()
            if self._status == 200:
                self._count(None)
        self._held.close()

    @property
    def predicted_hit_tokens(self) -> int:
        """Of the first engine; nothing is predicted of one that Envoy fell back to."""
        return self._decision.predicted_hit_tokens if self._is_watched else 0

    def served_by(self, engine: Engine, now: float) -> None:
        """Envoy says who answered: the charge moves there, and those before it have failed."""
        if engine is self.engine:
            return
        passed = self._engines[: self._engines.index(engine)] if engine in self._engines else ()
        for failed in passed:
            failed.health.request_failed(now)
            self._metrics.upstream_errors.labels(failed.name, "passed_over").inc()
        self._metrics.retries.labels("envoy").inc()
        moved = self._ledger.charge(engine.url, *self._work())
        self._charge.release()
        self._charge, self.engine = moved, engine
        self._is_watched = False

    def answered(self, status: int, content_type: bytes, now: float) -> None:
        """The head of the answer came."""
        self._status = status
        self._is_stream = content_type.lower().startswith(b"text/event-stream")
        self._kept = deque(maxlen=KEPT_STREAM_PIECES if self._is_stream else None)
        self._metrics.requests.labels(self.engine.name, str(status)).inc()
        if status in FAILED_STATUSES:
            self.engine.health.request_failed(now)
            self._metrics.upstream_errors.labels(self.engine.name, str(status)).inc()
        else:
            self.engine.health.request_succeeded()

    def begun(self) -> None:
        """The engine has prefilled. May be repeated."""
        self._charge.prefilled()
        if self._is_watched:
            self._watched.answered()

    def piece(self, data: bytes) -> None:
        """A piece of the answer's body, as Envoy shows it."""
        if not data:
            return
        self._has_begun = True
        self.begun()
        self._kept.append(data)
        if not self._is_stream:
            self._kept_bytes += len(data)
            if self._kept_bytes > usage.MAX_PARSED_BYTES:
                self._kept = deque(maxlen=0)

    def ended(self) -> None:
        """The whole answer came."""
        self._is_over = True
        self._charge.finished()
        if self._status != 200:
            return
        raw = b"".join(self._kept)
        delivered = usage.from_stream_tail(raw) if self._is_stream else usage.from_json(raw)
        self._count(delivered)
        if self._visit is not None:
            self._visit.spend_answer(usage.answered_tokens(raw, is_stream=self._is_stream))
        worked = work_until_first_byte(self._decision, delivered, self._is_stream)
        if worked is not None and self._is_watched:
            self._watched.told(worked)

    def _count(self, delivered: usage.Delivered | None) -> None:
        """Nothing was predicted of an engine that Envoy fell back to."""
        if self._is_watched:
            count_hits(self._metrics, self._decision, delivered)

    def _work(self) -> tuple[int, int]:
        uncached = self._decision.chosen.estimate.uncached_tokens
        return uncached, attention_pairs(uncached, self._plan.prompt_tokens)
