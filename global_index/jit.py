"""How kernels are compiled, and what they all need."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.extending import intrinsic

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Word = Any
"""A uint64: a key, a slot, an entry's holders, a mask."""
Int = Any
"""An int64: a slot, a place, a row, a holder, a count. (To mypy numpy's scalars are no `int`.)"""
Flag = Any
"""A truth value."""
F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """A kernel that Python calls, cached on disk if a directory for that can be written."""
    try:
        return cast(F, numba.njit(nogil=True, cache=True)(function))
    except RuntimeError as error:
        logging.getLogger(__name__).warning(
            "kernels are compiled anew at each start (%s); set NUMBA_CACHE_DIR", error
        )
        return part(function)


def part(function: F) -> F:
    """What only kernels call. It is compiled into each of them, mostly in line."""
    return cast(F, numba.njit(nogil=True)(function))


def u64(number: int) -> Word:
    """A constant of a kernel."""
    return np.uint64(number)


_ONE, _TOP_SIX = u64(1), u64(58)
_DE_BRUIJN = 0x03F79D71B4CB0A89
_MULTIPLIER = u64(_DE_BRUIJN)
_BIT_NUMBER = np.zeros(64, dtype=np.int64)
for _n in range(64):
    _BIT_NUMBER[((_DE_BRUIJN << _n) & (2**64 - 1)) >> 58] = _n


@part
def lowest_bit(mask: Word) -> Int:
    """Number of the lowest set bit; mask is not 0."""
    return _BIT_NUMBER[((mask & (~mask + _ONE)) * _MULTIPLIER) >> _TOP_SIX]


def _prefetch(typing_context: Any, array: Any, place: Any) -> Any:
    """Ask the processor for array[place], without waiting for it."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, values[0]).data
        address = builder.bitcast(builder.gep(data, [values[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address.type, number, number, number])
        hint = builder.module.declare_intrinsic("llvm.prefetch", [address.type], kind)
        # for reading; keep it in all caches; it is data
        builder.call(hint, [address, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return numba.types.void(array, place), generate


fetch = cast(Callable[[U64, Int], None], intrinsic(_prefetch))
