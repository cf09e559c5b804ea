"""Checks of a vLLM command line: would this engine keep its cache, and answer rightly?"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from client_sdk.cli.doctor import Finding, Verdict
from client_sdk.engine.vllm_connector.kv_events import event_endpoints
from client_sdk.engine.vllm_connector.settings import ConnectorSettings
from client_sdk.sync_client import OperatorClient
from emberkv_proto.errors import ConfigError, EmberError

NAME = "EmberConnector"
MODULE = "client_sdk.engine.vllm_connector"
EXAMPLE = json.dumps(
    {
        "kv_connector": NAME,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
)
EVENTS_EXAMPLE = json.dumps(
    {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5657",
    }
)
EVENTS_DEFAULTS = {
    "enable_kv_cache_events": False,
    "publisher": "zmq",
    "endpoint": "tcp://*:5557",
    "replay_endpoint": None,
}
"""vLLM's own."""
UNCACHED = ("decode-context-parallel-size", "prefill-context-parallel-size")


def examine_vllm(command: Sequence[str]) -> list[Finding]:
    """Findings about `vllm serve ...`, or its arguments alone."""
    flags = _flags(command)
    text = flags.get("kv-transfer-config")
    if text is None:
        fix = f"add --kv-transfer-config '{EXAMPLE}'"
        return [Finding("kv-transfer-config", Verdict.FAIL, "not given", fix)]
    try:
        config = json.loads(text)
        if not isinstance(config, dict):
            raise ValueError("not an object")
    except ValueError as error:
        fix = f"quote it for the shell: '{EXAMPLE}'"
        return [Finding("kv-transfer-config", Verdict.FAIL, str(error), fix)]
    return [
        *_check_transfer(config),
        *_check_sizes(flags, config),
        *_check_events(flags, config),
        *_check_split(flags),
    ]


def _flags(command: Sequence[str]) -> dict[str, str]:
    """`--name value` and `--name=value`; a name alone has an empty value."""
    flags: dict[str, str] = {}
    for number, word in enumerate(command):
        if not word.startswith("--"):
            continue
        name, equals, value = word[2:].partition("=")
        if not equals and number + 1 < len(command) and not command[number + 1].startswith("--"):
            value = command[number + 1]
        flags[name.replace("_", "-")] = value
    return flags


def _check_transfer(config: dict[str, Any]) -> Iterator[Finding]:
    for key, wanted, why in (
        ("kv_connector", NAME, "vLLM would load another connector"),
        ("kv_connector_module_path", MODULE, "vLLM would not find the connector"),
        ("kv_role", "kv_both", "an engine both saves and loads"),
        (
            "kv_load_failure_policy",
            "recompute",
            "vLLM's default ends a request whose load fails with an error",
        ),
    ):
        seen = config.get(key)
        if seen == wanted:
            yield Finding(key, Verdict.OK, wanted)
        else:
            yield Finding(key, Verdict.FAIL, f"{seen}: {why}", f'set "{key}": "{wanted}"')
    extra = config.get("kv_connector_extra_config") or {}
    try:
        settings = ConnectorSettings.of(extra)
    except ConfigError as error:
        yield Finding("extra config", Verdict.FAIL, str(error), "correct the key")
        return
    yield _check_daemon(Path(settings.socket_path))
    if settings.engine_url:
        yield Finding("engine_url", Verdict.OK, settings.engine_url)
    else:
        fix = 'set "engine_url" in kv_connector_extra_config to where routers reach this engine'
        yield Finding("engine_url", Verdict.WARN, "empty: routers do not learn of it", fix)


def _check_daemon(path: Path) -> Finding:
    try:
        with OperatorClient(path, timeout_seconds=2.0) as operator:
            status = operator.status()
    except EmberError as error:
        return Finding("store daemon", Verdict.WARN, str(error), "the engine starts without it")
    return Finding("store daemon", Verdict.OK, f"{status.node_id} at {path}: {status.state}")


def _check_sizes(flags: dict[str, str], transfer: dict[str, Any]) -> Iterator[Finding]:
    """Blocks of ours are whole blocks of the engine's; its hashes are only names to us."""
    extra = transfer.get("kv_connector_extra_config")
    ours = extra.get("block_tokens") if isinstance(extra, dict) else None
    if ours is not None and type(ours) is not int:
        return  # told already: a key of the wrong kind
    theirs = flags.get("block-size")
    name = "block_tokens"
    if ours is None:
        size = theirs or "the engine's own choice"
        yield Finding(name, Verdict.OK, f"{size}: one of the engine's blocks")
    elif theirs is None:
        seen = f"{ours}, but the engine chooses its own block size by device and version"
        yield Finding(name, Verdict.WARN, seen, f"add --block-size, {ours} or a divisor of it")
    elif not theirs.isdecimal() or not int(theirs) or ours % int(theirs):
        seen = f"{ours} is no multiple of --block-size {theirs}: the engine runs without the store"
        yield Finding(name, Verdict.FAIL, seen, f'set "{name}" to a multiple of {theirs}')
    else:
        yield Finding(name, Verdict.OK, f"{ours}: {ours // int(theirs)} of the engine's blocks")
    name = "prefix-caching-hash-algo"
    if name in flags:
        yield Finding(name, Verdict.OK, f"{flags[name]}: any will do, blocks have hashes of ours")
    if "no-enable-prefix-caching" in flags:
        seen = "off: what is in the store is copied for each request, and routers see no HBM"
        yield Finding("prefix caching", Verdict.WARN, seen, "leave out --no-enable-prefix-caching")


def _check_events(flags: dict[str, str], transfer: dict[str, Any]) -> Iterator[Finding]:
    """Whether routers can hear what is in the engine's own cache."""
    name, fix = "kv-events-config", f"add --kv-events-config '{EVENTS_EXAMPLE}'"
    extra = transfer.get("kv_connector_extra_config")
    url = str(extra.get("engine_url") or "") if isinstance(extra, dict) else ""
    text = flags.get(name)
    if text is None or not url:
        seen = "not given" if text is None else "without engine_url"
        yield Finding(name, Verdict.WARN, f"{seen}: routers guess what is in HBM", fix)
        return
    try:
        given = json.loads(text)
        if not isinstance(given, dict):
            raise ValueError("not an object")
    except ValueError as error:
        yield Finding(name, Verdict.FAIL, str(error), f"quote it for the shell: '{EVENTS_EXAMPLE}'")
        return
    endpoints = event_endpoints(SimpleNamespace(**{**EVENTS_DEFAULTS, **given}), url, 0)
    if not endpoints.events:
        yield Finding(name, Verdict.WARN, "routers have nothing to connect to", fix)
    elif not endpoints.replay:
        seen = "no replay_endpoint: a lost connection costs what the index knows of HBM"
        yield Finding(name, Verdict.WARN, seen, fix)
    else:
        yield Finding(name, Verdict.OK, f"{endpoints.events}, replays {endpoints.replay}")


def _check_split(flags: dict[str, str]) -> Iterator[Finding]:
    for name in UNCACHED:
        if flags.get(name, "1") != "1":
            seen = f"{flags[name]}: such an engine runs without the store"
            yield Finding(name, Verdict.WARN, seen, "use tensor or pipeline parallelism")
