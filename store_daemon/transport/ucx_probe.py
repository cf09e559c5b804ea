"""Tries UCX as the daemon would use it: two agents on this machine, one real transfer."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from client_sdk.transport.agent_process import UCP_AGENT, UCX_AGENT, AgentProcess
from client_sdk.transport.lane import Direction, Move, Range
from client_sdk.transport.memory import HostMemory
from client_sdk.transport.ucx_settings import UcxSettings
from emberkv_proto.errors import EmberError, PreflightError

PROBE_BYTES = 1 << 20
PROBE_SECONDS = 10.0


def probe_ucx(settings: UcxSettings, program: str = UCX_AGENT) -> tuple[str, ...]:
    """What UCX goes over, once a write between two agents has arrived byte for byte.

    `program`: of the agents; those of ucp receive what is written.

    Raises PreflightError: it did not, or UCX does not use what the settings say. Takes seconds.
    """
    sent = secrets.token_bytes(PROBE_BYTES)
    try:
        with (
            _memory() as source,
            _memory() as target,
            _agent("source", source, settings, program) as here,
            _agent("target", target, settings, program) as there,
        ):
            settings.check(here.facts.transports)
            os.pwrite(source, sent, 0)
            name = here.introduce(there.facts.metadata, PROBE_SECONDS)
            ends = [
                Range(agent.facts.base, there.facts.base, PROBE_BYTES) for agent in (here, there)
            ]
            with here.lane(PROBE_SECONDS) as lane, there.lane(PROBE_SECONDS) as receiving:
                if program == UCP_AGENT:
                    receiving.post(Move(Direction.READ, b"", ends[1:]), PROBE_SECONDS)
                lane.post(Move(Direction.WRITE, name, ends[:1]), PROBE_SECONDS)
                lane.reply()
                receiving.drain()
            if os.pread(target, PROBE_BYTES, 0) != sent:
                raise PreflightError("UCX moved other bytes than it was given")
            return here.facts.transports
    except PreflightError:
        raise
    except EmberError as error:
        raise PreflightError(f"UCX cannot move bytes on this machine: {error}") from None


@contextmanager
def _memory() -> Iterator[int]:
    with ExitStack() as stack:
        descriptor = os.memfd_create("emberkv-probe", os.MFD_CLOEXEC)
        stack.callback(os.close, descriptor)
        os.ftruncate(descriptor, PROBE_BYTES)
        yield descriptor


@contextmanager
def _agent(
    purpose: str, descriptor: int, settings: UcxSettings, program: str
) -> Iterator[AgentProcess]:
    name = f"emberkv-probe-{purpose}-{secrets.token_hex(8)}"
    agent = AgentProcess(
        name,
        (HostMemory(descriptor, PROBE_BYTES),),
        1,
        settings.environment(),
        PROBE_SECONDS,
        program=program,
    )
    try:
        yield agent
    finally:
        agent.close()
