"""Who may fail (design §8): one scenario for each, and what must not be lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from client_sdk import AsyncClient
from emberkv_proto.errors import StaleIncarnationError
from tests.helpers.chains import NAMESPACE, chain_of, payload_of, read_chain, write_chain
from tests.helpers.cluster import Cluster
from tests.helpers.daemon_process import DaemonProcess

pytestmark = pytest.mark.process


def test_a_lease_that_outlived_its_daemon_is_void_before_another_block_takes_its_slot(
    tmp_path: Path,
) -> None:
    slow = {"daemon.heartbeat_seconds": 30.0, "daemon.lease_seconds": 60.0}
    with Cluster(tmp_path, dram_blocks=15, ssd_blocks=0, settings=slow) as cluster:
        (node,) = cluster.nodes
        with node.client() as reader:
            write_chain(reader, chain_of(1, 6))
            with reader.acquire(chain_of(1, 6)) as lease:
                views = [lease.view(i) for i in range(lease.ready_blocks)]
                assert len(views) == 6
                node.kill()
                node.start()
                with node.client() as other:
                    for number in range(2, 8):
                        write_chain(other, chain_of(number, 6))
                    assert read_chain(other, chain_of(7, 6)) == 6
                copies = [bytes(view) for view in views]
                assert copies != [payload_of(h) for h in chain_of(1, 6)], "no slot was taken over"
                assert not lease.is_valid
                with pytest.raises(StaleIncarnationError):
                    lease.require_valid()


async def test_an_async_lease_is_void_before_its_loop_has_heard_of_the_daemons_death(
    tmp_path: Path,
) -> None:
    with DaemonProcess(tmp_path) as daemon:
        async with AsyncClient(daemon.socket_path, NAMESPACE) as client:
            write = await client.stage(chain_of(1, 6))
            for i in write.granted:
                write.view(i)[:] = payload_of(chain_of(1, 6)[i])
            await write.commit()
            lease = await client.acquire(chain_of(1, 6))
            assert lease.is_valid
            daemon.kill()
            assert not lease.is_valid
            with pytest.raises(StaleIncarnationError):
                lease.require_valid()
            await lease.release()
