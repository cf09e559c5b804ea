"""A release with small tiers on this machine, for the tests that run its pods."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.cluster import free_port
from tests.helpers.manifests import Manifest, template_of
from tests.helpers.pod import Node, require_mounts
from tests.helpers.site import Site

NAMES = ("emberkv-store.emberkv.svc", "emberkv-index.emberkv.svc")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Small tiers, free ports, monitoring and the engine example on; all else as the chart is."""
    require_mounts()
    tmp_path.chmod(0o755)
    grpc, metrics, transfer, router, index, index_metrics, engine = (free_port() for _ in range(7))
    values: Manifest = {
        "store": {
            "ports": {"grpc": grpc, "metrics": metrics, "transfer": transfer},
            "pool": {"capacityMi": 64},
            "ssd": {"capacityMi": 512},
            "config": {
                "dram": {"capacity_bytes": 16 << 20, "extent_bytes": 1 << 20},
                "ssd": {"segment_bytes": 8 << 20},
            },
        },
        "router": {"port": router, "config": {"index": {"backend": "python"}}},
        "index": {"ports": {"grpc": index, "metrics": index_metrics}},
        "monitoring": {"enabled": True},
        "vllm": {"enabled": True, "port": engine},
    }
    shm = Path(f"/dev/shm/emberkv-test-k8s-{os.getpid()}")
    shm.mkdir(mode=0o755)
    site = Site(template_of(values, tmp_path), Node(tmp_path, shm, hosts=NAMES))
    try:
        yield site
    finally:
        site.close()
        shutil.rmtree(shm)
