"""Room for blocks that come from peers: as replicas, or as blocks of our own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

from emberkv_proto.layout import Namespace
from emberkv_proto.types import BlockHash, SaltId
from store_daemon.block import Block
from store_daemon.holdings import Holdings
from store_daemon.namespaces import NamespaceBook
from store_daemon.staged_run import StagedRun

Lands = Callable[[Block], None]


class Arrivals:
    """Implements `ports.PullTarget`. What arrives is treated as if it had been computed here."""

    def __init__(
        self, holdings: Holdings, namespaces: NamespaceBook, on_taken: Callable[[], None]
    ) -> None:
        """`on_taken`: told when DRAM may have come over its watermark."""
        self._holdings = holdings
        self._namespaces = namespaces
        self._on_taken = on_taken
        self.is_closed = False
        """Nothing gets room any more."""

    def allot(
        self,
        namespace: Namespace,
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        salt_ids: Sequence[SaltId | None] = (),
    ) -> StagedRun:
        """Stage the leading blocks that are nowhere here yet and for which there is room."""
        own = self._namespaces.enter(namespace)
        holdings = self._holdings
        holdings.catalog.wake(hashes)
        run = StagedRun(holdings, self._begin(own.block_bytes * len(hashes)))
        holdings.queue.next_access()
        for block_hash, salt_id in zip_longest(hashes, salt_ids[: len(hashes)]):
            if block_hash in holdings.catalog.blocks or self.is_closed:
                break
            tenant = holdings.tenants.of(salt_id)
            slots = holdings.take_all(own, range(own.parts), tenant)
            if slots is None:
                holdings.counters["no_space_pulls"] += 1
                break
            run.add(own, block_hash, parent, slots, tenant)
            parent = block_hash
        holdings.publish()
        self._on_taken()
        return run

    def _begin(self, run_bytes: int) -> Lands:
        """What is done with each block of a new run, before it lands."""
        return lambda block: None


class ReplicaArrivals(Arrivals):
    """Implements `ports.PullTarget`. What was not pulled often enough arrives as a replica."""

    def _begin(self, run_bytes: int) -> Lands:
        replicas = self._holdings.replicas
        self._holdings.shed_replicas(run_bytes)
        run = replicas.begin_run()

        def lands(block: Block) -> None:
            if replicas.is_wanted(block.hash):
                self._holdings.counters["kept_replicas"] += 1
            else:
                replicas.add(run, block)

        return lands
