"""Lets SGLang run where there is no GPU; Python imports this first in every process of a test.

SGLang 0.5.23 names torchvision, torchaudio, Triton and a vLLM operator module at import, and copies
pages between its two pools with CUDA kernels only. Here the names are empty modules (Triton, which
compiles for GPUs only, is a gigabyte), and the two copies are index copies of torch. Beside the
memory that it keeps free, nothing else of it is touched.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

HOST_POOL = "sglang.srt.mem_cache.pool_host.mha"
HOST_MEMORY = "sglang.srt.mem_cache.pool_host.base"
KEPT_FREE_BYTES = 256 << 20
"""Of the host's memory; SGLang keeps 10 GiB, which a test machine may not have."""
NAMES_ONLY = frozenset({"datasets", "torchvision", "torchaudio", "triton"})
OPERATORS = "vllm._custom_ops"


class _NamesMeta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _named(name)


def _named(name: str) -> type:
    """A class that takes any arguments and whose attributes are such classes again."""
    return _NamesMeta(name, (), {"__init__": _take_all, "__call__": _return_self})


def _take_all(self: Any, *args: Any, **kwargs: Any) -> None:
    """Of a decorator: the kernel that it is given is never run."""


def _return_self(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self


def _cdiv(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("a CUDA operator was called on a CPU")


class EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of which only the names are needed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        top = name.partition(".")[0]
        if top in NAMES_ONLY or name in ("vllm", OPERATORS):
            return importlib.machinery.ModuleSpec(name, self, is_package=name != OPERATORS)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        if spec.name.partition(".")[0] in NAMES_ONLY:
            module.__dict__["__version__"] = "0.0"
            module.__dict__["__getattr__"] = self._attribute
            if spec.name == "triton":
                module.__dict__.update(cdiv=_cdiv, next_power_of_2=_next_power_of_2)
        elif spec.name == OPERATORS:
            for operator in ("fused_add_rms_norm", "rms_norm", "rotary_embedding"):
                setattr(module, operator, _refuse)
        return module

    @staticmethod
    def _attribute(name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _named(name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing: the module is complete."""


class HostPoolCopies(importlib.abc.MetaPathFinder):
    """Gives the host pool of keys and values copies that need no CUDA, once it is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != HOST_POOL:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def run_and_change(module: types.ModuleType) -> None:
            run(module)
            sys.modules[HOST_MEMORY].__dict__["HICACHE_HOST_MEMORY_RESERVE_BYTES"] = KEPT_FREE_BYTES
            _change(module.MHATokenToKVPoolHost)

        spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec


def _change(host_pool: Any) -> None:
    construct = host_pool.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        construct(self, *args, **{**kwargs, "pin_memory": False})

    def back_up(self: Any, _pool: Any, host: Any, device: Any, _io: Any) -> None:
        for layer in range(self.layer_num):
            self.k_data_refs[layer][host] = self.device_k_buffers[layer][device]
            self.v_data_refs[layer][host] = self.device_v_buffers[layer][device]

    def load(
        self: Any,
        _pool: Any,
        host: Any,
        device: Any,
        layer: int,
        _io: Any,
        *,
        is_draft: bool = False,
    ) -> None:
        self.device_k_buffers[layer][device] = self.k_data_refs[layer][host]
        self.device_v_buffers[layer][device] = self.v_data_refs[layer][host]

    host_pool.__init__ = __init__
    host_pool.backup_from_device_all_layer = back_up
    host_pool.load_to_device_per_layer = load


sys.meta_path.insert(0, HostPoolCopies())
sys.meta_path.append(EmptyModules())
