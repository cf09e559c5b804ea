"""Every block that a node advertises can be had from it, alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from emberkv_proto.hashing import index_keys
from emberkv_proto.types import Tier
from tests.helpers.chains import chain_of, read_chain, write_chain
from tests.helpers.cluster import Cluster

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]
CHAINS = 14
CHAINS_IN_DRAM = 4


def test_each_advertised_block_is_read_back_by_its_own_hash(tmp_path: Path) -> None:
    with Cluster(tmp_path, dram_blocks=30, ssd_blocks=90) as cluster:
        (node,) = cluster.nodes
        chains = [chain_of(number, 6) for number in range(CHAINS)]
        # What DRAM takes at a time, so that blocks are on SSD before they have to leave.
        for first in range(0, CHAINS, CHAINS_IN_DRAM):
            with node.client() as client:
                for chain in chains[first : first + CHAINS_IN_DRAM]:
                    write_chain(client, chain)
            (catalog,) = cluster.await_rest()
        by_key = {
            key: block_hash
            for chain in chains
            for key, block_hash in zip(index_keys(chain).tolist(), chain, strict=True)
        }
        advertised = catalog.rows[Tier.DRAM] | catalog.rows[Tier.SSD]
        assert catalog.rows[Tier.SSD] - catalog.rows[Tier.DRAM], "all of SSD is in DRAM too"
        assert advertised <= by_key.keys(), "a block is advertised that nobody wrote"
        with node.client(10.0) as client:
            for key in sorted(advertised):
                assert read_chain(client, [by_key[key]]) == 1
