"""Settings of the store daemon. Sizes in bytes, times in seconds."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from client_sdk.logs import LogFormat, LogLevel, LogStyle
from client_sdk.settings import Section, Settings, TlsFiles, tls_files_of

MIB = 1 << 20
SaltIdText = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
Bytes = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Limit = Annotated[int, Field(ge=0, le=1 << 62)]
"""Bytes, no more than messages carry; 0: no limit."""
Port = Annotated[int, Field(ge=0, le=65535)]


class NodeSection(Section):
    id: str = Field(default_factory=socket.gethostname, min_length=1, max_length=253)
    """Name of this node in the index; must differ between nodes and stay over restarts."""


class DaemonSection(Section):
    socket_path: Path = Path("/run/emberkv/daemon.sock")
    """Where engines connect. A path of at most 107 bytes, in a directory only they can enter."""
    data_dir: Path = Path("/var/lib/emberkv")
    """Local index (RocksDB), lock file, marker. One daemon per directory."""
    allowed_uids: tuple[int, ...] = ()
    """Users that may connect; empty means the daemon's own user only."""
    grpc_host: str = "127.0.0.1"
    grpc_port: Port = 7100
    """For peers, the index and operators. 0 picks a free port."""
    transport_port: Port = 0
    """Where peers read blocks over TCP, on grpc_host."""
    advertised_host: str = ""
    """Host that peers and the index use to reach this daemon; empty means grpc_host."""
    metrics_host: str = "127.0.0.1"
    metrics_port: Port = 7101
    """HTTP /metrics, /health, /ready. 0 picks a free port."""
    operator_token_file: Path | None = None
    """A file (mode 0600) with one secret; operators' calls that do not come from loopback must
    send it. Without it, they are refused."""
    tls_cert_file: Path | None = None
    """PEM. With the other two: mutual TLS on the gRPC port, and towards peers and the index."""
    tls_key_file: Path | None = None
    tls_ca_file: Path | None = None
    """Who has a certificate of this CA may connect."""
    tls_server_name: str = ""
    """The name that others' certificates must have; empty: the host of their address. For pods,
    whose addresses stand in no certificate."""
    index_address: str = ""
    """host:port of the global index (or the router that embeds it); empty means no peer pulls."""
    heartbeat_seconds: Seconds = 1.0
    lease_seconds: Seconds = 10.0
    """How long a lease lives without a heartbeat of its session."""
    stage_seconds: Seconds = 60.0
    """How long a staged block may stay uncommitted without a heartbeat of its session."""
    lease_share: Share = 0.9
    """Part of dram.capacity_bytes that the leases of one session may hold, and as much again what
    it stages and does not commit; beyond it gets shorter hits, and no slots."""
    drain_seconds: Seconds = 20.0
    peer_timeout_seconds: Seconds = 2.0
    index_timeout_seconds: Seconds = 0.1
    """How long a pull waits for the index; without its word nothing is pulled."""
    event_ring_events: Annotated[int, Field(ge=16)] = 65536
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    """text for people, json (a line each) for a log collector."""

    @model_validator(mode="after")
    def _all_or_none(self) -> DaemonSection:
        self.tls_files()
        return self

    @property
    def log_style(self) -> LogStyle:
        return LogStyle(self.log_level, self.log_format)

    def tls_files(self) -> TlsFiles | None:
        return tls_files_of(
            self.tls_cert_file, self.tls_key_file, self.tls_ca_file, self.tls_server_name
        )


class DramSection(Section):
    path: Path = Path("/dev/shm/emberkv-pool")  # noqa: S108 - the tmpfs a pool belongs on
    """The pool file, on tmpfs or hugetlbfs."""
    capacity_bytes: Bytes = 1024 * MIB
    extent_bytes: Annotated[int, Field(ge=64 * 1024)] = 64 * MIB
    high_watermark: Annotated[float, Field(gt=0, le=1)] = 0.95
    low_watermark: Annotated[float, Field(gt=0, le=1)] = 0.90
    policy: Literal["lru", "s3fifo", "arc", "cost", "reuse"] = "lru"
    """Which block goes first among those that may go: leaves that nobody holds."""
    pin_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Part of capacity_bytes that hard pins may keep."""
    tenant_quota_bytes: Limit = 0
    """What each tenant that has no quota of its own may hold in DRAM; 0: no limit."""
    populate: bool = True
    """Touch every page at start, so that a full /dev/shm is found then and not while serving."""
    huge_pages: Literal["auto", "off", "advise", "required"] = "auto"
    """On tmpfs: ask for huge pages where the mount allows them (auto, advise), or refuse to start
    without them (required). On hugetlbfs every page is huge."""
    numa_node: Literal["auto", "interleave"] | Annotated[int, Field(ge=0, le=1023)] = "auto"
    """Memory node of the pool. auto spreads it over all nodes where there are several."""

    @model_validator(mode="after")
    def _ordered(self) -> DramSection:
        if self.low_watermark > self.high_watermark:
            raise ValueError(
                f"low_watermark {self.low_watermark} is above high_watermark {self.high_watermark}"
            )
        if self.extent_bytes % 4096:
            raise ValueError(f"extent_bytes {self.extent_bytes} must be a multiple of 4096")
        if self.capacity_bytes < self.extent_bytes:
            raise ValueError(
                f"capacity_bytes {self.capacity_bytes} is less than one extent"
                f" of {self.extent_bytes}; lower dram.extent_bytes or raise dram.capacity_bytes"
            )
        return self


class SsdDriveSection(Section):
    """One of several SSD directories, with a capacity of its own."""

    path: Path
    capacity_bytes: Bytes


class SsdSection(Section):
    path: Path = Path("/var/lib/emberkv/ssd")
    """Directory of the segment files."""
    paths: tuple[Path | SsdDriveSection, ...] = ()
    """Several directories, one per drive, instead of `path`; segments go where most is free."""
    capacity_bytes: Annotated[int, Field(ge=0)] = 0
    """Bytes the segments may take, on each drive that names no own number; 0 turns the tier off."""
    write_bytes_per_second: Annotated[int, Field(ge=0)] = 0
    """Most bytes that are written on average, to all drives; the queue waits. 0 is no limit."""
    scrub_bytes_per_second: Annotated[int, Field(ge=0)] = 4 * MIB
    """Rate of the background check of what is stored; 0 turns it off."""
    segment_bytes: Annotated[int, Field(ge=64 * 1024)] = 256 * MIB
    tenant_quota_bytes: Limit = 0
    """What each tenant that has no quota of its own may hold on SSD; 0: no limit."""
    writeback: Literal["on_commit", "on_evict", "on_reuse"] = "on_commit"
    """When a block gets its SSD copy. on_commit: at once, so that it outlives a reboot; on_evict:
    when it must leave DRAM; on_reuse: when it is asked for again (at least a second later)."""
    queue_blocks: Annotated[int, Field(ge=1)] = 4096
    """Writeback queue; when it is full a block is skipped and counted, never waited for."""
    io_threads: Annotated[int, Field(ge=1, le=64)] = 4
    direct_io: bool = True
    """O_DIRECT; turned off only for file systems that refuse it (tmpfs before Linux 6.5)."""

    @model_validator(mode="after")
    def _whole_segments(self) -> SsdSection:
        if self.segment_bytes % 4096:
            raise ValueError(f"segment_bytes {self.segment_bytes} must be a multiple of 4096")
        if 0 < self.capacity_bytes < 2 * self.segment_bytes:
            raise ValueError(
                f"capacity_bytes {self.capacity_bytes} is less than two segments of"
                f" {self.segment_bytes}; lower ssd.segment_bytes or raise ssd.capacity_bytes"
            )
        return self

    @model_validator(mode="after")
    def _one_list_of_drives(self) -> SsdSection:
        if not self.paths:
            return self
        if "path" in self.model_fields_set:
            raise ValueError("set ssd.path for one directory or ssd.paths for several, not both")
        if not self.capacity_bytes:
            raise ValueError("ssd.paths needs ssd.capacity_bytes: with 0 the tier is off")
        directories = [drive.path for drive in self.drives]
        if len(set(directories)) < len(directories):
            raise ValueError("ssd.paths names a directory twice")
        for drive in self.drives:
            if drive.capacity_bytes < 2 * self.segment_bytes:
                raise ValueError(
                    f"capacity_bytes {drive.capacity_bytes} of {drive.path} is less than two"
                    f" segments of {self.segment_bytes}"
                )
        return self

    @property
    def drives(self) -> tuple[SsdDriveSection, ...]:
        """Every directory with its capacity; none while the tier is off."""
        if not self.capacity_bytes:
            return ()
        return tuple(
            entry
            if isinstance(entry, SsdDriveSection)
            else SsdDriveSection(path=entry, capacity_bytes=self.capacity_bytes)
            for entry in self.paths or (self.path,)
        )


_ENDPOINT = re.compile(
    r"tcp://(\*|\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(\d{1,5}|\*)|ipc://[^\s]{1,100}"
)


class EventsSection(Section):
    """The node's events for routers of others, in vLLM's format over ZMQ (docs/kv-events.md)."""

    zmq_endpoint: str = ""
    """Where to publish, as tcp://host:port or ipc://path; port * picks a free one. Empty: nowhere.
    Whoever can connect may listen: ZMQ asks for no secret here."""
    zmq_replay_endpoint: str = ""
    """Where missed messages can be asked for. Empty: nowhere."""
    zmq_topic: Annotated[str, Field(max_length=512)] = ""
    """First frame of each message; llm-d wants kv@<address>@<model>."""
    buffer_messages: Annotated[int, Field(ge=1, le=1 << 20)] = 10_000
    """So many of the newest messages can be asked for again..."""
    buffer_bytes: Bytes = 64 * MIB
    """...and at most so many bytes of them."""

    @field_validator("zmq_endpoint", "zmq_replay_endpoint")
    @classmethod
    def _endpoint(cls, text: str) -> str:
        if text and not _ENDPOINT.fullmatch(text):
            raise ValueError(f"{text!r} is neither tcp://host:port nor ipc://path")
        return text

    @model_validator(mode="after")
    def _replay_of_something(self) -> EventsSection:
        if self.zmq_replay_endpoint and not self.zmq_endpoint:
            raise ValueError("zmq_replay_endpoint needs zmq_endpoint: nothing is published")
        return self


class RespSection(Section):
    """A door for Redis clients (docs/resp.md); closed unless a socket or a port is named."""

    socket_path: Path | None = None
    """A unix socket for the users that may connect to daemon.socket_path."""
    host: Literal["127.0.0.1", "::1"] = "127.0.0.1"
    port: Port | None = None
    """On loopback; needs token_file. 0 picks a free port."""
    token_file: Path | None = None
    """A file (mode 0600) with one secret that clients send with AUTH."""
    namespace: Annotated[str, Field(pattern="^[a-z0-9-]{1,64}$")] = "default"
    """Whose values these are; another name sees none of them."""
    dram_share: Share = 0.5
    """Part of dram.capacity_bytes that values may take."""
    ssd_share: Share = 0.5
    """Part of the SSD tier that values may take."""
    max_value_bytes: Bytes = 64 * MIB
    """Longest value; no longer than fits an extent."""
    max_connections: Annotated[int, Field(ge=1, le=4096)] = 256

    @model_validator(mode="after")
    def _secret_on_loopback(self) -> RespSection:
        if self.port is not None and self.token_file is None:
            raise ValueError(
                "resp.port needs resp.token_file: every user of this machine can connect to a port;"
                " make a token with `openssl rand -hex 32`, or use resp.socket_path"
            )
        return self


class PeersSection(Section):
    """Copies of blocks that other nodes hold."""

    replicate_after_pulls: Annotated[int, Field(ge=1)] = 2
    """A block that was pulled so often is kept like one computed here, SSD copy included; until
    then, or until it is used again here, it is a replica. 1: every pulled block is kept."""
    replicate_seconds: Seconds = 600.0
    """Pulls that lie further apart do not count together."""
    replica_share: Share = 0.5
    """Part of dram.capacity_bytes that replicas may take before they make room among themselves."""


class TransportSection(Section):
    """How blocks come from other nodes (docs/rdma.md)."""

    kind: Literal["auto", "tcp", "ucx", "ucp"] = "auto"
    """ucp: the UCX of conda or the system, through ucxx. auto: ucx where NIXL is installed and a
    port for RDMA is active, else tcp."""
    rdma: Literal["required", "preferred", "off"] = "preferred"
    """required: refuse to start without it, and to read from nodes that have none. off: do not
    even look for it."""
    devices: tuple[str, ...] = ()
    """Network devices for UCX, as mlx5_0:1; all must be there. Empty: UCX chooses."""
    agents: Annotated[int, Field(ge=1, le=16)] = 2
    """UCX processes that read, some 100 MiB each beside the pool; one more serves."""
    engine_agents: Annotated[int, Field(ge=0, le=16)] = 0
    """UCX processes into whose pool engines on other hosts write; 0: such engines are refused."""
    progress_seconds: Seconds = 2.0
    """A peer that moves no byte for this long has failed."""

    @field_validator("rdma", mode="before")
    @classmethod
    def _yaml_off(cls, value: object) -> object:
        return "off" if value is False else value  # what YAML reads of an unquoted off

    @model_validator(mode="after")
    def _one_meaning(self) -> TransportSection:
        if self.kind == "tcp" and self.rdma == "required":
            raise ValueError("kind tcp knows no RDMA; with rdma required, kind is auto or ucx")
        if self.devices and self.kind == "tcp":
            raise ValueError("devices are for UCX, and kind is tcp")
        if self.engine_agents and self.kind != "ucx":
            raise ValueError("engine_agents need kind ucx: engines on other hosts write over UCX")
        return self


class TenantSection(Section):
    """One tenant's quota."""

    dram_bytes: Limit = 0
    ssd_bytes: Limit = 0


class DaemonSettings(Settings):
    node: NodeSection = NodeSection()
    daemon: DaemonSection = DaemonSection()
    dram: DramSection = DramSection()
    ssd: SsdSection = SsdSection()
    events: EventsSection = EventsSection()
    resp: RespSection = RespSection()
    peers: PeersSection = PeersSection()
    transport: TransportSection = TransportSection()
    tenants: dict[SaltIdText, TenantSection] = {}  # noqa: RUF012 - copied for each instance
    """Quotas by salt id: the first 16 bytes of BLAKE3 of the cache salt, as 32 hex digits in
    quotes."""
