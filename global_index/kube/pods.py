"""Pods and leases as discovery reads them, and what they come to: daemons, engines, pairs. Pure.

An engine is paired with the daemon of its own node. What annotations say (docs/kubernetes.md) goes
through the same checks as an engine of the settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from emberkv_proto.errors import InvalidRequestError
from emberkv_proto.types import NAMESPACE_ID_BYTES, EngineInfo, NamespaceId, NodeId
from global_index.dns_nodes import HostPort
from global_index.hbm.static import StaticEngine
from global_index.kube.listing import ObjectName

PREFIX = "emberkv.dev/"
ROLES = ("both", "prefill", "decode")
MAX_PORTS = 64
MAX_NOTES = 32
MAX_CHARS = 1000
MAX_LEASE_SECONDS = 86_400
LEASE_SECONDS = 40
"""Of a lease that does not say; what kubelet asks for by default."""


@dataclass(frozen=True, slots=True)
class Pod:
    """What is read of a pod. `notes` are our annotations, `ports` its containers' named ports."""

    name: ObjectName
    node: str
    ip: str
    phase: str
    is_ready: bool
    is_leaving: bool
    """It is being deleted: its containers have been told to end."""
    ports: Mapping[str, int] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_reachable(self) -> bool:
        """It has an address and its containers have not all ended."""
        return bool(self.ip and self.node) and self.phase not in ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class Lease:
    """A node's heartbeat. `renewed` is compared with what it was before, never with a clock."""

    holder: str
    renewed: str
    seconds: int


@dataclass(frozen=True, slots=True)
class DaemonPod:
    name: ObjectName
    address: str
    node_id: NodeId
    is_ready: bool


@dataclass(frozen=True, slots=True)
class EnginePod:
    """One rank of an engine. `node_id` is empty where its node has no daemon."""

    name: ObjectName
    node_id: NodeId
    info: EngineInfo
    is_ready: bool


@dataclass(frozen=True, slots=True)
class Discovered:
    """Sorted by name; `faults` says which pods could not be used, and why."""

    daemons: tuple[DaemonPod, ...] = ()
    engines: tuple[EnginePod, ...] = ()
    faults: tuple[str, ...] = ()

    @property
    def addresses(self) -> frozenset[str]:
        return frozenset(daemon.address for daemon in self.daemons)


def parse_pod(raw: Mapping[str, Any]) -> Pod:
    """Raises InvalidRequestError."""
    meta, spec, status = (_mapping(raw, key) for key in ("metadata", "spec", "status"))
    ports: dict[str, int] = {}
    for container in _items(spec, "containers"):
        for port in _items(container, "ports"):
            number = port.get("containerPort")
            if isinstance(number, int) and 0 < number < 65536 and len(ports) < MAX_PORTS:
                ports.setdefault(_text(port, "name"), number)
    notes = {
        key.removeprefix(PREFIX): value
        for key, value in _mapping(meta, "annotations").items()
        if key.startswith(PREFIX) and isinstance(value, str)
    }
    if len(notes) > MAX_NOTES or any(len(value) > MAX_CHARS for value in notes.values()):
        raise InvalidRequestError(f"too many or too long {PREFIX} annotations")
    conditions = _items(status, "conditions")
    return Pod(
        ObjectName(_text(meta, "namespace"), _text(meta, "name")),
        _text(spec, "nodeName"),
        _text(status, "podIP"),
        _text(status, "phase"),
        any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions),
        bool(meta.get("deletionTimestamp")),
        ports,
        notes,
    )


def parse_lease(raw: Mapping[str, Any]) -> Lease:
    """Raises InvalidRequestError."""
    spec = _mapping(raw, "spec")
    seconds = spec.get("leaseDurationSeconds")
    if not isinstance(seconds, int) or not 0 < seconds <= MAX_LEASE_SECONDS:
        seconds = LEASE_SECONDS
    return Lease(_text(spec, "holderIdentity"), _text(spec, "renewTime"), seconds)


class Heartbeats:
    """Which nodes are silent: their lease has not changed for as long as it lasts.

    Judged by our own clock between changes that we saw, so clocks need not agree. Time in which
    the API did not tell us anything does not count: its silence is not the nodes'.
    """

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        self._heard_at: dict[str, float] = {}

    def on_leases(self, leases: Iterable[Lease], now: float) -> None:
        """The listing has changed, or begun anew."""
        held = {lease.holder: lease for lease in leases if lease.holder}
        for node, lease in held.items():
            before = self._leases.get(node)
            if before is None or before.renewed != lease.renewed:
                self._heard_at[node] = now
        self._heard_at = {node: self._heard_at[node] for node in held}
        self._leases = held

    def on_blind(self, now: float) -> None:
        """Nothing could be heard until now."""
        self._heard_at = dict.fromkeys(self._heard_at, now)

    def silent(self, now: float) -> frozenset[str]:
        return frozenset(
            node
            for node, lease in self._leases.items()
            if now - self._heard_at[node] > lease.seconds
        )

    def check_integrity(self) -> None:
        assert self._leases.keys() == self._heard_at.keys()
        assert all(node == lease.holder for node, lease in self._leases.items())


def discovered(
    daemons: Iterable[Pod], engines: Iterable[Pod], silent_nodes: frozenset[str] = frozenset()
) -> Discovered:
    """Whom these pods stand for. O(pods).

    Daemons that are not ready, or leaving, are still followed: they recover, or tell their last.
    Engines on their way out are no longer offered.
    """
    found: list[DaemonPod] = []
    ranks: list[EnginePod] = []
    faults: list[str] = []
    node_ids: dict[str, NodeId] = {}
    for pod in sorted(daemons, key=lambda pod: pod.name):
        if not pod.is_reachable:
            continue
        node_id = NodeId(pod.notes.get("node-id") or pod.node)
        node_ids[pod.node] = node_id
        try:
            address = str(HostPort(pod.ip, _port(pod, "grpc-port", "grpc")))
        except InvalidRequestError as error:
            faults.append(f"daemon {pod.name}: {error}")
            continue
        is_ready = pod.is_ready and not pod.is_leaving and pod.node not in silent_nodes
        found.append(DaemonPod(pod.name, address, node_id, is_ready))
    for pod in sorted(engines, key=lambda pod: pod.name):
        if not pod.is_reachable:
            continue
        node_id = node_ids.get(pod.node, NodeId(""))
        is_ready = pod.is_ready and not pod.is_leaving and pod.node not in silent_nodes
        try:
            infos = _engine_infos(pod)
        except InvalidRequestError as error:
            faults.append(f"engine {pod.name}: {error}")
            continue
        ranks += [EnginePod(pod.name, node_id, info, is_ready) for info in infos]
    return Discovered(tuple(found), tuple(ranks), tuple(faults))


def _engine_infos(pod: Pod) -> list[EngineInfo]:
    """Raises InvalidRequestError."""
    notes = pod.notes
    url = f"http://{HostPort(pod.ip, _port(pod, 'port', 'http'))}"
    role = notes.get("role", "both")
    if role not in ROLES:
        raise InvalidRequestError(f"annotation {PREFIX}role is {role[:40]!r}, not one of {ROLES}")
    engine_id, model = notes.get("engine-id") or pod.name.name, notes.get("model", "")
    if "events-port" not in notes and "namespace-id" not in notes:
        nowhere = NamespaceId(bytes(NAMESPACE_ID_BYTES))
        return [EngineInfo(engine_id, url, model, nowhere, block_tokens=0, role=role)]
    try:
        engine = StaticEngine.model_validate(
            {
                "engine_id": engine_id,
                "url": url,
                "model": model,
                "events": _endpoint(pod, "events-port"),
                "replay": _endpoint(pod, "replay-port"),
                "namespace_id": notes.get("namespace-id", ""),
                **{
                    key.replace("-", "_"): notes[key]
                    for key in ("block-tokens", "data-parallel-ranks")
                    if key in notes
                },
            }
        )
        return [replace(info, role=role) for _, info in engine.infos()]
    except ValidationError as error:
        problem = error.errors()[0]
        key = "-".join(str(part) for part in problem["loc"]).replace("_", "-")
        raise InvalidRequestError(f"annotation {PREFIX}{key}: {problem['msg']}") from None


def _endpoint(pod: Pod, key: str) -> str:
    return f"tcp://{HostPort(pod.ip, _port(pod, key, ''))}" if key in pod.notes else ""


def _port(pod: Pod, note: str, port_name: str) -> int:
    """From the annotation, or of the container port with that name."""
    text = pod.notes.get(note)
    if text is None:
        port = pod.ports.get(port_name)
        if port is None:
            raise InvalidRequestError(
                f"no container port is named {port_name!r}, and no annotation {PREFIX}{note} is set"
            )
        return port
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 0 < int(text) < 65536):
        raise InvalidRequestError(f"annotation {PREFIX}{note} is {text[:40]!r}, not a port")
    return int(text)


def _mapping(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{key} is not an object")
    return value


def _items(raw: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    value = raw.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise InvalidRequestError(f"{key} is not a list of objects")
    return value


def _text(raw: Mapping[str, Any], key: str) -> str:
    value = raw.get(key)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MAX_CHARS or not value.isprintable():
        raise InvalidRequestError(f"{key} is not a short text")
    return value
