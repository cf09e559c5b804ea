"""A block and the namespace it belongs to, as the daemon keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from emberkv_proto.groups import WHOLE_PREFIX
from emberkv_proto.layout import Namespace
from emberkv_proto.types import BlockHash, NamespaceId, SaltId
from store_daemon.needs import Needs, longest_hit, required_parts
from store_daemon.policies.base import NOWHERE
from store_daemon.tiers.slots import SizeClass

if TYPE_CHECKING:
    from store_daemon.tenants import Tenant
    from store_daemon.tiers.slots import Slot
    from store_daemon.tiers.ssd import SsdRow


VALUES_FAMILY = "resp"
"""Engine family of the namespaces of values that clients replace and delete."""
PINNED = 1
"""Bit of `Block.stays`: an operator's pin lies on it."""
UNWRITTEN = 2
"""Bit of `Block.stays`: it was chosen for eviction and waits for its SSD copy."""


@dataclass(frozen=True, eq=False, slots=True)
class StoredNamespace:
    """A namespace that blocks of this node belong to; one object for each id."""

    id: NamespaceId
    namespace: Namespace
    size_classes: tuple[SizeClass, ...]
    """Per part."""
    required: tuple[int, ...]
    """Parts without which a block is resident nowhere."""
    optional: tuple[int, ...]
    """The other parts."""
    everything: Needs
    is_hybrid: bool
    """Whether it has groups that need only some blocks of a hit."""
    slot_bytes: int
    """DRAM that a whole block takes."""

    @staticmethod
    def of(namespace: Namespace) -> StoredNamespace:
        namespace_id = namespace.id
        classes = tuple(
            SizeClass(namespace_id, part, namespace.part_bytes(part))
            for part in range(namespace.parts)
        )
        required = required_parts(namespace)
        return StoredNamespace(
            namespace_id,
            namespace,
            classes,
            required,
            tuple(part for part in range(namespace.parts) if part not in required),
            Needs.everything(namespace),
            any(group.kind not in WHOLE_PREFIX for group in namespace.groups),
            sum(size_class.slot_bytes for size_class in classes),
        )

    @property
    def parts(self) -> int:
        return len(self.size_classes)

    @property
    def block_bytes(self) -> int:
        """Payload of a whole block."""
        return sum(size_class.payload_bytes for size_class in self.size_classes)

    def needs(self, length: int) -> Needs:
        """What a hit of `length` blocks needs."""
        return Needs.of(self.namespace, length) if self.is_hybrid else self.everything

    def longest_hit(self, held: Sequence[Sequence[bool]]) -> int:
        """Blocks of the longest usable hit; `held` says of each block which parts are there."""
        return longest_hit(self.namespace, held)

    def has_required(self, places: Sequence[object]) -> bool:
        """Whether each required part has a place (not None)."""
        if not self.optional:
            return None not in places
        return all(places[part] is not None for part in self.required)


@dataclass(eq=False, slots=True)
class Block:
    """One block and its places. Written by the catalog, but for `is_verified` and what is
    eviction's: from `access` on, without `leans`."""

    hash: BlockHash
    namespace: StoredNamespace
    parent: BlockHash | None
    slots: list[Slot | None]
    """Per part, its committed place in DRAM."""
    rows: list[SsdRow | None]
    """Per part, its place on SSD."""
    in_dram: bool = False
    in_ssd: bool = False
    is_verified: bool = True
    """False for DRAM content of an earlier life until its checksum was computed again."""
    is_doomed: bool = False
    pins: int = 0
    """Leases and transfers that hold the slots."""
    writers: int = 0
    """Parts that are staged and not committed, as a bit per part."""
    access: int = 0
    """Number of the last access; a smaller one is older."""
    leans: bool = False
    """Whether it counts as a child of its parent: it has, or is getting, a place in DRAM, and does
    not come from itself."""
    takes_room: bool = False
    """Whether it has, or is getting, a place in DRAM."""
    is_queued: bool = False
    """Whether the eviction queue holds it."""
    ticket: int = 0
    """Number of its entry in the queue."""
    uses: int = 0
    """How often it was asked for again since it came to DRAM; a policy may let it age."""
    used_at: float = 0.0
    """When `uses` last grew."""
    lane: int = NOWHERE
    rank: float = 0.0
    """Where the policy keeps it."""
    turn: int = 0
    """How many blocks before it in its chain had been used again when their child came."""
    depth: int = 0
    """Blocks before it in its chain, as far as they were known when it came."""
    tenant: Tenant | None = None
    """Whose quota it counts against; None: nobody's."""
    stays: int = 0
    """Why it must not be evicted although nobody reads it: PINNED, UNWRITTEN."""

    @property
    def salt_id(self) -> SaltId | None:
        return self.tenant.salt_id if self.tenant is not None else None

    @property
    def dram_bytes(self) -> int:
        """What its slots take in DRAM, those being written included."""
        return sum(
            size_class.slot_bytes
            for part, size_class in enumerate(self.namespace.size_classes)
            if self.slots[part] is not None or self.writers >> part & 1
        )

    @property
    def ssd_bytes(self) -> int:
        """What its records take in their segments."""
        return sum(row.end - row.offset for row in self.rows if row is not None)

    @property
    def held_parts(self) -> list[bool]:
        """Per part, whether it is in DRAM or on SSD."""
        pairs = zip(self.slots, self.rows, strict=True)
        return [slot is not None or row is not None for slot, row in pairs]

    @property
    def is_saved(self) -> bool:
        """Whether all that is in DRAM is on SSD too."""
        pairs = zip(self.slots, self.rows, strict=True)
        return all(slot is None or row is not None for slot, row in pairs)
