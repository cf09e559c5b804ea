"""Settings of the global index. Times in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from client_sdk.logs import LogFormat, LogLevel
from client_sdk.settings import Settings, TlsFiles, tls_files_of
from global_index.dns_nodes import SCHEME, HostPort
from global_index.hbm.static import StaticEngine
from global_index.kube.settings import KubernetesSection
from global_index.redis_settings import RedisKeys

Seconds = Annotated[float, Field(gt=0)]
Port = Annotated[int, Field(ge=0, le=65535)]


class IndexSection(RedisKeys):
    host: str = "127.0.0.1"
    port: Port = 7200
    """gRPC service Index. 0 picks a free port."""
    nodes: tuple[str, ...] = ()
    """gRPC addresses of the store daemons to follow: host:port, or dns:///name:port for all the
    addresses that a name has, as the one of a headless Service."""
    resolve_seconds: Seconds = 5.0
    """How often such names are looked up."""
    kubernetes: KubernetesSection | None = None
    """Follow pods by their labels, through the Kubernetes API; beside `nodes`, or in its place."""
    seed_from: str = ""
    """gRPC address (host:port) of another index to start from, so that daemons send only what came
    since. Empty: every daemon sends a snapshot."""
    engines: tuple[StaticEngine, ...] = ()
    """Engines whose own (HBM) events are followed though they do not announce themselves."""
    capacity_blocks: Annotated[int, Field(ge=1024, le=1 << 31)] = 8 * 1024 * 1024
    """Distinct blocks over all nodes. New ones beyond it are refused and counted."""
    suspect_seconds: Seconds = 3.0
    """Silence after which a node is left out of answers; some heartbeats long."""
    gone_seconds: Seconds = 30.0
    """Silence after which a node's DRAM rows are dropped."""
    backend: Literal["auto", "numba", "python"] = "auto"
    """auto: numba, or python where it cannot be used."""
    tls_cert_file: Path | None = None
    """PEM. With the other two: mutual TLS on this port, and towards the daemons."""
    tls_key_file: Path | None = None
    tls_ca_file: Path | None = None
    """Who has a certificate of this CA may connect."""
    tls_server_name: str = ""
    """The name that others' certificates must have; empty: the host of their address. For pods,
    whose addresses stand in no certificate."""
    metrics_port: Port = 7201
    """HTTP /metrics, /health, /ready and the calls of docs/index-http.md on `host`. 0 picks a free
    port."""
    http_port: Port | None = None
    """The same of an index inside a router, which otherwise serves none of it."""
    operator_token_file: Path | None = None
    """A file (mode 0600) with one secret; calls that change what is followed must send it when they
    do not come from loopback. Without it, they are refused."""
    log_level: LogLevel = "info"
    """Of an index that is a process of its own; one in a router logs as the router does."""
    log_format: LogFormat = "text"
    """text for people, json (a line each) for a log collector."""

    @field_validator("nodes")
    @classmethod
    def _addresses(cls, nodes: tuple[str, ...]) -> tuple[str, ...]:
        for address in nodes:
            HostPort.parse(address.removeprefix(SCHEME))
        if len(set(nodes)) < len(nodes):
            raise ValueError("an address stands twice")
        return nodes

    @property
    def addresses(self) -> tuple[str, ...]:
        """Daemons that are named one by one."""
        return tuple(node for node in self.nodes if not node.startswith(SCHEME))

    @property
    def names(self) -> tuple[HostPort, ...]:
        """Names that stand for any number of daemons."""
        return tuple(
            HostPort.parse(node.removeprefix(SCHEME))
            for node in self.nodes
            if node.startswith(SCHEME)
        )

    @field_validator("seed_from")
    @classmethod
    def _one_address(cls, address: str) -> str:
        if address:
            HostPort.parse(address)
        return address

    def tls_files(self) -> TlsFiles | None:
        return tls_files_of(
            self.tls_cert_file, self.tls_key_file, self.tls_ca_file, self.tls_server_name
        )

    @model_validator(mode="after")
    def _ordered(self) -> IndexSection:
        self.tls_files()
        if self.gone_seconds <= self.suspect_seconds:
            raise ValueError(
                f"gone_seconds {self.gone_seconds} must be above"
                f" suspect_seconds {self.suspect_seconds}"
            )
        return self


class IndexSettings(Settings):
    index: IndexSection = IndexSection()
