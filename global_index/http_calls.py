"""The HTTP calls of Mooncake's and Dynamo's indexers, answered from this index.

docs/index-http.md says what each of them means here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import msgspec
from pydantic import ValidationError

from client_sdk.operator_gate import OperatorGate, open_token, speaker
from emberkv_proto.errors import AccessDeniedError, InvalidRequestError, UnavailableError
from emberkv_proto.types import EngineInfo, NodeId, Tier
from global_index.config import IndexSection
from global_index.dns_nodes import HostPort
from global_index.embedded import GlobalIndex
from global_index.hbm.static import StaticEngine
from global_index.http_answers import (
    Instance,
    UnknownModelError,
    answer_hashes,
    answer_tokens,
    instances,
    shaped,
)
from global_index.http_bodies import (
    Registration,
    Shape,
    read_hashes_question,
    read_registration,
    read_tokens_question,
    read_unregistration,
)
from global_index.http_endpoint import Routes
from global_index.http_message import JSON, HttpRequest, HttpResponse, error_response, json_response

log = logging.getLogger(__name__)

MAX_DUMPS = 2
KNOWN_SECONDS = 0.2
"""How long the list of instances serves; making it anew for each query costs more than a query."""
DUMP_MEDIA = {Tier.DRAM: "host_pinned", Tier.SSD: "disk"}
DAEMON = "emberkv"
ENGINES = ("vllm", "sglang")


def open_gate(section: IndexSection) -> OperatorGate:
    """Who may change what is followed. Raises ConfigError for a token file that is not right."""
    setting = "index.operator_token_file"
    # HTTP has no TLS here, so a token that comes from elsewhere crosses the network in the clear.
    return OperatorGate(open_token(section.operator_token_file, False, setting), setting)


class IndexerCalls:
    """Answers on the index's event loop. What changes the index goes through `gate`."""

    def __init__(
        self,
        index: GlobalIndex,
        gate: OperatorGate,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index = index
        self._gate = gate
        self._clock = clock
        self._dumps = 0
        self._known: list[Instance] = []
        self._known_at = float("-inf")

    @property
    def routes(self) -> Routes:
        return {
            "/query": {"POST": self._query},
            "/query_by_hash": {"POST": self._query_by_hash},
            "/register": {"POST": self._register},
            "/unregister": {"POST": self._unregister},
            "/workers": {"GET": self._workers},
            "/dump": {"GET": self._dump},
        }

    async def _query(self, request: HttpRequest) -> HttpResponse:
        question = read_tokens_question(request.body)
        try:
            hits = await answer_tokens(self._instances(), self._index.answer, question)
        except UnknownModelError as error:
            return error_response(HTTPStatus.NOT_FOUND, str(error))
        return json_response(shaped(question, hits))

    async def _query_by_hash(self, request: HttpRequest) -> HttpResponse:
        question = read_hashes_question(request.body)
        try:
            hits = await answer_hashes(self._instances(), self._index.answer, question)
        except UnknownModelError as error:
            return error_response(HTTPStatus.NOT_FOUND, str(error))
        return json_response(shaped(question, hits))

    async def _register(self, request: HttpRequest) -> HttpResponse:
        self._admit(request)
        self._known_at = float("-inf")
        wanted = read_registration(request.body)
        if wanted.kind == DAEMON:
            self._index.register_daemon(_daemon_address(wanted.endpoint))
        elif wanted.kind in ENGINES:
            self._index.register_engine(NodeId(wanted.node_id), _engine_info(wanted))
        else:
            raise InvalidRequestError(
                f"type {wanted.kind!r} cannot be followed; there is {', '.join(ENGINES)}, {DAEMON}"
            )
        log.info("registered %s %s by HTTP", wanted.kind, wanted.instance_id or wanted.endpoint)
        if wanted.shape is Shape.DYNAMO:
            return json_response({"status": "ok"}, HTTPStatus.CREATED)
        return json_response(
            {"status": "registered successfully", "instance_id": wanted.instance_id}
        )

    async def _unregister(self, request: HttpRequest) -> HttpResponse:
        self._admit(request)
        self._known_at = float("-inf")
        unwanted = read_unregistration(request.body)
        name = unwanted.instance_id
        removed = [
            f"{key.engine_id}|{unwanted.tenant}|{key.dp_rank}"
            for key in self._index.unregister_engine(name, unwanted.dp_rank)
        ]
        if unwanted.kind == DAEMON and await self._index.unregister_daemon(_daemon_address(name)):
            removed = [f"{name}|{unwanted.tenant}|0"]
        if not removed:
            return error_response(HTTPStatus.NOT_FOUND, f"{name} was not registered by HTTP")
        log.info("unregistered %s by HTTP", name)
        if unwanted.shape is Shape.DYNAMO:
            return json_response({"status": "ok"})
        return json_response({"status": "unregistered successfully", "removed_instances": removed})

    async def _workers(self, request: HttpRequest) -> HttpResponse:
        """Engines whose events are followed or that announced themselves, and daemons."""
        return json_response(workers(self._index))

    async def _dump(self, request: HttpRequest) -> HttpResponse:
        """All rows of DRAM and SSD that are exact, node by node, as they are read."""
        if self._dumps >= MAX_DUMPS:
            raise UnavailableError(f"{MAX_DUMPS} dumps are under way already")
        node_ids = [NodeId(request.query["node_id"])] if "node_id" in request.query else []
        return HttpResponse(HTTPStatus.OK, self._dump_pieces(node_ids), JSON)

    async def _dump_pieces(self, node_ids: list[NodeId]) -> AsyncGenerator[bytes, None]:
        self._dumps += 1
        try:
            yield b'{"emberkv:default":{"block_size":null,"events":['
            comma = b""
            async with aclosing(self._index.copy_nodes(node_ids)) as pages:
                async for page in pages:
                    if not page.keys.size:
                        continue
                    stored = {
                        "parent_hash": None,
                        "start_position": None,
                        "blocks": [{"block_hash": key} for key in page.keys.tolist()],
                    }
                    event = {
                        "worker_id": page.node_id,
                        "storage_tier": DUMP_MEDIA[page.tier],
                        "residency_domain": "worker",
                        "event": {
                            "event_id": page.seq,
                            "data": {"stored": stored},
                            "dp_rank": 0,
                        },
                        "incarnation": page.incarnation,
                    }
                    yield comma + msgspec.json.encode(event)
                    comma = b","
                    await asyncio.sleep(0)  # queries come between two pages
            yield b"]}}\n"
        finally:
            self._dumps -= 1

    def _instances(self) -> list[Instance]:
        now = self._clock()
        if now - self._known_at >= KNOWN_SECONDS:
            self._known, self._known_at = instances(self._index), now
        return self._known

    def _admit(self, request: HttpRequest) -> None:
        """Only JSON and no web page's: a browser on this machine calls from loopback too.

        A page whose name was made to mean this machine may send JSON, but says its origin.
        """
        host = f"[{request.host}]" if ":" in request.host else request.host
        kind = "ipv6" if ":" in request.host else "ipv4"
        peer = speaker(f"{kind}:{host}:0", request.headers)
        self._gate.check(peer, request.headers.get("authorization"))
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
            raise InvalidRequestError(f"say Content-Type: {JSON}")
        if "origin" in request.headers:
            raise AccessDeniedError("orders are not taken from web pages")


def workers(index: GlobalIndex) -> list[dict[str, Any]]:
    """The list of GET /workers."""
    followed = {(e.key.node_id, e.key.engine_id, e.key.dp_rank): e for e in index.engines()}
    known: dict[tuple[NodeId, str, int], EngineInfo] = {
        key: view.info for key, view in followed.items()
    }
    found: list[dict[str, Any]] = []
    for node in index.nodes():
        found.append(
            {
                "instance_id": node.node_id,
                "source": "daemon",
                "status": node.liveness.value,
                "exactness": node.exactness.value,
                "endpoints": {"0": node.grpc_address},
            }
        )
        for info in node.engines:
            known.setdefault((node.node_id, info.engine_id, info.dp_rank), info)
    ranks: dict[tuple[NodeId, str], list[EngineInfo]] = {}
    for (node_id, engine_id, _), info in known.items():
        ranks.setdefault((node_id, engine_id), []).append(info)
    for (node_id, engine_id), infos in ranks.items():
        listeners = {
            str(info.dp_rank): {
                "endpoint": info.events_endpoint,
                "status": followed[node_id, engine_id, info.dp_rank].state.value
                if (node_id, engine_id, info.dp_rank) in followed
                else "not followed",
            }
            for info in infos
        }
        found.append(
            {
                "instance_id": engine_id,
                "source": "engine",
                "model_name": infos[0].model,
                "block_size": infos[0].block_tokens,
                "node_id": node_id,
                "url": infos[0].url,
                "role": infos[0].role,
                "endpoints": {rank: listener["endpoint"] for rank, listener in listeners.items()},
                "listeners": listeners,
            }
        )
    return found


def _daemon_address(endpoint: str) -> str:
    """host:port, with or without a scheme before it. Raises InvalidRequestError."""
    address = endpoint.removeprefix("grpc://").removeprefix("tcp://")
    try:
        HostPort.parse(address)
    except ValueError as error:
        raise InvalidRequestError(f"endpoint {endpoint!r}: {error}") from None
    return address


def _engine_info(wanted: Registration) -> EngineInfo:
    """As a StaticEngine of the settings has it. Raises InvalidRequestError."""
    try:
        engine = StaticEngine(
            engine_id=wanted.instance_id,
            url=wanted.url,
            model=wanted.model,
            node_id=wanted.node_id,
            events=wanted.endpoint,
            replay=wanted.replay_endpoint,
            block_tokens=wanted.store_block_tokens,
            namespace_id=wanted.namespace_id,
        )
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise InvalidRequestError(f"{field}: {first['msg']}") from None
    (_, info) = engine.infos()[0]
    return replace(info, dp_rank=wanted.dp_rank, engine_block_tokens=wanted.block_tokens)
