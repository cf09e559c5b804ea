"""How kernels are compiled, and what they all need."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.extending import intrinsic

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Word = Any
"""A uint64: a key, a slot, an entry's holders, a mask."""
Int = Any
"""An int64: a slot, a place, a row, a holder, a count. (To mypy numpy's scalars are no `int`.)"""
Flag = Any
"""A truth value."""
F = TypeVar("F", bound=Callable[..., Any])


_SOURCES = ("jit", "table_state", "slots", "holder_rows", "kernels", "walk", "bucket_kernels")
_STAMP = zlib.crc32(
    b"".join(Path(__file__).with_name(f"{name}.py").read_bytes() for name in _SOURCES)
)
"""Part of every kernel's name in the cache: Numba looks for changes in a kernel's own file only."""


def compiled(function: F) -> F:
    """A kernel that Python calls, cached on disk if a directory for that can be written."""
    function.__qualname__ = f"{function.__qualname__}_{_STAMP:08x}"
    try:
        return cast(F, numba.njit(nogil=True, cache=True)(function))
    except RuntimeError as error:
        logging.getLogger(__name__).warning(
            "kernels are compiled anew at each start (%s); set NUMBA_CACHE_DIR", error
        )
        return rare_part(function)


def part(function: F) -> F:
    """What only kernels call, compiled into each of them in line."""
    return cast(F, numba.njit(nogil=True, forceinline=True)(function))


def rare_part(function: F) -> F:
    """The same, but a call: for what is long and not needed for most blocks."""
    return cast(F, numba.njit(nogil=True)(function))


def u64(number: int) -> Word:
    """A constant of a kernel."""
    return np.uint64(number)


def _lowest_bit(typing_context: Any, mask: Any) -> Any:
    """Number of the lowest set bit of a uint64; 64 when there is none."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.cttz(values[0], ir.IntType(1)(0))

    return numba.types.int64(numba.types.uint64), generate


def _eight(context: Any, builder: Any, signature: Any, values: Any) -> Any:
    """Eight words of an array, from a place on."""
    data = context.make_array(signature.args[0])(context, builder, values[0]).data
    address = builder.gep(data, [values[1]])
    eight = ir.VectorType(ir.IntType(64), 8)
    loaded = builder.load(builder.bitcast(address, eight.as_pointer()))
    loaded.align = 8
    return loaded


def _in_all(builder: Any, word: Any) -> Any:
    """A vector of eight that are this word."""
    eight = ir.VectorType(ir.IntType(64), 8)
    first = builder.insert_element(ir.Constant(eight, ir.Undefined), word, ir.IntType(32)(0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), 8), [0] * 8)
    return builder.shuffle_vector(first, ir.Constant(eight, ir.Undefined), zeros)


def _mask(builder: Any, truths: Any) -> Any:
    return builder.zext(builder.bitcast(truths, ir.IntType(8)), ir.IntType(64))


def _equal_words(typing_context: Any, array: Any, place: Any, word: Any) -> Any:
    """Which of array[place], ... array[place + 7] are `word`: bit n is set for place + n."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        loaded = _eight(context, builder, signature, values)
        truths = builder.icmp_unsigned("==", loaded, _in_all(builder, values[2]))
        return _mask(builder, truths)

    return numba.types.uint64(array, numba.types.int64, numba.types.uint64), generate


def _equal_upper(typing_context: Any, array: Any, place: Any, half: Any) -> Any:
    """The same for the upper halves of the words."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        loaded = _eight(context, builder, signature, values)
        shift = ir.Constant(loaded.type, [32] * 8)
        truths = builder.icmp_unsigned(
            "==", builder.lshr(loaded, shift), _in_all(builder, values[2])
        )
        return _mask(builder, truths)

    return numba.types.uint64(array, numba.types.int64, numba.types.uint64), generate


def _pointer(word_type: Any) -> Callable[..., Any]:
    def to_pointer(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

        return cast(Any, numba.types).CPointer(word_type)(numba.types.int64), generate

    return to_pointer


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
lowest_bit = cast(Callable[[Word], Int], intrinsic(_lowest_bit))
equal_words = cast(Callable[[U64, Int, Word], Word], intrinsic(_equal_words))
equal_upper = cast(Callable[[U64, Int, Word], Word], intrinsic(_equal_upper))
u64_pointer = cast(Callable[[Int], Any], intrinsic(_pointer(numba.types.uint64)))
i64_pointer = cast(Callable[[Int], Any], intrinsic(_pointer(numba.types.int64)))
carray = cast(Any, numba).carray
"""carray(pointer, shape): the array that begins there. To mypy numba does not export it."""
