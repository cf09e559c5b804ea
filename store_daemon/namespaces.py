"""The namespaces that blocks of this node belong to, made durable before their first block."""

from __future__ import annotations

from emberkv_proto.errors import InvalidRequestError, PoolFullError, UnknownNamespaceError
from emberkv_proto.layout import Namespace
from emberkv_proto.types import NamespaceId
from store_daemon.block import StoredNamespace
from store_daemon.local_index import LocalIndex
from store_daemon.tiers.slots import SlotAllocator

MAX_NAMESPACES = 4096


class NamespaceBook:
    """One object for each id, from the first session that names it on."""

    def __init__(self, index: LocalIndex, slots: SlotAllocator) -> None:
        self._index = index
        self._slots = slots
        self._known = {
            namespace_id: StoredNamespace.of(namespace)
            for namespace_id, namespace in index.namespaces().items()
        }

    def all(self) -> dict[NamespaceId, StoredNamespace]:
        return dict(self._known)

    def get(self, namespace_id: NamespaceId) -> StoredNamespace | None:
        return self._known.get(namespace_id)

    def known(self, namespace_id: NamespaceId) -> StoredNamespace:
        """Raises UnknownNamespaceError."""
        namespace = self._known.get(namespace_id)
        if namespace is None:
            raise UnknownNamespaceError(f"namespace {namespace_id.hex()} is not known here")
        return namespace

    def enter(self, namespace: Namespace) -> StoredNamespace:
        """The namespace as blocks refer to it.

        Raises:
            InvalidRequestError: too many, or one whose blocks do not fit this pool.
            PoolFullError: there is no room to keep it.
        """
        known = self._known.get(namespace.id)
        if known is not None:
            return known
        if len(self._known) >= MAX_NAMESPACES:
            raise InvalidRequestError(f"this node holds {MAX_NAMESPACES} namespaces already")
        if self._slots.extent_count < namespace.parts:
            raise InvalidRequestError(
                f"blocks of {namespace.parts} parts need as many extents, the pool has"
                f" {self._slots.extent_count}; lower dram.extent_bytes or raise dram.capacity_bytes"
            )
        entered = StoredNamespace.of(namespace)
        for size_class in entered.size_classes:
            self._slots.check_fits(size_class)
        try:
            self._index.put_namespace(namespace)
        except OSError as error:
            raise PoolFullError(
                f"a new namespace cannot be kept in daemon.data_dir: {error.strerror}; free space"
                " there"
            ) from None
        self._known[entered.id] = entered
        return entered
