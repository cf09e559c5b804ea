"""Runs as a process of its own: an engine on "another host", which writes one chain.

`python -m tests.helpers.remote_engine GRPC_ADDRESS CHAIN BLOCKS`, with EMBERKV_FAULTS as wanted.
Prints "writing", then "wrote N" or the name of the error, then waits for its stdin to close.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from client_sdk import faults
from client_sdk.remote_client import Piece, RemoteClient
from client_sdk.remote_pool import RemotePool
from client_sdk.session import RemoteAddress
from client_sdk.transport.memory import HostMemory
from client_sdk.transport.ucx_settings import Rdma, UcxSettings
from emberkv_proto.errors import EmberError
from emberkv_proto.hashing import block_hashes
from emberkv_proto.layout import Group, GroupKind, KvLayout, Namespace
from emberkv_proto.types import BlockHash
from tests.helpers.anonymous_pool import AnonymousPool

ROOT = Path(__file__).resolve().parents[2]
PART_BYTES = 1 << 20
PIECES = 4
"""Of a block, scattered over the memory."""
PIECE_BYTES = PART_BYTES // PIECES
BLOCK_TOKENS = 4
SETTINGS = UcxSettings(rdma=Rdma.OFF, reading_agents=1)
NAMESPACE = Namespace(
    "large",
    "w1",
    "float32",
    KvLayout("float32", 1, 1, 8).fingerprint,
    BLOCK_TOKENS,
    (Group(GroupKind.FULL, 1, PART_BYTES),),
)


def chain(number: int, blocks: int) -> list[BlockHash]:
    tokens = [number, *range(1, blocks * BLOCK_TOKENS)]
    return block_hashes(NAMESPACE.id, tokens, BLOCK_TOKENS)


def payload(block_hash: BlockHash) -> bytes:
    seed = int.from_bytes(block_hash[:8], "little")
    return np.random.default_rng(seed).bytes(PART_BYTES)


def scattered(blocks: int) -> list[list[Piece]]:
    """Pieces of blocks as pages of layers lie: piece p of all blocks is in one stretch."""
    return [
        [Piece((p * blocks + block) * PIECE_BYTES, PIECE_BYTES) for p in range(PIECES)]
        for block in range(blocks)
    ]


def fill(view: memoryview, pieces: Sequence[Piece], content: bytes) -> None:
    for number, piece in enumerate(pieces):
        view[piece.offset : piece.offset + piece.length] = content[
            number * PIECE_BYTES : (number + 1) * PIECE_BYTES
        ]


def gather(view: memoryview, pieces: Sequence[Piece]) -> bytes:
    return b"".join(view[p.offset : p.offset + p.length] for p in pieces)


@dataclass(frozen=True)
class EngineProcess:
    process: subprocess.Popen[str]

    def line(self) -> str:
        """The next that it says."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def signal(self, number: int) -> None:
        """To it and its agents."""
        os.killpg(self.process.pid, number)


@contextmanager
def remote_engine(
    address: str, number: int, blocks: int, fault_text: str
) -> Iterator[EngineProcess]:
    """An engine that is about to write chain `number`; killed at the end."""
    command = [sys.executable, "-m", "tests.helpers.remote_engine", address, str(number)]
    with subprocess.Popen(
        [*command, str(blocks)],
        cwd=ROOT,
        env={**os.environ, faults.VARIABLE: fault_text},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield EngineProcess(process)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def main() -> None:
    address, number, blocks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    faults.arm_from(os.environ)
    hashes, pieces = chain(number, blocks), scattered(blocks)
    memory = AnonymousPool(blocks * PART_BYTES)
    for block_hash, own in zip(hashes, pieces, strict=True):
        fill(memory.view, own, payload(block_hash))
    pool = RemotePool([HostMemory(memory.descriptor, blocks * PART_BYTES)], SETTINGS)
    client = RemoteClient(RemoteAddress(address), NAMESPACE, pool, view=memory.view)
    client.session.connect()
    print("writing", flush=True)
    try:
        print("wrote", client.put(hashes, pieces).committed_blocks, flush=True)
    except EmberError as error:
        print(type(error).__name__, flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
