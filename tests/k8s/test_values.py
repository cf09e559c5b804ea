"""What values of the chart come to in its pods, and what it says to whoever installed it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.helpers.manifests import (
    CHART,
    Manifest,
    find,
    output_of,
    pod_specs,
    run_tool,
    template_of,
)

KEYS: Manifest = {
    "volumes": [{"name": "keys", "secret": {"secretName": "keys", "defaultMode": 0o400}}],
    "volumeMounts": [{"name": "keys", "mountPath": "/keys", "readOnly": True}],
}


@pytest.mark.parametrize(
    ("wrong", "instead"),
    [
        ("store.config.daemon.grpc_port=1", "store.ports.grpc"),
        ("store.config.daemon.metrics_port=1", "store.ports.metrics"),
        ("store.config.daemon.transport_port=1", "store.ports.transfer"),
        ("store.config.daemon.drain_seconds=90", "store.drainSeconds"),
        ("router.config.router.port=1", "router.port"),
        ("router.config.router.drain_seconds=90", "router.drainSeconds"),
        ("router.config.router.ext_proc_port=1", "router.extProcPort"),
        ("router.config.index.port=1", "index.ports.grpc"),
        ("index.config.index.metrics_port=1", "index.ports.metrics"),
    ],
)
def test_what_the_pod_has_from_a_value_the_file_may_not_say_otherwise(
    wrong: str, instead: str
) -> None:
    done = run_tool("helm", "template", str(CHART), "--set", f"index.enabled=true,{wrong}")
    assert done.returncode != 0
    assert f"set {instead} instead" in done.stderr


@pytest.mark.parametrize(
    "wrong",
    [
        "store.maxUnavailable=0",
        "store.maxUnavailable=0%",
        "store.maxUnavailable=half",
        "store.ssd.hostPaths={relative}",
        "store.config.daemon=5",
        "store.ports.grpc=70000",
        "store.rdma.resource=hca",
        "router.volumes=no",
        "router.service.type=Ingress",
        "redis.server.replicas=2",
        "redis.url=redis://user:secret@host:6379",
        "discovery.mode=etcd",
        "discovery.engineNamespaces={No_Name}",
        "networkPolicy.dns=[]",
        "tls.serverName=",
        "monitoring.interval=soon",
        "vllm.shmMi=1",
        "user.uid=0",
    ],
)
def test_a_value_that_cannot_be_is_refused_by_its_name(wrong: str) -> None:
    done = run_tool("helm", "template", str(CHART), "--set", wrong)
    assert done.returncode != 0
    name = wrong.split("=")[0].replace(".", "/")
    assert f"'/{name}" in done.stderr, done.stderr


@pytest.mark.parametrize("part", ["store", "router", "index"])
def test_a_secret_s_files_reach_a_part_and_its_group_may_read_them(
    part: str, tmp_path: Path
) -> None:
    values: Manifest = {"index": {"enabled": True}}
    manifests = template_of({**values, part: {**values.get(part, {}), **KEYS}}, tmp_path)
    (spec,) = [s for name, s in pod_specs(manifests).items() if name.endswith(f"/emberkv-{part}")]
    assert KEYS["volumes"][0] in spec["volumes"]
    assert KEYS["volumeMounts"][0] in spec["containers"][0]["volumeMounts"]
    assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsGroup"]


@pytest.mark.parametrize("most", [1, 40, "2%"])
def test_as_many_nodes_at_once_are_upgraded_as_the_value_says(
    most: int | str, tmp_path: Path
) -> None:
    manifests = template_of({"store": {"maxUnavailable": most}}, tmp_path)
    strategy = find(manifests, "DaemonSet", "emberkv-store")["spec"]["updateStrategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": most}}


def test_a_router_that_is_unready_for_want_of_engines_holds_no_drain_up(tmp_path: Path) -> None:
    values: Manifest = {"redis": {"server": {"enabled": True, "replicas": 3}}}
    budgets = [m for m in template_of(values, tmp_path) if m["kind"] == "PodDisruptionBudget"]
    assert {m["metadata"]["name"] for m in budgets} == {"emberkv-router", "emberkv-redis"}
    for budget in budgets:
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
        assert budget["spec"]["maxUnavailable"] == 1


def test_routers_scale_between_their_bounds_and_spread(tmp_path: Path) -> None:
    scaling = {"enabled": True, "minReplicas": 3, "maxReplicas": 9, "cpuPercent": 60}
    manifests = template_of({"router": {"autoscaling": scaling}}, tmp_path)
    scaler = find(manifests, "HorizontalPodAutoscaler", "emberkv-router")["spec"]
    router = find(manifests, "Deployment", "emberkv-router")
    assert "replicas" not in router["spec"]  # a helm upgrade would set them back
    assert scaler["scaleTargetRef"]["name"] == router["metadata"]["name"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (3, 9)
    (metric,) = scaler["metrics"]
    assert metric["resource"]["target"]["averageUtilization"] == 60
    pod = router["spec"]["template"]
    assert pod["spec"]["containers"][0]["resources"]["requests"]["cpu"]  # what is scaled by
    (spread,) = pod["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


def test_a_rollout_of_routers_leaves_answers_two_minutes_to_end(tmp_path: Path) -> None:
    manifests = template_of({}, tmp_path)
    text = find(manifests, "ConfigMap", "emberkv-router")["data"]["emberkv.yaml"]
    drain = yaml.safe_load(text)["router"]["drain_seconds"]
    router = find(manifests, "Deployment", "emberkv-router")["spec"]["template"]["spec"]
    assert drain == 120
    assert router["terminationGracePeriodSeconds"] >= 5 + drain + 5


def test_no_secret_is_in_a_configmap_or_on_a_command_line(tmp_path: Path) -> None:
    """Secrets are named, not held: what a manifest has of one is a reference or a file's path."""
    values: Manifest = {
        "store": {"operatorTokenSecret": "operators"},
        "router": {**KEYS, "config": {"router": {"key_file": "/keys/keys.json"}}},
        "redis": {"server": {"enabled": True, "replicas": 3}, "passwordSecret": "valkey"},
        "vllm": {"enabled": True, "huggingFaceSecret": "hub"},
    }
    manifests = template_of(values, tmp_path)
    assert not [m for m in manifests if m["kind"] == "Secret"]
    for text in (str(m["data"]) for m in manifests if m["kind"] == "ConfigMap"):
        assert not {
            word for word in ("operators", "valkey", "hub", "REDISCLI_AUTH") if word in text
        }
    for spec in pod_specs(manifests).values():
        for container in spec["containers"]:
            words = " ".join([*container["command"], *container.get("args", ())])
            assert "--requirepass" not in words
            assert "--masterauth" not in words
            for variable in container.get("env", ()):
                if any(word in variable["name"] for word in ("PASSWORD", "AUTH", "TOKEN")):
                    assert "secretKeyRef" in variable["valueFrom"]


def notes(*options: str) -> str:
    said = output_of(
        "helm", "install", "ember", str(CHART), "-n", "ns", "--dry-run=client", *options
    )
    return said.partition("NOTES:\n")[2]


def test_its_notes_name_what_was_made(tmp_path: Path) -> None:
    said = notes("--set", "image.repository=registry.example/emberkv,store.ports.grpc=7400")
    assert "exec daemonset/ember-emberkv-store -- emberkv status" in said
    assert "--address 127.0.0.1:7400" in said
    assert "http://ember-emberkv-router.ns.svc:8000" in said
    assert "label namespace ns pod-security.kubernetes.io/enforce=privileged" in said
    assert "/dev/shm/emberkv, /run/emberkv, /var/lib/emberkv/data" in said
    assert "names no registry" not in said
    assert "no NetworkPolicy" not in said.lower()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("nameOverride=", "names no registry"),
        ("nameOverride=", "with the first healthy engine"),
        ("networkPolicy.enabled=false", "No NetworkPolicy"),
    ],
)
def test_its_notes_say_what_will_not_work_as_it_is(values: str, said: str) -> None:
    assert said in notes("--set", values)


def test_its_notes_leave_out_what_is_not_there() -> None:
    said = notes("--set", "router.enabled=false,image.repository=registry.example/emberkv")
    assert "Clients:" not in said
    assert "healthy engine" not in said
    assert "healthy engine" not in notes("--set", "router.readyPath=/health")


def test_emptydirs_of_ours_hold_no_drain_or_scaling_down_up(tmp_path: Path) -> None:
    values: Manifest = {
        "index": {"enabled": True},
        "redis": {"server": {"enabled": True, "replicas": 3}},
        "router": {"podAnnotations": {"own": "kept"}},
    }
    key = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"
    named = {}
    for manifest in template_of(values, tmp_path):
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            pod = manifest["spec"]["template"]
            empty = {v["name"] for v in pod["spec"]["volumes"] if "emptyDir" in v}
            named[manifest["metadata"]["name"]] = pod["metadata"]["annotations"]
            assert set(pod["metadata"]["annotations"][key].split(",")) == empty
    assert named.keys() == {"emberkv-router", "emberkv-index", "emberkv-redis"}
    assert named["emberkv-router"]["own"] == "kept"
