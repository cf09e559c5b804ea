"""What a local cluster is made of: directories, ports, and how each process is started.

Every process reads the user's config file, as it would alone, and on top of it gets what makes it
this node's process: its name, paths and ports. Those derived values win over the file.
"""

from __future__ import annotations

import itertools
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from client_sdk.cli.process import ProcessSpec
from client_sdk.settings import Section, Settings, load_settings
from emberkv_proto.errors import ConfigError, PreflightError, UnavailableError

MAX_SOCKET_PATH_BYTES = 107
LOOPBACK = "127.0.0.1"
SHM = Path("/dev/shm")  # noqa: S108 - the tmpfs that pools live on
_FIRST_PORT = 10000
_turns = itertools.count(secrets.randbelow(1 << 16))
"""Ports that were chosen and are not bound yet look free: none is chosen twice in a row."""
_MAX_NODES = 26

Port = Annotated[int, Field(ge=0, le=65535)]
PortChoice = Callable[[], int]


class ClusterSection(Section):
    """A cluster on this machine (`emberkv up`). What one node holds is in the other sections."""

    nodes: Annotated[int, Field(ge=1, le=_MAX_NODES)] = 2
    """Each is a store daemon and an engine: node-a with engine-a, node-b with engine-b, ..."""
    prefill_nodes: Annotated[int, Field(ge=0, lt=_MAX_NODES)] = 0
    """So many of them, the first ones, have an engine that only prefills; then the others' only
    decode. 0: every engine does both (docs/prefill-decode.md)."""
    base_dir: Path | None = None
    """Where the run makes its directory (SSD segments, logs, sockets); empty: the temporary one."""
    router_port: Port = 8000
    """HTTP, OpenAI API. 0 picks a free port."""
    index_port: Port = 7200
    """gRPC of the index that the router embeds; `emberkv status` asks here. 0 picks a free port."""
    ready_seconds: Annotated[float, Field(gt=0)] = 120.0
    """How long a process may take until it serves."""

    @model_validator(mode="after")
    def _somebody_decodes(self) -> ClusterSection:
        if self.prefill_nodes >= self.nodes:
            raise ValueError(
                f"prefill_nodes {self.prefill_nodes} leaves none of {self.nodes} nodes to decode"
            )
        return self

    def role_args(self, number: int) -> list[str]:
        """Settings of the role of engine `number`; none where the file decides."""
        if not self.prefill_nodes:
            return []
        return [f"engine.role={'prefill' if number < self.prefill_nodes else 'decode'}"]


class ClusterSettings(Settings):
    cluster: ClusterSection = ClusterSection()


@dataclass(frozen=True, slots=True)
class ClusterAddresses:
    index: str
    """host:port of the index's gRPC."""
    router_url: str


def cluster_addresses(config: Path | None, overrides: Sequence[str]) -> ClusterAddresses:
    """Where the cluster is that `up` would start with this configuration. Raises ConfigError."""
    cluster = load_settings(ClusterSettings, config, overrides).cluster
    return ClusterAddresses(
        f"{LOOPBACK}:{cluster.index_port}", f"http://{LOOPBACK}:{cluster.router_port}"
    )


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node: its daemon and its engine."""

    node_id: str
    daemon: ProcessSpec
    engine: ProcessSpec
    grpc_address: str
    socket_path: Path
    engine_url: str


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Everything that will be started, and every place that will be written to."""

    run_id: str
    run_dir: Path
    nodes: tuple[NodePlan, ...]
    router: ProcessSpec
    router_url: str
    index_address: str
    extras: tuple[ProcessSpec, ...] = ()
    """Further processes, started by name only."""

    @property
    def specs(self) -> tuple[ProcessSpec, ...]:
        """All processes, servers before those that use them."""
        daemons = tuple(node.daemon for node in self.nodes)
        engines = tuple(node.engine for node in self.nodes)
        return (*daemons, self.router, *engines, *self.extras)

    @property
    def log_dir(self) -> Path:
        return self.run_dir / "logs"

    @property
    def pool_prefix(self) -> str:
        """Start of the names of this run's files in /dev/shm."""
        return f"emberkv-{self.run_id}-"

    def create_directories(self) -> None:
        """Make the run's directory, readable by this user only.

        Raises:
            ConfigError: it cannot be made there.
        """
        try:
            self.run_dir.mkdir(mode=0o700, parents=True)
        except OSError as error:
            raise ConfigError(
                f"{self.run_dir} cannot be made: {error.strerror}; set cluster.base_dir"
            ) from None
        self.log_dir.mkdir()
        for node in self.nodes:
            (self.run_dir / node.node_id).mkdir()

    def remove_files(self) -> None:
        """Remove the run's directory and its pools. What is gone already is no error."""
        for pool in SHM.glob(self.pool_prefix + "*"):
            pool.unlink(missing_ok=True)
        if self.run_dir.exists():
            shutil.rmtree(self.run_dir)


def plan_cluster(
    section: ClusterSection,
    config: Path | None = None,
    overrides: Sequence[str] = (),
    free_port: PortChoice | None = None,
    run_id: str | None = None,
) -> ClusterPlan:
    """Derive each process's arguments. Touches no file; picks ports.

    Args:
        config, overrides: handed to every process as `--config` and `--set`.

    Raises:
        ConfigError: a socket path that would be too long for the kernel.
    """
    run_id = run_id or secrets.token_hex(4)
    port = free_port or choose_port
    base = (section.base_dir or Path(tempfile.gettempdir())).absolute()
    run_dir = base / f"emberkv-{run_id}"
    common = ["--config", str(config.absolute())] if config else []
    for override in overrides:
        common += ["--set", override]
    index_address = f"{LOOPBACK}:{section.index_port or port()}"
    router_port = section.router_port or port()
    names = [chr(ord("a") + number) for number in range(section.nodes)]

    def spec(name: str, module: str, endpoint: Path, derived: Sequence[str]) -> ProcessSpec:
        arguments = list(common)
        for item in derived:
            arguments += ["--set", item]
        return ProcessSpec(
            name,
            module,
            tuple(arguments),
            endpoint,
            run_dir / "logs" / f"{name}.log",
            section.ready_seconds,
        )

    def node(number: int, letter: str) -> NodePlan:
        node_id, engine_id = f"node-{letter}", f"engine-{letter}"
        directory = run_dir / node_id
        socket_path = _checked_socket_path(run_dir / f"{node_id}.sock")
        grpc_port, engine_port = port(), port()
        daemon = spec(
            node_id,
            "store_daemon",
            directory / "endpoints.json",
            [
                f"node.id={node_id}",
                f"daemon.data_dir={directory}",
                f"daemon.socket_path={socket_path}",
                f"daemon.grpc_host={LOOPBACK}",
                f"daemon.grpc_port={grpc_port}",
                f"daemon.transport_port={port()}",
                f"daemon.metrics_port={port()}",
                f"daemon.index_address={index_address}",
                f"dram.path={SHM / f'emberkv-{run_id}-{node_id}'}",
                f"ssd.path={directory / 'ssd'}",
            ],
        )
        engine = spec(
            engine_id,
            "client_sdk.engine.torch_engine",
            directory / "engine.json",
            [
                f"engine.engine_id={engine_id}",
                f"engine.host={LOOPBACK}",
                f"engine.port={engine_port}",
                f"engine.socket_path={socket_path}",
                f"engine.endpoint_file={directory / 'engine.json'}",
                *section.role_args(number),
            ],
        )
        url = f"http://{LOOPBACK}:{engine_port}"
        return NodePlan(node_id, daemon, engine, f"{LOOPBACK}:{grpc_port}", socket_path, url)

    nodes = tuple(node(number, letter) for number, letter in enumerate(names))
    router_endpoint = run_dir / "router.json"
    router = spec(
        "router",
        "router",
        router_endpoint,
        [
            f"router.host={LOOPBACK}",
            f"router.port={router_port}",
            f"router.endpoint_file={router_endpoint}",
            f"index.nodes=[{', '.join(node.grpc_address for node in nodes)}]",
            f"index.host={LOOPBACK}",
            f"index.port={index_address.rpartition(':')[2]}",
            "index.metrics_port=0",
        ],
    )
    router_url = f"http://{LOOPBACK}:{router_port}"
    return ClusterPlan(run_id, run_dir, nodes, router, router_url, index_address)


def _checked_socket_path(path: Path) -> Path:
    length = len(str(path).encode())
    if length > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"socket path {path} has {length} bytes, the kernel takes"
            f" {MAX_SOCKET_PATH_BYTES}; set a shorter cluster.base_dir"
        )
    return path


def require_free_ports(section: ClusterSection) -> None:
    """Refuse, before anything is started, fixed ports that somebody listens on.

    Raises:
        PreflightError: names the port and the key.
    """
    for key, port in (("router_port", section.router_port), ("index_port", section.index_port)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
            except OSError as error:
                raise PreflightError(
                    f"{LOOPBACK}:{port}: {error.strerror} (another `emberkv up`?);"
                    f" set cluster.{key}, 0 for any free port"
                ) from None


def choose_port() -> int:
    """A free TCP port below the range that the kernel gives to outgoing connections.

    A port of that range can be taken by a client, even by one that tries to reach the very server
    that is being restarted on it. A process gets none again before it has had them all.
    """
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
    end = max(int(text.split()[0]), _FIRST_PORT + 1000)
    for _ in range(200):
        port = _FIRST_PORT + next(_turns) % (end - _FIRST_PORT)
        with socket.socket() as probe:
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            return port
    raise UnavailableError(f"no free TCP port between {_FIRST_PORT} and {end} in 200 tries")
