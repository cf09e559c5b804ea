"""On which memory nodes the pool's pages lie. Reading the node tree is pure."""

from __future__ import annotations

import logging
from pathlib import Path

from emberkv_proto.errors import PreflightError
from store_daemon.tiers.memory_calls import MPOL_BIND, MPOL_INTERLEAVE, bind

log = logging.getLogger(__name__)
NODES = Path("/sys/devices/system/node")


def memory_nodes(root: Path = NODES) -> tuple[int, ...]:
    """Numbers of the nodes that have memory; () on a kernel that does not tell."""
    try:
        return parse_list((root / "has_memory").read_text())
    except (OSError, ValueError):
        return ()


def parse_list(text: str) -> tuple[int, ...]:
    """The numbers of a kernel list such as "0-2,5". Raises ValueError when it is none."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        numbers += range(int(first), int(last if dash else first) + 1)
    return tuple(numbers)


def chosen_nodes(wanted: str | int, nodes: tuple[int, ...]) -> tuple[int, ...]:
    """Nodes to bind the pool to; () to leave it to the kernel.

    "auto" spreads the pool over all nodes where there are several, for engines of every node use
    it. Raises PreflightError when the wanted node has no memory.
    """
    if isinstance(wanted, int):
        if wanted not in nodes:
            raise PreflightError(
                f"dram.numa_node {wanted} has no memory here; nodes with memory:"
                f" {', '.join(map(str, nodes)) or 'not known'}"
            )
        return (wanted,) if len(nodes) > 1 else ()
    return nodes if len(nodes) > 1 else ()


def place(address: int, length: int, wanted: str | int, nodes: tuple[int, ...]) -> None:
    """Bind a mapping without pages to these nodes.

    Raises PreflightError when that is refused, unless it was left to us ("auto").
    """
    if not nodes:
        log.debug("pool: one memory node, nothing to bind")
        return
    mode = MPOL_BIND if len(nodes) == 1 else MPOL_INTERLEAVE
    try:
        bind(address, length, mode, nodes)
    except OSError as error:
        if wanted == "auto":
            log.warning("pool is not spread over memory nodes %s: %s", nodes, error)
            return
        raise PreflightError(
            f"the pool cannot be bound to memory nodes {nodes}: {error.strerror or error};"
            " check cpuset.mems and seccomp, or set dram.numa_node: auto"
        ) from None
    log.info("pool bound to memory nodes %s", ", ".join(map(str, nodes)))
