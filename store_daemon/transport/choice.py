"""Which transport a node uses. UCX is imported only where it is chosen."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from enum import Enum
from importlib.util import find_spec
from pathlib import Path

from client_sdk.transport.connections import ReadLimits
from client_sdk.transport.ucx_settings import Rdma, UcxSettings
from emberkv_proto.errors import PreflightError
from emberkv_proto.types import Incarnation
from store_daemon.config import DaemonSettings, TransportSection
from store_daemon.transport.base import BeginWrite, Transport
from store_daemon.transport.tcp import TcpTransport
from store_daemon.transport.tcp_server import ServeLimits

log = logging.getLogger(__name__)

INFINIBAND = Path("/sys/class/infiniband")
NIXL = "nixl_cu12"
UCXX = "ucxx"


class TransportKind(Enum):
    TCP = "tcp"
    UCX = "ucx"
    UCP = "ucp"


def choose(section: TransportSection, infiniband: Path = INFINIBAND) -> TransportKind:
    """Raises PreflightError when what the section asks for cannot be had here."""
    has_nixl = find_spec(NIXL) is not None
    is_ucp = section.kind == "ucp"
    if is_ucp and find_spec(UCXX) is None:
        raise PreflightError(
            "transport.kind ucp needs ucxx, which is not installed: take it from conda (rapidsai),"
            " or pip install 'emberkv[ucp]'"
        )
    wants_ucx = not is_ucp and (
        section.kind == "ucx" or section.rdma == "required" or bool(section.devices)
    )
    if wants_ucx and not has_nixl:
        raise PreflightError(
            "transport.kind ucx needs NIXL, which is not installed: pip install 'emberkv[ucx]', or"
            " without its CUDA packages: pip install --no-deps nixl-cu12"
        )
    if section.rdma == "required" and not any(active_ports(infiniband)):
        raise PreflightError(
            f"transport.rdma is required, and {infiniband} shows no active port: load the NIC's"
            " drivers, bring the link up, and give a container /dev/infiniband; or set"
            " transport.rdma to preferred"
        )
    if is_ucp:
        return TransportKind.UCP
    if wants_ucx:
        return TransportKind.UCX
    if section.kind == "auto" and section.rdma != "off":
        ports = " ".join(active_ports(infiniband))
        if ports and has_nixl:
            return TransportKind.UCX
        if ports:
            log.warning("RDMA ports %s are not used: NIXL is not installed (emberkv[ucx])", ports)
    return TransportKind.TCP


def active_ports(infiniband: Path = INFINIBAND) -> Iterator[str]:
    """Ports of RDMA devices whose link is up, as mlx5_0:1. EFA devices show up here too."""
    for state in sorted(infiniband.glob("*/ports/*/state")):
        try:
            text = state.read_text()
        except OSError as error:
            log.debug("%s: %s", state, error)  # it went away while we looked
            continue
        if "ACTIVE" in text:
            yield f"{state.parts[-4]}:{state.parts[-2]}"


def make_transport(
    settings: DaemonSettings,
    incarnation: Incarnation,
    pool_descriptor: int,
    begin: BeginWrite | None = None,
) -> Transport:
    """Raises PreflightError as `choose`. Nothing is started yet.

    `begin` is asked for each write of an engine on another host, where such engines are taken.
    """
    section, daemon = settings.transport, settings.daemon
    reads = ReadLimits(progress_seconds=section.progress_seconds)
    serves = ServeLimits(progress_seconds=section.progress_seconds)
    kind = choose(section)
    if kind is TransportKind.TCP:
        return TcpTransport(
            incarnation,
            daemon.grpc_host,
            daemon.transport_port,
            advertised_host=daemon.advertised_host,
            read_limits=reads,
            serve_limits=serves,
        )
    from store_daemon.transport.ucp import UcpTransport
    from store_daemon.transport.ucx import UcxTransport

    made = UcpTransport if kind is TransportKind.UCP else UcxTransport
    return made(
        incarnation,
        pool_descriptor,
        daemon.grpc_host,
        daemon.transport_port,
        advertised_host=daemon.advertised_host,
        settings=ucx_settings(section),
        read_limits=reads,
        serve_limits=serves,
        begin=begin,
    )


def ucx_settings(section: TransportSection) -> UcxSettings:
    return UcxSettings(
        Rdma(section.rdma),
        section.devices,
        reading_agents=section.agents,
        taking_agents=section.engine_agents,
    )
