"""madvise and mbind of a mapping, by the C library. They let other threads run meanwhile.

`mmap.madvise` keeps the interpreter lock, and there is no mbind in the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
from collections.abc import Iterator, Sequence

MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23
"""Linux 5.14; EINVAL before."""
MPOL_BIND = 2
MPOL_INTERLEAVE = 3
_MBIND_NUMBERS = {"x86_64": 237, "aarch64": 235}
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.syscall.restype = ctypes.c_long


@contextlib.contextmanager
def address_of(mapping: mmap.mmap) -> Iterator[int]:
    """Where the mapping begins; it cannot be closed inside the block."""
    first = ctypes.c_char.from_buffer(mapping)
    try:
        yield ctypes.addressof(first)
    finally:
        del first


def advise(address: int, length: int, advice: int) -> None:
    """Raises OSError as madvise does; EFAULT where a write would have got a SIGBUS."""
    if _libc.madvise(address, length, advice) != 0:
        raise _error("madvise")


def bind(address: int, length: int, mode: int, nodes: Sequence[int]) -> None:
    """Set the memory policy of a range whose pages are not there yet. Raises OSError."""
    number = _MBIND_NUMBERS.get(platform.machine())
    if number is None:
        raise OSError(f"mbind is not known for {platform.machine()}")
    words = (ctypes.c_ulong * (max(nodes) // _WORD_BITS + 1))()
    for node in nodes:
        words[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    result = _libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(length),
        ctypes.c_ulong(mode),
        words,
        ctypes.c_ulong(_WORD_BITS * len(words) + 1),  # the kernel counts one less
        ctypes.c_ulong(0),
    )
    if result != 0:
        raise _error("mbind")


def _error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
