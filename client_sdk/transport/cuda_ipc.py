"""GPU memory shared between processes through the CUDA driver, without any CUDA package.

Not verified on a GPU (docs/rdma.md says what to run there).
"""

from __future__ import annotations

import ctypes

from client_sdk.transport.memory import IPC_HANDLE_BYTES, DeviceMemory
from emberkv_proto.errors import UnavailableError

_DRIVER = "libcuda.so.1"
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * IPC_HANDLE_BYTES),)


def export(address: int, length: int, device: int) -> DeviceMemory:
    """Name this process's device memory for others. It stays this process's to free.

    Raises UnavailableError: no driver, or memory that CUDA cannot share: what comes from PyTorch's
    allocator with expandable_segments is of that kind.
    """
    driver = _driver()
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    _check(
        driver.cuMemGetAddressRange_v2(
            ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
        ),
        "cuMemGetAddressRange",
    )
    _check(
        driver.cuIpcGetMemHandle(ctypes.byref(handle), base),
        "cuIpcGetMemHandle (allocate the KV pages without expandable_segments)",
    )
    return DeviceMemory(device, bytes(handle), address - base.value, length)


def open_memory(memory: DeviceMemory) -> int:
    """Its address in this process, for as long as the process lives. Raises UnavailableError."""
    driver = _driver()
    device, context, base, handle = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64(), _Handle()
    ctypes.memmove(ctypes.byref(handle), memory.handle, IPC_HANDLE_BYTES)
    _check(driver.cuDeviceGet(ctypes.byref(device), memory.device), "cuDeviceGet")
    _check(
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain"
    )
    _check(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    driver.cuIpcOpenMemHandle_v2.argtypes = (ctypes.c_void_p, _Handle, ctypes.c_uint)
    _check(
        driver.cuIpcOpenMemHandle_v2(ctypes.byref(base), handle, _LAZY_PEER_ACCESS),
        "cuIpcOpenMemHandle",
    )
    return base.value + memory.offset


def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError as error:
        raise UnavailableError(f"no CUDA driver in this process: {error}") from None
    _check(driver.cuInit(0), "cuInit")
    return driver


def _check(status: int, call: str) -> None:
    if status:
        raise UnavailableError(f"{call} failed with CUDA status {status}")
