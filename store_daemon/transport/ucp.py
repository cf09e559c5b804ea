"""UCP transport: the UCX of the site (conda's or the system's) through ucxx, chosen by name.

Two-sided: the owner's agent sends from its pool, the reader's receives into its own. Everything
else, control connection, leases, agents as processes, their end as the fence, plain TCP meanwhile,
is the ucx transport's.
"""

from __future__ import annotations

from client_sdk.transport.agent_process import UCP_AGENT
from client_sdk.transport.ucp_reader import UcpReader
from client_sdk.transport.ucx_frames import UCP_MAGIC
from store_daemon.transport.base import Capabilities
from store_daemon.transport.ucx import UcxTransport
from store_daemon.transport.ucx_server import PushServer


class UcpPushServer(PushServer):
    magic = UCP_MAGIC


class UcpTransport(UcxTransport):
    """Implements `transport.base.Transport`."""

    name = "ucp"
    magic = UCP_MAGIC
    program = UCP_AGENT
    reader_class = UcpReader
    server_class = UcpPushServer

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            one_sided=False, gpu_direct=False, needs_target_cpu=True, cancel_safe=False
        )
