"""What `ingest` decides and `directory` carries out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from emberkv_proto.events import Event, Keys
from emberkv_proto.types import BucketXors, Tier

GenerationId = NewType("GenerationId", int)
"""Numbers the generations of one node; never used twice."""


@dataclass(frozen=True, slots=True)
class OpenGeneration:
    """Make room for a generation's rows; no query sees them yet."""

    generation: GenerationId


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply the events to the generation's rows, in order."""

    generation: GenerationId
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Swap:
    """Queries see `generation` from now on; the rows of `replaced` go."""

    generation: GenerationId
    replaced: GenerationId | None


@dataclass(frozen=True, slots=True)
class DropGeneration:
    """Forget a hidden generation's rows."""

    generation: GenerationId


@dataclass(frozen=True, slots=True)
class CompareBuckets:
    """Let the stream wait, compare the generation's rows with these, call `on_compared`."""

    generation: GenerationId
    theirs: tuple[BucketXors, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ReplaceBucket:
    """Make these keys the generation's only rows of the bucket."""

    generation: GenerationId
    tier: Tier
    bucket: int
    keys: Keys


@dataclass(frozen=True, slots=True)
class Resume:
    """End the event stream and subscribe again at `Ingest.position()`."""


@dataclass(frozen=True, slots=True)
class FetchSnapshot:
    """End the event stream, fetch a snapshot, then subscribe at `Ingest.position()`."""


Action = (
    OpenGeneration
    | Apply
    | Swap
    | DropGeneration
    | CompareBuckets
    | ReplaceBucket
    | Resume
    | FetchSnapshot
)
