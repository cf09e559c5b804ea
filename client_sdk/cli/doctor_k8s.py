"""Checks of a release on Kubernetes, through its API: what an operator would look at first."""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from client_sdk.cli.doctor import Finding, Verdict
from emberkv_proto import __version__
from emberkv_proto.errors import ConfigError, EmberError

if TYPE_CHECKING:
    from global_index.kube.api import Access, KubeApi

OLDEST = (1, 27)
MAX_PODS = 5000
MAX_NAMED = 5
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


@dataclass(frozen=True, slots=True)
class Release:
    """Where it is, and as whom to ask."""

    namespace: str
    selector: str
    kubeconfig: Path | None = None
    api: str = ""


async def examine_release(release: Release) -> list[Finding]:
    """Findings in the order in which one would mend them."""
    from global_index.kube.api import KubeApi, RefusedError

    if _has_no_account(release):
        fix = "run it in a router's pod with discovery.mode: kubernetes, or give --kubeconfig"
        return [Finding("API", Verdict.WARN, "this pod has no account to ask with", fix)]
    try:
        with _access(release) as access:
            namespace = release.namespace or _own_namespace()
            async with KubeApi(access) as api:
                version = await api.get("/version")
                findings = [Finding("API", Verdict.OK, access.url), check_version(version)]
                findings += await _check_rights(api, namespace)
                pods = await _pods(api, namespace, release.selector)
                findings += check_daemons(pods)
                findings += check_versions(pods)
                findings += await _check_nodes(api, pods)
    except RefusedError as error:
        fix = "ask as somebody who may list pods there: --kubeconfig, or discovery.mode"
        return [Finding("API", Verdict.FAIL, str(error), fix)]
    except ConfigError as error:
        fix = "run it in a router's pod, or give --kubeconfig or --api"
        return [Finding("API", Verdict.FAIL, str(error), fix)]
    except EmberError as error:
        fix = "is the address right, and may this machine or pod reach it (policies)?"
        return [Finding("API", Verdict.FAIL, str(error), fix)]
    return findings


def check_version(answer: Mapping[str, Any]) -> Finding:
    """The chart's kubeVersion."""
    text = str(answer.get("gitVersion") or "")
    match = re.match(r"v(\d+)\.(\d+)", text)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if version < OLDEST:
        fix = f"the chart is made for {OLDEST[0]}.{OLDEST[1]} and newer"
        return Finding("Kubernetes", Verdict.WARN, text or "no version", fix)
    return Finding("Kubernetes", Verdict.OK, text)


def check_daemons(pods: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """How many are ready, and what those that are not say of themselves."""
    if not pods:
        fix = "is it the release's namespace? does store.nodeSelector select a node?"
        yield Finding("daemons", Verdict.FAIL, "there is no pod", fix)
        return
    unready = [pod for pod in pods if not _is_ready(pod)]
    seen = f"{len(pods) - len(unready)} of {len(pods)} ready"
    if not unready:
        yield Finding("daemons", Verdict.OK, seen)
        return
    yield Finding("daemons", Verdict.FAIL, seen, "see below")
    for pod in unready[:MAX_NAMED]:
        node = str(pod.get("spec", {}).get("nodeName") or "no node yet")
        fix = f"kubectl logs {pod['metadata']['name']}; docs/operations.md"
        yield Finding(f"daemon on {node}", Verdict.FAIL, _why_unready(pod), fix)


def check_versions(pods: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Whether all run the same, and the same as we."""
    images = Counter(
        str(container.get("image"))
        for pod in pods
        for container in pod.get("spec", {}).get("containers", ())
        if container.get("name") == "store"
    )
    labels = Counter(
        str(pod["metadata"].get("labels", {}).get("app.kubernetes.io/version")) for pod in pods
    )
    if len(images) > 1:
        seen = ", ".join(f"{image}: {count}" for image, count in images.most_common(MAX_NAMED))
        fix = "a rollout is under way, or OnDelete waits for you to delete pods"
        yield Finding("images", Verdict.WARN, seen, fix)
    elif images:
        yield Finding("images", Verdict.OK, next(iter(images)))
    if labels and set(labels) != {__version__}:
        seen = f"daemons are of {', '.join(sorted(labels))}, this command of {__version__}"
        yield Finding("versions", Verdict.WARN, seen, "use the daemons' own: kubectl exec")
    elif labels:
        yield Finding("versions", Verdict.OK, __version__)


def check_huge_pages(
    pods: Sequence[Mapping[str, Any]], nodes: Sequence[Mapping[str, Any]]
) -> Iterator[Finding]:
    """Whether nodes of pods that ask for huge pages have any."""
    asked = {
        key: value
        for pod in pods
        for container in pod.get("spec", {}).get("containers", ())
        for key, value in container.get("resources", {}).get("limits", {}).items()
        if key.startswith("hugepages-")
    }
    for key, value in asked.items():
        amounts = {
            str(node["metadata"]["name"]): str(
                node.get("status", {}).get("allocatable", {}).get(key, "0")
            )
            for node in nodes
        }
        without = sorted(name for name, amount in amounts.items() if amount in ("0", "0Mi", "0Gi"))
        seen = f"pods ask for {value}; {len(amounts) - len(without)} of {len(amounts)} nodes have"
        if without:
            named = ", ".join(without[:MAX_NAMED])
            fix = f"set vm.nr_hugepages on {named} and restart kubelet, or label them out"
            yield Finding(key, Verdict.WARN, seen, fix)
        else:
            yield Finding(key, Verdict.OK, seen)


async def _check_rights(api: KubeApi, namespace: str) -> list[Finding]:
    """What discovery.mode kubernetes needs, asked of the server for whoever we are."""
    refused = []
    for verb in ("list", "watch"):
        attributes = {"verb": verb, "resource": "pods", "namespace": namespace}
        review = await api.create(
            REVIEWS,
            {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SelfSubjectAccessReview",
                "spec": {"resourceAttributes": attributes},
            },
        )
        if not review.get("status", {}).get("allowed"):
            refused.append(verb)
    if refused:
        seen = f"may not {' or '.join(refused)} pods in {namespace}"
        return [Finding("rights", Verdict.WARN, seen, "discovery.mode: kubernetes makes the Role")]
    return [Finding("rights", Verdict.OK, f"may list and watch pods in {namespace}")]


async def _check_nodes(api: KubeApi, pods: Sequence[Mapping[str, Any]]) -> list[Finding]:
    from global_index.kube.api import RefusedError

    wants_pages = any("hugepages-" in str(pod.get("spec", {}).get("containers")) for pod in pods)
    if not wants_pages:
        return [Finding("huge pages", Verdict.OK, "the pool asks for none")]
    try:
        nodes = await api.get("/api/v1/nodes", limit=str(MAX_PODS))
    except RefusedError as error:
        return [Finding("huge pages", Verdict.WARN, str(error), "ask as somebody who sees nodes")]
    return [*check_huge_pages(pods, list(nodes.get("items") or ()))]


async def _pods(api: KubeApi, namespace: str, selector: str) -> list[Mapping[str, Any]]:
    path = f"/api/v1/namespaces/{namespace}/pods"
    answer = await api.get(path, labelSelector=selector, limit=str(MAX_PODS))
    return list(answer.get("items") or ())


def _is_ready(pod: Mapping[str, Any]) -> bool:
    conditions = pod.get("status", {}).get("conditions") or ()
    return any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)


def _why_unready(pod: Mapping[str, Any]) -> str:
    """The preflight's own words, if it ended; or what kubelet or the scheduler says."""
    status = pod.get("status", {})
    for container in (
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    ):
        ended = container.get("lastState", {}).get("terminated") or container.get("state", {}).get(
            "terminated"
        )
        if ended and ended.get("exitCode"):
            message = str(ended.get("message") or ended.get("reason") or "").strip()
            return f"ended with {ended['exitCode']}: {message.splitlines()[-1] if message else '?'}"
        waiting = container.get("state", {}).get("waiting")
        if waiting and waiting.get("reason") != "PodInitializing":
            return f"{waiting.get('reason')}: {waiting.get('message') or ''}".strip(": ")
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"{condition.get('reason')}: {condition.get('message')}"
    return f"{status.get('phase')}: its startup or readiness probe fails, so it recovers or hangs"


def _has_no_account(release: Release) -> bool:
    """In a pod that is given no token, as the daemons' are."""
    from global_index.kube.settings import ACCOUNT

    is_own = not release.api and release.kubeconfig is None
    return is_own and "KUBERNETES_SERVICE_HOST" in os.environ and not ACCOUNT.exists()


@contextmanager
def _access(release: Release) -> Iterator[Access]:
    """Files are made for a kubeconfig alone: a daemon's pod has no place for any."""
    from global_index.kube.api import Access, server_url
    from global_index.kube.kubeconfig import read_kubeconfig
    from global_index.kube.settings import ACCOUNT

    if release.api:
        yield Access(release.api.rstrip("/"))
    elif release.kubeconfig is not None:
        with tempfile.TemporaryDirectory(prefix="emberkv-doctor-") as scratch:
            yield read_kubeconfig(release.kubeconfig, Path(scratch))
    else:
        yield Access(server_url(), ACCOUNT / "ca.crt", ACCOUNT / "token")


def _own_namespace() -> str:
    from global_index.kube.discovery import own_namespace

    return own_namespace()
