"""Checks of a running SGLang server: does it keep its cache, and where do routers hear of it?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from client_sdk.cli.doctor import Finding, Verdict
from client_sdk.cli.http_json import get_json
from client_sdk.engine.event_endpoints import EventEndpoints
from client_sdk.engine.sglang_backend.announcement import event_endpoints
from client_sdk.engine.sglang_backend.settings import BackendSettings
from client_sdk.sync_client import OperatorClient
from emberkv_proto.errors import ConfigError, EmberError

MODULE = "client_sdk.engine.sglang_backend"
CLASS = "EmberHiCache"
EXTRA = "hicache-storage-backend-extra-config"
EXAMPLE = json.dumps(
    {
        "backend_name": "emberkv",
        "module_path": MODULE,
        "class_name": CLASS,
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
    }
)
EVENTS_EXAMPLE = json.dumps(
    {"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}
)
SGLANG_TREE_KEYS = (
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys",
    "tp_lcm_size",
)
"""What SGLang takes out of the extra config before the backend sees it."""
LAYOUTS = ("page_first", "page_first_direct", "page_head", "layer_first")


def examine_sglang(url: str, admin_key: str = "") -> list[Finding]:
    """Findings about the server at `url`, from its /server_info.

    Args:
        admin_key: its --admin-api-key; with it also what was attached at run time is seen.

    Raises:
        ConfigError, InvalidRequestError, UnavailableError: the server cannot be asked.
    """
    base = url.rstrip("/")
    info = get_json(f"{base}/server_info", admin_key)
    if admin_key:
        info = {**info, **get_json(f"{base}/hicache/storage-backend", admin_key)}
    return examine_info(info)


def examine_info(info: dict[str, Any]) -> list[Finding]:
    """Findings about what a server says of itself."""
    findings = [*_check_caches(info)]
    backend = info.get("hicache_storage_backend")
    if backend != "dynamic":
        fix = f"add --hicache-storage-backend dynamic --{EXTRA} '{EXAMPLE}'"
        return [*findings, Finding("storage backend", Verdict.FAIL, str(backend), fix)]
    findings.append(Finding("storage backend", Verdict.OK, "dynamic"))
    try:
        extra = _extra(str(info.get("hicache_storage_backend_extra_config") or ""))
    except ValueError as error:
        seen, fix = str(error), f"quote it for the shell: '{EXAMPLE}'"
        return [*findings, Finding(EXTRA, Verdict.FAIL, seen, fix)]
    if extra is None:
        seen = "in a file that is not on this machine: not checked"
        return [*findings, Finding(EXTRA, Verdict.WARN, seen, "run this where the server runs")]
    return [*findings, *_check_extra(extra), *_check_pages(info), *_check_events(info, extra)]


def _check_caches(info: dict[str, Any]) -> Iterator[Finding]:
    if not info.get("enable_hierarchical_cache"):
        yield Finding("host pool", Verdict.FAIL, "off", "add --enable-hierarchical-cache")
    else:
        yield Finding("host pool", Verdict.OK, f"layout {info.get('hicache_mem_layout')}")
    if info.get("disable_radix_cache"):
        yield Finding("prefix cache", Verdict.FAIL, "off", "leave out --disable-radix-cache")
    policy = info.get("hicache_write_policy")
    if policy == "write_through":
        yield Finding("write policy", Verdict.OK, policy)
    else:
        why = {
            "write_back": "pages are saved when they are evicted: a kill loses the others",
            "write_through_selective": "pages are saved when they were used again",
        }.get(str(policy), "not known")
        fix = "set --hicache-write-policy write_through"
        yield Finding("write policy", Verdict.WARN, f"{policy}: {why}", fix)
    if info.get("speculative_algorithm"):
        seen = f"{info['speculative_algorithm']}: the backend refuses pools of draft models"
        yield Finding("speculative decoding", Verdict.FAIL, seen, "start without it")


def _extra(text: str) -> dict[str, Any] | None:
    """None: it is in a file elsewhere. Raises ValueError."""
    if text.startswith("@"):
        path = Path(text[1:])
        if not path.is_file():
            return None
        if path.suffix in (".yaml", ".yml"):
            import yaml

            given = yaml.safe_load(path.read_text())
        elif path.suffix == ".json":
            given = json.loads(path.read_text())
        else:
            return None
    else:
        given = json.loads(text or "{}")
    if not isinstance(given, dict):
        raise ValueError("not an object")
    return given


def _check_extra(extra: dict[str, Any]) -> Iterator[Finding]:
    for key, wanted in (("module_path", MODULE), ("class_name", CLASS)):
        if extra.get(key) != wanted:
            seen = f"{extra.get(key)}: SGLang loads another backend"
            yield Finding(key, Verdict.FAIL, seen, f'set "{key}": "{wanted}"')
            return
    if extra.get("interface_v1"):
        yield Finding("interface_v1", Verdict.OK, "pages are copied once")
    else:
        seen = "not set: each page is copied once more"
        yield Finding("interface_v1", Verdict.WARN, seen, 'set "interface_v1": 1')
    if extra.get("hicache_storage_pass_prefix_keys"):
        yield Finding("prefix keys", Verdict.OK, "told")
    else:
        seen = "not told: the store does not know which page follows which when it makes room"
        fix = 'set "hicache_storage_pass_prefix_keys": true'
        yield Finding("prefix keys", Verdict.WARN, seen, fix)
    own = {name: value for name, value in extra.items() if name not in SGLANG_TREE_KEYS}
    try:
        settings = BackendSettings.of(own)
    except ConfigError as error:
        yield Finding("extra config", Verdict.FAIL, str(error), "correct the key")
        return
    yield _check_daemon(Path(settings.socket_path))
    if settings.engine_url:
        yield Finding("engine_url", Verdict.OK, settings.engine_url)
    else:
        fix = f'set "engine_url" in --{EXTRA} to where routers reach this engine'
        yield Finding("engine_url", Verdict.WARN, "empty: routers do not learn of it", fix)


def _check_daemon(path: Path) -> Finding:
    try:
        with OperatorClient(path, timeout_seconds=2.0) as operator:
            status = operator.status()
    except EmberError as error:
        return Finding("store daemon", Verdict.WARN, str(error), "the engine computes without it")
    return Finding("store daemon", Verdict.OK, f"{status.node_id} at {path}: {status.state}")


def _check_pages(info: dict[str, Any]) -> Iterator[Finding]:
    tokens = int(info.get("page_size") or 1)
    if tokens < 16:
        seen = f"{tokens} tokens: each page is a block of the store"
        yield Finding("page size", Verdict.WARN, seen, "set --page-size 64")
    else:
        yield Finding("page size", Verdict.OK, f"{tokens} tokens")
    layout = str(info.get("hicache_mem_layout"))
    if layout not in LAYOUTS:
        fix = "set --hicache-mem-layout page_first"
        yield Finding("memory layout", Verdict.FAIL, f"{layout}: not known to us", fix)
    elif layout == "layer_first":
        seen = f"{layout}: a page is copied in two pieces a layer"
        yield Finding("memory layout", Verdict.WARN, seen, "set --hicache-mem-layout page_first")


def _check_events(info: dict[str, Any], extra: dict[str, Any]) -> Iterator[Finding]:
    """Whether routers can hear what is in the engine's own cache."""
    name, fix = "kv-events-config", f"add --kv-events-config '{EVENTS_EXAMPLE}'"
    text, url = info.get("kv_events_config"), str(extra.get("engine_url") or "")
    if not text or not url:
        seen = "without engine_url" if text else "not given"
        yield Finding(name, Verdict.WARN, f"{seen}: routers guess what is in HBM", fix)
        return
    try:
        endpoints = event_endpoints(str(text), url, 0)
    except ValueError as error:
        yield Finding(name, Verdict.FAIL, str(error), f"quote it for the shell: '{EVENTS_EXAMPLE}'")
        return
    if endpoints == EventEndpoints():
        yield Finding(name, Verdict.WARN, "routers have nothing to connect to", fix)
    elif not endpoints.replay:
        seen = "no replay_endpoint: a lost connection costs what the index knows of HBM"
        yield Finding(name, Verdict.WARN, seen, fix)
    else:
        yield Finding(name, Verdict.OK, f"{endpoints.events}, replays {endpoints.replay}")
