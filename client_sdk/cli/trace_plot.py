"""Simulated outcomes as a picture. Needs matplotlib, which is an extra."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from emberkv_proto.errors import ConfigError

if TYPE_CHECKING:
    from client_sdk.cli.trace_simulation import TraceResult

WIDTH_INCHES = 9.0
ROW_INCHES = 2.9
DOTS_PER_INCH = 110
PERCENTILES = ("p50_seconds", "p90_seconds", "p99_seconds")
SHADES = ("#f2a65a", "#d1603d", "#7d2e1f")


def require_plotting(path: Path) -> None:
    """Say what is missing before the long work, not after it.

    Raises:
        ConfigError: matplotlib is not installed, or `path` is no place for a PNG.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'emberkv[plot]'")
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot {path}: name a .png file")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: {path.parent} is no directory")


def draw(results: Sequence[TraceResult], path: Path) -> None:
    """A row for each trace: times to the first token, hits beside the oracle's, balance of work."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, ROW_INCHES * len(results)), layout="constrained")
    rows = figure.subplots(len(results), 3, squeeze=False, width_ratios=(2, 1, 1))
    for row, result in zip(rows, results, strict=True):
        outcomes = sorted(result.outcomes.items(), key=lambda pair: -pair[1].p90_seconds)
        names = [name for name, _ in outcomes]
        waits, hits, balance = row
        for at, (field, shade) in enumerate(zip(PERCENTILES, SHADES, strict=True)):
            places = [place + 0.27 * (1 - at) for place in range(len(names))]
            values = [getattr(item, field) for _, item in outcomes]
            waits.barh(places, values, height=0.25, color=shade, label=field[:3])
        waits.set_yticks(range(len(names)), names)
        waits.set_xscale("log")
        waits.set_title(f"{result.name}: seconds to the first token", fontsize=9)
        waits.legend(fontsize=7)
        shares = [item.oracle_share for _, item in outcomes]
        hits.barh(names, shares, color=SHADES[1])
        hits.axvline(1.0, color="black", linewidth=0.8)
        hits.set_xlim(max(0.0, min(shares) - 0.05), 1.02)
        hits.set_title("hits / oracle's", fontsize=9)
        balance.barh(names, [item.imbalance for _, item in outcomes], color=SHADES[1])
        balance.set_xlim(left=1.0)
        balance.set_title("busiest / mean work", fontsize=9)
        for panel in (hits, balance):
            panel.set_yticks(range(len(names)), [""] * len(names))
        for panel in row:
            panel.tick_params(labelsize=7)
    figure.savefig(path, dpi=DOTS_PER_INCH)
