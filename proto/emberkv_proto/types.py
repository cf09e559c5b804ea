"""Value types of the contract. No I/O; everything else imports these.

A block is a fixed run of tokens' KV: all layers of one group, cut into parts, one part for each
(group, shard). It is visible only when the parts of all groups that need every block are committed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""32-byte chained digest (see `hashing`)."""

IndexKey = NewType("IndexKey", int)
"""First 8 bytes of a BlockHash, little endian, never 0. Enough to route, never to serve bytes."""

NamespaceId = NewType("NamespaceId", bytes)
"""First 16 bytes of BLAKE3 over the namespace's canonical JSON."""

SaltId = NewType("SaltId", bytes)
"""First 16 bytes of BLAKE3 over a tenant's cache salt: whose quota a block counts against."""

NodeId = NewType("NodeId", str)
Incarnation = NewType("Incarnation", int)
"""Grows by one at each start of a node's daemon; fences what an earlier life still sends."""

Seq = NewType("Seq", int)
"""Number of an event within one incarnation; the first is 1."""

PartIndex = NewType("PartIndex", int)
"""group index * shard count + shard index."""

BLOCK_HASH_BYTES = 32
NAMESPACE_ID_BYTES = 16
SALT_ID_BYTES = 16


class Tier(IntEnum):
    """Where bytes are, fastest first. Values are the wire's and the index's."""

    HBM = 1
    DRAM = 2
    SSD = 3


class Source(IntEnum):
    """Where a read block was when its lease was granted."""

    HBM = 1
    DRAM = 2
    SSD = 3
    PEER = 4


class StageState(IntEnum):
    """What became of one block of a stage call."""

    GRANTED = 0
    PRESENT = 1
    IN_PROGRESS = 2
    NO_SPACE = 3


class AcquirePolicy(IntEnum):
    """How long an acquire may go on bringing blocks into DRAM."""

    BEST_EFFORT = 0
    TIMEOUT = 1
    WAIT_COMPLETE = 2


class HashScheme(str, Enum):
    """How the hashes of an engine's blocks are made (see `chains`). Values are the wire's."""

    EMBER = ""
    """`hashing.block_hashes`."""
    SGLANG = "sglang"
    """`page_hashes`, rooted in the namespace."""
    UNKNOWN = "unknown"
    """Of a newer version: no hash can be made."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """An inference engine as it announces itself through its session."""

    engine_id: str
    url: str
    model: str
    namespace_id: NamespaceId
    block_tokens: int
    role: str = "both"
    dp_rank: int = 0
    events_endpoint: str = ""
    """ZMQ endpoint of the events of its own (HBM) cache; empty: it publishes none."""
    replay_endpoint: str = ""
    """Where missed events can be asked for; empty: nowhere."""
    engine_block_tokens: int = 0
    """Tokens of the engine's own blocks, of which ours is a multiple; 0: as its events say."""
    hash_scheme: HashScheme = HashScheme.EMBER


@dataclass(frozen=True, slots=True)
class TierDigest:
    """What a node's rows in one tier must add up to."""

    tier: Tier
    blocks: int
    xor: int
    capacity_bytes: int = 0
    used_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BucketXors:
    """What a node's rows in each bucket of one tier must add up to (see `buckets`)."""

    tier: Tier
    xors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BucketChoice:
    """Some buckets of one tier, ascending."""

    tier: Tier
    buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NodeReport:
    """A node's heartbeat on its event stream."""

    node_id: NodeId
    incarnation: Incarnation
    seq: Seq
    state: str
    tiers: tuple[TierDigest, ...]
    engines: tuple[EngineInfo, ...]
    grpc_address: str
    sent_unix_seconds: float
    bucket_xors: tuple[BucketXors, ...] = ()
    """All of a node's tiers, or none: only a subscription that asks for them gets them."""


@dataclass(frozen=True, slots=True)
class NodeHit:
    """How much of a chain one node holds: its leading blocks, counted at their fastest tier."""

    node_id: NodeId
    hit_blocks: int
    dram_blocks: int
    ssd_blocks: int


@dataclass(frozen=True, slots=True)
class EngineHit:
    """How much of a chain one engine finds in its own HBM or on its node, block by block.

    Counted at the fastest tier of each block. One for each data-parallel rank.
    """

    engine_id: str
    dp_rank: int
    url: str
    node_id: NodeId
    """Empty: of no node that the index follows."""
    hit_blocks: int
    hbm_blocks: int
    dram_blocks: int
    ssd_blocks: int


@dataclass(frozen=True, slots=True)
class ChainHits:
    """Who holds how much of one chain, longest first."""

    nodes: tuple[NodeHit, ...] = ()
    engines: tuple[EngineHit, ...] = ()
    """Only engines that publish their events."""
