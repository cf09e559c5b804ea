"""Settings of discovery through the Kubernetes API. Times in seconds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from client_sdk.settings import Section

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
Namespace = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]


class KubernetesSection(Section):
    """Which pods are followed. At least one of the two selectors must be given."""

    namespace: Namespace | None = None
    """Where the daemons are; none: the pod's own."""
    daemons: str = ""
    """Label selector of the daemons' pods (key=value,...); empty: they are found otherwise."""
    engines: str = ""
    """Label selector of the engines' pods; empty: engines are those that daemons announce."""
    engine_namespaces: tuple[Namespace, ...] = ()
    """Where the engines are; none: where the daemons are."""
    node_leases: bool = False
    """Watch the nodes' heartbeats too (Leases in kube-node-lease): a pod whose node is not heard of
    does not count as ready, whatever its status still says."""
    relist_seconds: Annotated[float, Field(gt=0)] = 600.0
    """How long something that a watch failed to tell can stay unnoticed."""
    api_url: str = ""
    """https://host:port; empty: where the pod's environment says."""
    token_file: Path = ACCOUNT / "token"
    """Read anew for each call, as it is renewed."""
    ca_file: Path = ACCOUNT / "ca.crt"

    @field_validator("daemons", "engines")
    @classmethod
    def _selector(cls, text: str) -> str:
        if len(text) > 1000 or not re.fullmatch(r"[\w./=!(), -]*", text, re.ASCII):
            raise ValueError(f"{text[:100]!r} is not a label selector")
        return text

    @field_validator("api_url")
    @classmethod
    def _https(cls, url: str) -> str:
        if url and not re.fullmatch(r"https?://[^/\s]+", url):
            raise ValueError(f"{url!r} is not https://host:port")
        return url

    @model_validator(mode="after")
    def _wants_something(self) -> KubernetesSection:
        if not self.daemons and not self.engines:
            raise ValueError("set daemons or engines, the label selectors of pods to follow")
        if len(set(self.engine_namespaces)) < len(self.engine_namespaces):
            raise ValueError("a namespace stands twice in engine_namespaces")
        return self
