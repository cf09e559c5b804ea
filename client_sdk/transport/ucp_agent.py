"""A UCX agent over ucxx, a process of its own as `ucx_agent` is: `python -m ...ucp_agent ...`.

For sites whose UCX comes from conda or the system. Its messages have two sides: the owner sends
from its pool, the reader receives into its own, under a tag that is the receiving address. So no
two messages under way to one agent have the same tag: a reader reads into a place once at a time.
"""

from __future__ import annotations

import hashlib
from importlib import import_module
from typing import Any

import numpy as np

from client_sdk.transport.agent_loop import open_region, run_agent
from client_sdk.transport.lane import AgentFacts, Direction, Move
from client_sdk.transport.memory import HOST, HostMemory, Memory, check_memory
from emberkv_proto.errors import InvalidRequestError, UnavailableError

ucx: Any = import_module("ucxx._lib.libucxx")
arrays: Any = import_module("ucxx._lib.arr")

_NAME_BYTES = 16
_FAILURES: tuple[type[Exception], ...] = (ucx.UCXError,)


class TagAgent:
    """Implements `agent_loop.MovingAgent`: READ receives what the other side's WRITE sends."""

    lost: tuple[type[Exception], ...] = (
        ucx.UCXConnectionResetError,
        ucx.UCXEndpointTimeoutError,
        ucx.UCXUnreachableError,
    )
    failures = _FAILURES

    def __init__(self, name: str, memory: tuple[Memory, ...]) -> None:
        """Raises UnavailableError (UCX has no transport), InvalidRequestError (GPU memory)."""
        if check_memory(memory) != HOST or len(memory) != 1:
            raise InvalidRequestError("a ucp agent works on one region of host memory")
        (region,) = memory
        assert isinstance(region, HostMemory)
        opened = open_region(region)
        self.addresses = (opened.address,)
        self._bytes: np.ndarray[Any, np.dtype[np.uint8]] = opened.keeps  # type: ignore[assignment]
        try:
            self._context = ucx.UCXContext({}, (ucx.Feature.TAG,))
            self._worker = ucx.UCXWorker(self._context)
        except _FAILURES as error:
            raise UnavailableError(f"UCX cannot work: {error}; see UCX_TLS") from None
        self._endpoints: dict[bytes, Any] = {}

    def facts(self) -> AgentFacts:
        lines = self._context.info.splitlines()
        transports = tuple(line.split()[-1] for line in lines if " resource " in line)
        return AgentFacts(self.addresses[0], transports, bytes(self._worker.address.tobytes()))

    def introduce(self, metadata: bytes) -> bytes:
        name = hashlib.blake2b(metadata, digest_size=_NAME_BYTES).digest()
        if name not in self._endpoints:
            address = ucx.UCXAddress.create_from_buffer(metadata)
            self._endpoints[name] = ucx.UCXEndpoint.create_from_worker_address(
                self._worker, address, True
            )
        return name

    def forget(self, name: bytes) -> None:
        self._endpoints.pop(name, None)

    def post(self, move: Move) -> list[Any]:
        if move.direction is Direction.READ:
            return [
                self._worker.tag_recv(
                    self._view(r.local, r.length), ucx.UCXXTag(r.local), ucx.UCXXTagMaskFull
                )
                for r in move.ranges
            ]
        endpoint = self._endpoints.get(move.remote_name)
        if endpoint is None:
            raise UnavailableError("that agent was not introduced")
        return [
            endpoint.tag_send(self._view(r.local, r.length), ucx.UCXXTag(r.remote))
            for r in move.ranges
        ]

    def is_done(self, handle: list[Any]) -> bool:
        self._worker.progress()
        while handle and handle[-1].completed:
            handle.pop().check_error()
        return not handle

    def release(self, handle: list[Any]) -> None:
        """Nothing to do: what is left of a failed move ends with the process."""

    def _view(self, address: int, length: int) -> Any:
        start = address - self.addresses[0]
        return arrays.Array(self._bytes[start : start + length])


if __name__ == "__main__":
    run_agent(TagAgent)
