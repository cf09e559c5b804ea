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

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Word = Any
"""A uint64: a key, an entry's holders, a mask."""
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


def direct(kernel: Callable[..., Any], *like: object) -> Callable[..., Any]:
    """A kernel as it is compiled for arguments of such types, called without a look at them.

    That look is half of what a call costs. Who calls it answers for the types: another array's
    memory would be read as if it were of this type. That it is read-only does no harm.
    """
    entry = cast(Any, kernel).compile(tuple(map(numba.typeof, like)))
    return cast(Callable[..., Any], entry)


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


def _line(context: Any, builder: Any, signature: Any, values: Any) -> Any:
    """The address of array[place] as bytes."""
    data = context.make_array(signature.args[0])(context, builder, values[0]).data
    return builder.bitcast(builder.gep(data, [values[1]]), ir.IntType(8).as_pointer())


def _equal_bytes(typing_context: Any, array: Any, place: Any, byte: Any) -> Any:
    """Which of the sixteen bytes from array[place] on are `byte`: bit n for byte n."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        sixteen = ir.VectorType(ir.IntType(8), 16)
        line = _line(context, builder, signature, values)
        loaded = builder.load(builder.bitcast(line, sixteen.as_pointer()))
        loaded.align = 4
        wanted = builder.trunc(values[2], ir.IntType(8))
        nothing = ir.Constant(sixteen, ir.Undefined)
        first = builder.insert_element(nothing, wanted, ir.IntType(32)(0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), 16), [0] * 16)
        in_all = builder.shuffle_vector(first, nothing, zeros)
        truths = builder.icmp_unsigned("==", loaded, in_all)
        return builder.zext(builder.bitcast(truths, ir.IntType(16)), ir.IntType(64))

    return numba.types.uint64(array, numba.types.int64, numba.types.uint64), generate


def _put_byte(typing_context: Any, array: Any, place: Any, number: Any, byte: Any) -> Any:
    """Write byte `number` of those from array[place] on."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        line = _line(context, builder, signature, values)
        written = builder.trunc(values[3], ir.IntType(8))
        builder.store(written, builder.gep(line, [values[2]]))
        return context.get_dummy_value()

    int64, uint64 = numba.types.int64, numba.types.uint64
    return numba.types.void(array, int64, int64, uint64), generate


def _pointer(word_type: Any) -> Callable[..., Any]:
    def to_pointer(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

        return cast(Any, numba.types).CPointer(word_type)(numba.types.int64), generate

    return to_pointer


def _prefetch(typing_context: Any, array: Any, place: Any) -> Any:
    """Ask the processor for array[place], without waiting for it."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        address = _line(context, builder, signature, values)
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address.type, number, number, number])
        hint = builder.module.declare_intrinsic("llvm.prefetch", [address.type], kind)
        # for reading; keep it in all caches; it is data
        builder.call(hint, [address, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return numba.types.void(array, place), generate


fetch = cast(Callable[[U32 | U64, Int], None], intrinsic(_prefetch))
lowest_bit = cast(Callable[[Word], Int], intrinsic(_lowest_bit))
equal_bytes = cast(Callable[[U32, Int, Word], Word], intrinsic(_equal_bytes))
put_byte = cast(Callable[[U32, Int, Int, Word], None], intrinsic(_put_byte))
u32_pointer = cast(Callable[[Int], Any], intrinsic(_pointer(numba.types.uint32)))
u64_pointer = cast(Callable[[Int], Any], intrinsic(_pointer(numba.types.uint64)))
i64_pointer = cast(Callable[[Int], Any], intrinsic(_pointer(numba.types.int64)))
carray = cast(Any, numba).carray
"""carray(pointer, shape): the array that begins there. To mypy numba does not export it."""
