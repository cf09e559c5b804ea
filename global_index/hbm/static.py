"""Engines that the settings name: those that run without our SDK and cannot announce themselves."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import blake3
from pydantic import Field, field_validator

from client_sdk.settings import Section
from emberkv_proto.errors import InvalidRequestError
from emberkv_proto.types import NAMESPACE_ID_BYTES, EngineInfo, HashScheme, NamespaceId, NodeId
from global_index.hbm.endpoints import check_endpoint

Name = Annotated[str, Field(min_length=1, max_length=253)]


class StaticEngine(Section):
    """One engine, or as many data-parallel ranks of it as publish on following ports."""

    engine_id: Name
    url: str = ""
    """Where the router reaches it; empty: requests are not sent to it."""
    model: str = ""
    node_id: str = ""
    """Whose DRAM and SSD it shares; empty: it has no store."""
    events: str
    """tcp://host:port of its events."""
    replay: str = ""
    """tcp://host:port where missed events are asked for."""
    block_tokens: Annotated[int, Field(ge=1, le=1 << 16)] = 64
    """Tokens of a block of ours; a multiple of the engine's block size."""
    namespace_id: str = ""
    """32 hexadecimal digits; empty: engines of the same model and block_tokens share one."""
    hash_scheme: Literal["", "sglang"] = ""
    """sglang: its namespace_id is that of SGLang engines with our storage backend."""
    data_parallel_ranks: Annotated[int, Field(ge=1, le=1024)] = 1

    @field_validator("events", "replay")
    @classmethod
    def _endpoint(cls, text: str) -> str:
        try:
            return check_endpoint(text) if text else text
        except InvalidRequestError as error:
            raise ValueError(str(error)) from None

    @field_validator("url")
    @classmethod
    def _plain_http(cls, url: str) -> str:
        if url and not re.fullmatch(r"http://[^/\s]+/?", url):
            raise ValueError(f"{url!r} is not http://host:port")
        return url

    @field_validator("namespace_id")
    @classmethod
    def _hexadecimal(cls, text: str) -> str:
        if text and not re.fullmatch(f"[0-9a-f]{{{2 * NAMESPACE_ID_BYTES}}}", text):
            raise ValueError(f"{text!r} is not {2 * NAMESPACE_ID_BYTES} hexadecimal digits")
        return text

    def infos(self) -> list[tuple[NodeId, EngineInfo]]:
        """One for each rank; rank r publishes r ports further on, as engines do."""
        return [
            (
                NodeId(self.node_id),
                EngineInfo(
                    self.engine_id,
                    self.url,
                    self.model,
                    self._namespace(),
                    self.block_tokens,
                    dp_rank=rank,
                    events_endpoint=_further(self.events, rank),
                    replay_endpoint=_further(self.replay, rank),
                    hash_scheme=HashScheme(self.hash_scheme),
                ),
            )
            for rank in range(self.data_parallel_ranks)
        ]

    def _namespace(self) -> NamespaceId:
        if self.namespace_id:
            return NamespaceId(bytes.fromhex(self.namespace_id))
        name = f"engine events\0{self.model}\0{self.block_tokens}".encode()
        return NamespaceId(blake3.blake3(name).digest()[:NAMESPACE_ID_BYTES])


def _further(endpoint: str, ports: int) -> str:
    if not endpoint:
        return endpoint
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + ports}"
