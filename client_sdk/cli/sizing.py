"""How large a cache a model's traffic wants: pure figures for `emberkv size`.

Bytes of KV a token: Kwon et al. 2023 (arXiv 2309.06180, section 3) for K and V, DeepSeek-V2 (arXiv
2405.04434, section 2.1) for MLA. Hit rates: the tables of docs/eviction.md, over the time that a
cache spans: how many seconds of arriving prompt tokens fit into it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from emberkv_proto.errors import InvalidRequestError

VALUE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "fp8": 1,
    "int8": 1,
}
MIB, GIB = 1 << 20, 1 << 30
MAX_COUNT = 1 << 20
DRAM_BLOCK_BYTES = 820
"""Of the daemon's memory, for each block in DRAM and on SSD: docs/kubernetes.md."""
SSD_BLOCK_BYTES = 132
BASE_OVERHEAD_BYTES = GIB
"""Process, RocksDB's caches, and room to breathe."""
INDEX_BLOCK_BYTES = 64
"""Of a router's memory: 32 at most, twice while the table grows."""
INDEX_BASE_BYTES = GIB
MAX_INDEX_BLOCKS = 1 << 31
"""The most that `index.capacity_blocks` takes; more rows are shared through Redis."""
SHARED_ROUTER_BLOCKS = 1 << 29
"""Rows that one router then keeps of the daemons that it follows: 32 GiB."""
REDIS_ROW_BYTES = 130
REDIS_POD_BYTES = 32 * GIB
RESERVE = 1.25
"""Shares are not even, and Redis wants room beside its rows."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What KV a token of a model takes, over all ranks."""

    name: str
    layers: int
    values_per_layer: int
    """K and V of all heads, or MLA's one compressed vector."""
    value_bytes: int
    is_upper_bound: bool = False
    """Some layers keep a window or a state instead of every token."""

    @property
    def token_bytes(self) -> int:
        return self.layers * self.values_per_layer * self.value_bytes


@dataclass(frozen=True, slots=True)
class Point:
    """A cache that spans `seconds` of arriving tokens finds `percent` of the blocks."""

    seconds: float
    percent: float


@dataclass(frozen=True, slots=True)
class Curve:
    """Measured hit rates of a trace with `lru`; `most_percent` is what any cache could find."""

    trace: str
    points: tuple[Point, ...]
    most_percent: float

    def percent(self, seconds: float) -> float:
        """Between the points by the logarithm of time, below the first in proportion.

        Beyond the last it stays: more was not measured.
        """
        first, last = self.points[0], self.points[-1]
        if seconds <= first.seconds:
            return first.percent * max(0.0, seconds) / first.seconds
        for left, right in zip(self.points, self.points[1:], strict=False):
            if seconds <= right.seconds:
                part = math.log(seconds / left.seconds) / math.log(right.seconds / left.seconds)
                return left.percent + part * (right.percent - left.percent)
        return last.percent

    def seconds(self, percent: float) -> float | None:
        """What a cache must span for that hit rate; None: more than was measured."""
        first, last = self.points[0], self.points[-1]
        if percent <= first.percent:
            return first.seconds * max(0.0, percent) / first.percent
        if percent > last.percent:
            return None
        for left, right in zip(self.points, self.points[1:], strict=False):
            if percent <= right.percent:
                part = (percent - left.percent) / (right.percent - left.percent)
                return left.seconds * math.pow(right.seconds / left.seconds, part)
        return last.seconds


def _curve(
    trace: str, blocks: int, seconds: float, rates: Mapping[int, float], most: float
) -> Curve:
    """From docs/eviction.md's columns, and the trace's block references and length."""
    points = tuple(Point(size * seconds / blocks, rate) for size, rate in rates.items())
    return Curve(trace, points, most)


CURVES = (
    _curve(
        "conversation",
        288_500,
        3_537.0,
        {3_819: 8.1, 7_639: 17.3, 15_279: 26.4, 30_559: 33.8},
        39.0,
    ),
    _curve(
        "synthetic", 121_877, 1_022.0, {3_819: 33.4, 7_639: 52.4, 15_279: 70.8, 30_559: 82.7}, 85.1
    ),
)


@dataclass(frozen=True, slots=True)
class Expected:
    trace: str
    percent: float
    most_percent: float
    is_beyond: bool
    """The cache spans more than was measured; the rate is at least that."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """One node's tiers and what they come to. Sizes in bytes."""

    shape: ModelShape
    block_tokens: int
    pool_bytes: int
    ssd_bytes: int
    nodes: int
    tokens_per_second: float

    @property
    def block_bytes(self) -> int:
        return self.shape.token_bytes * self.block_tokens

    @property
    def pool_blocks(self) -> int:
        return self.pool_bytes // self.block_bytes

    @property
    def ssd_blocks(self) -> int:
        return self.ssd_bytes // self.block_bytes

    @property
    def kept_tokens(self) -> int:
        """Distinct tokens on all nodes: what is in DRAM is on SSD as well (`on_commit`)."""
        return max(self.pool_blocks, self.ssd_blocks) * self.block_tokens * self.nodes

    @property
    def span_seconds(self) -> float:
        return self.kept_tokens / self.tokens_per_second

    @property
    def overhead_bytes(self) -> int:
        """Memory of a daemon beside its pool."""
        blocks = self.pool_blocks * DRAM_BLOCK_BYTES + self.ssd_blocks * SSD_BLOCK_BYTES
        return BASE_OVERHEAD_BYTES + blocks

    @property
    def index_blocks(self) -> int:
        return (self.pool_blocks + self.ssd_blocks) * self.nodes

    @property
    def is_shared(self) -> bool:
        """No one router can keep all rows."""
        return self.index_blocks > MAX_INDEX_BLOCKS

    @property
    def routers(self) -> int:
        """How many the rows want."""
        return math.ceil(self.index_blocks / SHARED_ROUTER_BLOCKS) if self.is_shared else 1

    @property
    def router_blocks(self) -> int:
        """What each router keeps."""
        if not self.is_shared:
            return max(1024, self.index_blocks)
        return math.ceil(self.index_blocks / self.routers * RESERVE)

    @property
    def router_bytes(self) -> int:
        return INDEX_BASE_BYTES + self.router_blocks * INDEX_BLOCK_BYTES

    def expected(self) -> list[Expected]:
        return [
            Expected(
                curve.trace,
                curve.percent(self.span_seconds),
                curve.most_percent,
                self.span_seconds > curve.points[-1].seconds,
            )
            for curve in CURVES
        ]

    def values(self) -> dict[str, Any]:
        """The chart's values for it."""
        memory = f"{math.ceil(self.router_bytes / MIB)}Mi"
        return {
            "store": {
                "pool": {"capacityMi": self.pool_bytes // MIB},
                "overheadMi": math.ceil(self.overhead_bytes / MIB),
                "ssd": {"capacityMi": self.ssd_bytes // MIB},
            },
            "router": {
                **({"replicas": self.routers} if self.is_shared else {}),
                "config": {"index": {"capacity_blocks": self.router_blocks}},
                "resources": {"requests": {"memory": memory}, "limits": {"memory": memory}},
            },
            **({"redis": {"server": self._redis_server()}} if self.is_shared else {}),
        }

    def _redis_server(self) -> dict[str, Any]:
        wanted = self.index_blocks * REDIS_ROW_BYTES * RESERVE
        pods = min(64, max(3, math.ceil(wanted / REDIS_POD_BYTES)))
        return {"enabled": True, "replicas": pods, "maxMemoryMi": math.ceil(wanted / pods / MIB)}

    def needed(self, percent: float) -> dict[str, int | None]:
        """Bytes of KV, over all nodes, that each trace's traffic wants for a hit rate."""
        wanted = {curve.trace: curve.seconds(percent) for curve in CURVES}
        rate = self.tokens_per_second * self.shape.token_bytes
        return {
            trace: None if seconds is None else math.ceil(seconds * rate)
            for trace, seconds in wanted.items()
        }


def shape_of(config: Mapping[str, Any], name: str, dtype: str = "auto") -> ModelShape:
    """From a model's config.json. Raises InvalidRequestError that names what is missing."""
    inner = config.get("text_config")
    if isinstance(inner, dict):
        config = {**config, **inner}
    layers = _count(config, "num_hidden_layers")
    if config.get("kv_lora_rank"):
        values = _count(config, "kv_lora_rank") + _count(config, "qk_rope_head_dim")
    else:
        heads = _count(config, "num_attention_heads")
        kv_heads = _count(config, "num_key_value_heads", heads)
        hidden = _count(config, "head_dim", 0) or _count(config, "hidden_size") // heads
        values = 2 * kv_heads * hidden
    if dtype == "auto":
        dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    size = VALUE_BYTES.get(dtype)
    if size is None:
        known = ", ".join(VALUE_BYTES)
        raise InvalidRequestError(f"a KV cache of {dtype!r} is not known; give --dtype: {known}")
    kinds = config.get("layer_types")
    others = isinstance(kinds, list) and any(kind != "full_attention" for kind in kinds)
    return ModelShape(name, layers, values, size, bool(others))


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MAX_COUNT:
        raise InvalidRequestError(f"the model's config.json has no usable {key}: {value!r}")
    return value
