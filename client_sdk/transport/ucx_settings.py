"""What a deployment says of UCX, what that means for its environment, and what UCX made of it."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from emberkv_proto.errors import PreflightError

RDMA_TRANSPORTS = ("rc_", "dc_", "srd")
"""Prefixes of UCX transports that read a peer's memory without its CPU."""
_NODE_LOCAL = "^posix,sysv,cma,xpmem"
"""On one node daemons are not peers, and these need rights that a container lacks."""
_WITHOUT_RDMA = "tcp,self"


class Rdma(str, Enum):
    REQUIRED = "required"
    PREFERRED = "preferred"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class UcxSettings:
    rdma: Rdma = Rdma.PREFERRED
    devices: tuple[str, ...] = ()
    """As UCX_NET_DEVICES; empty means all."""
    reading_agents: int = 2
    serving_agents: int = 1
    taking_agents: int = 0
    """Of those into whose memory engines on other hosts write; 0: they may not."""
    lanes: int = 4
    """Transfers that one agent works on at once."""
    one_sided: tuple[str, ...] = RDMA_TRANSPORTS
    tls: str = ""
    """As UCX_TLS; empty means the environment's, or whatever goes between nodes."""

    def environment(self, given: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Of the agents, above the daemon's own. What the deployment sets itself stays."""
        wanted = {
            "UCX_LOG_LEVEL": "error",
            "NIXL_LOG_LEVEL": "ERROR",
            "UCX_WARN_UNUSED_ENV_VARS": "n",
            "UCX_TLS": _NODE_LOCAL,
        }
        chosen = {name: given.get(name, value) for name, value in wanted.items()}
        if self.rdma is Rdma.OFF:
            chosen["UCX_TLS"] = _WITHOUT_RDMA
        elif self.tls:
            chosen["UCX_TLS"] = self.tls
        if self.devices:
            chosen["UCX_NET_DEVICES"] = ",".join(self.devices)
        return chosen

    def check(self, transports: Collection[str]) -> None:
        """Raises PreflightError when UCX does not use what it was told to."""
        found = " ".join(transports) or "nothing"
        devices = {name.partition("/")[2] for name in transports}
        absent = [device for device in self.devices if device not in devices]
        if absent:
            raise PreflightError(
                f"transport.devices names {', '.join(absent)}, but UCX finds only {found};"
                " `ucx_info -d` and /sys/class/infiniband show what there is"
            )
        if self.rdma is Rdma.REQUIRED and not one_sided(transports, self.one_sided):
            raise PreflightError(
                f"transport.rdma is required, but UCX finds only {found}: load the NIC's drivers,"
                " give the container /dev/infiniband and IPC_LOCK, look at UCX_TLS and"
                " UCX_NET_DEVICES, or set transport.rdma to preferred"
            )


def one_sided(
    transports: Collection[str], prefixes: tuple[str, ...] = RDMA_TRANSPORTS
) -> tuple[str, ...]:
    """Those of `transports` that can read a peer's memory by themselves."""
    return tuple(name for name in transports if name.startswith(prefixes))


def can_read_by_itself(
    ours: Collection[str], theirs: Collection[str], prefixes: tuple[str, ...]
) -> bool:
    """Whether both sides have one such transport of the same kind."""
    kinds = [
        {name.partition("/")[0] for name in one_sided(side, prefixes)} for side in (ours, theirs)
    ]
    return bool(kinds[0] & kinds[1])
