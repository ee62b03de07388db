"""Picture of a store benchmark: the rate of puts as the store grows, and how long look-ups take."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from epic_rag.evaluation.plots import LIGHT, Theme, style_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_store"]

_COLOURS = ("#3b82e0", "#e07b27", "#2e9e63", "#9a66d8", "#d9485c", "#1fa3a8")
_DPI = 144


def draw_store(result: Mapping[str, Any], theme: Theme = LIGHT) -> bytes | None:
    """Draw a result of :func:`~epic_rag.benchmarks.store.bench_store`; a PNG, or None if it holds nothing to draw."""
    # Without pyplot: no global state, no window system.
    from matplotlib.figure import Figure

    spans = result.get("ingest", {}).get("spans", [])
    lookups = result.get("open", {}).get("lookups", {})
    if not spans:
        return None
    figure = Figure(figsize=(12, 4.2), layout="constrained", facecolor=theme.paper)
    left, right = figure.subplots(1, 2)
    for axis in (left, right):
        style_axis(axis, theme)
    _rates(left, spans, theme)
    if lookups:
        _latencies(right, lookups, theme)
    else:
        right.set_axis_off()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI, facecolor=theme.paper)
    return buffer.getvalue()


def _rates(axis: Axes, spans: list[Mapping[str, float]], theme: Theme) -> None:
    reached = [span["first"] + span["chunks"] for span in spans]
    axis.plot(reached, [span["rate"] for span in spans], color=_COLOURS[0], marker="o", linewidth=1.8)
    axis.set_ylim(bottom=0)
    axis.set_xlim(left=0)
    for scale in (axis.xaxis, axis.yaxis):
        scale.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.set_xlabel("chunks in the store")
    axis.set_title("Chunks put a second", loc="left", color=theme.ink)


def _latencies(axis: Axes, lookups: Mapping[str, Mapping[str, Any]], theme: Theme) -> None:
    for colour, (kind, figures) in zip(_COLOURS, lookups.items(), strict=False):
        share = np.linspace(0, 100, len(figures["sorted"]))
        axis.plot(1000 * np.asarray(figures["sorted"]), share, color=colour, linewidth=1.8, label=kind)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_xlabel("milliseconds")
    axis.set_title("Look-ups that are done within, %", loc="left", color=theme.ink)
    axis.legend(frameon=False, labelcolor=theme.ink, loc="lower right")
