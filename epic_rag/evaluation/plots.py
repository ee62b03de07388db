"""Pictures of an evaluation: quality over cost with the Pareto front, and answers found by depth and length."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from epic_rag.errors import MissingDependencyError
from epic_rag.evaluation.intervals import Interval
from epic_rag.evaluation.records import ExampleResult
from epic_rag.evaluation.summary import ArmSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "DARK",
    "LIGHT",
    "Theme",
    "needle_map",
    "pareto_front",
    "quality_over_cost",
    "require_matplotlib",
    "style_axis",
]

# Apart from each other for most kinds of colour vision, and legible on white and on near-black.
_COLOURS = ("#3b82e0", "#e07b27", "#2e9e63", "#9a66d8", "#d9485c", "#1fa3a8", "#cf5fa8", "#a08a1e", "#7a6a5c")
_FULL = "#8a9099"
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DPI = 144
_COLUMNS = 4


@dataclass(frozen=True)
class Theme:
    """Colours of a picture's paper and ink."""

    paper: str
    ink: str
    grid: str


LIGHT = Theme("#ffffff", "#22262d", "#dfe3e8")
DARK = Theme("#15181d", "#e4e7eb", "#343a43")


def require_matplotlib(need: str = "the report's pictures need", option: str = "--html") -> None:
    """Fail early, before hours of measuring, where there is nothing to draw with.

    Parameters
    ----------
    need, option
        What cannot be drawn, and the option that asked for it; for the message.

    Raises
    ------
    MissingDependencyError
        If matplotlib is not installed; names the command.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f"{need} matplotlib: pip install 'epic-rag[eval]', or leave {option} out."
        ) from error


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other beats in both coordinates, by rising first one; smaller is better."""
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda i: points[i]):
        if np.isfinite(points[index]).all() and (not front or points[index][1] < points[front[-1]][1]):
            front.append(index)
    return front


def quality_over_cost(arms: Sequence[ArmSummary], theme: Theme = LIGHT) -> bytes:
    """Draw KL and the share of right answers kept over the share of rows computed; a PNG."""
    from matplotlib.lines import Line2D

    figure, axes = _figure(theme, 1, 2, 11.5, 5.1)
    left, right = axes[0]
    policies = [p for p in dict.fromkeys(a.policy for a in arms) if p != "full"]
    contexts = [c for c in dict.fromkeys(a.compiled for a in arms) if c]
    colours = {"full": _FULL, **{p: _COLOURS[i % len(_COLOURS)] for i, p in enumerate(policies)}}
    markers = {"": "*", **{c: _MARKERS[i % len(_MARKERS)] for i, c in enumerate(contexts)}}
    for axis, kept in ((left, False), (right, True)):
        _panel(axis, arms, colours, markers, contexts, theme, kept=kept)
    left.set_title("Distance from full computation", loc="left")
    left.set_ylabel("KL(full ‖ linked), nats per token")
    left.set_ylim(bottom=-0.05 * left.get_ylim()[1])
    total = arms[0].right if arms else 0
    right.set_title(f"Right answers kept (of the {total} that full gets right)", loc="left")
    right.set_ylabel("share kept")
    right.set_ylim(-0.04, 1.06)
    right.yaxis.set_major_formatter("{x:.0%}")
    ink: dict[str, Any] = {"color": theme.ink, "markersize": 8}
    policy_handles = [
        Line2D([], [], color=colours[p], marker="o", linestyle="", markersize=8, label=p) for p in policies
    ]
    policy_handles.append(Line2D([], [], color=_FULL, marker="*", linestyle="", markersize=12, label="full"))
    other_handles = [
        Line2D([], [], marker=markers[c], linestyle="", fillstyle="none", label=c, **ink) for c in contexts
    ]
    other_handles.append(Line2D([], [], linestyle=":", linewidth=1.4, label="Pareto front", **ink))
    for handles, side in ((policy_handles, left), (other_handles, right)):
        legend = figure.legend(
            handles=handles,
            title="policy" if side is left else "compile context",
            loc="outside lower left" if side is left else "outside lower right",
            ncols=min(len(handles), 3),
            frameon=False,
            labelcolor=theme.ink,
            fontsize=10,
            alignment="left",
        )
        legend.get_title().set_color(theme.ink)
    return _png(figure)


def _panel(
    axis: Axes,
    arms: Sequence[ArmSummary],
    colours: dict[str, str],
    markers: dict[str, str],
    contexts: list[str],
    theme: Theme,
    *,
    kept: bool,
) -> None:
    middle = (len(contexts) - 1) / 2
    points = []
    for arm in arms:
        value = arm.kept if kept else arm.kl
        # Contexts of one policy cost the same: set side by side, they do not hide each other.
        nudge = 1.06 ** (contexts.index(arm.compiled) - middle) if arm.compiled else 1.0
        x = arm.rows_share * nudge
        points.append((x, value.mean))
    cost = [(arm.rows_share, -y if kept else y) for arm, (_, y) in zip(arms, points, strict=True)]
    front = pareto_front(cost)
    for number, (arm, (x, _)) in enumerate(zip(arms, points, strict=True)):
        edge = theme.ink if number in front else theme.paper
        _point(axis, x, arm.kept if kept else arm.kl, colours[arm.policy], markers[arm.compiled], edge)
    axis.plot(
        [points[i][0] for i in front],
        [points[i][1] for i in front],
        color=theme.ink,
        linestyle=":",
        linewidth=1.4,
        drawstyle="steps-post",
        zorder=2,
    )
    axis.set_xscale("log")
    lowest = min((x for x, _ in points), default=0.01)
    axis.set_xlim(lowest * 0.7, 1.4)
    ticks = [t for t in (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if t >= lowest * 0.7]
    axis.set_xticks(ticks, [f"{t:.1%}" if t < 0.01 else f"{t:.0%}" for t in ticks])
    axis.minorticks_off()
    axis.set_xlabel("share of the prompt's rows computed")


def _point(axis: Axes, x: float, value: Interval, colour: str, marker: str, edge: str) -> None:
    if not np.isfinite(value.mean):
        return
    spread = [[max(0.0, value.mean - value.low)], [max(0.0, value.high - value.mean)]]
    axis.errorbar(
        x,
        value.mean,
        yerr=spread,
        color=colour,
        marker=marker,
        markersize=15 if marker == "*" else 8.5,
        markeredgecolor=edge,
        markeredgewidth=1.2,
        elinewidth=1.3,
        capsize=2.5,
        zorder=4 if marker == "*" else 3,
    )


def needle_map(results: Sequence[ExampleResult], theme: Theme = LIGHT) -> bytes | None:
    """Draw each arm's mean score by depth and length; a PNG, or None if the examples have neither."""
    cells: dict[str, dict[tuple[str, str], list[float]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        if {"depth", "length"} <= result.group.keys():
            for arm in result.arms:
                if arm.score is not None:
                    cells[arm.label][result.group["depth"], result.group["length"]].append(arm.score)
    if not cells:
        return None
    depths = sorted({d for found in cells.values() for d, _ in found}, key=float)
    lengths = sorted({n for found in cells.values() for _, n in found}, key=float)
    columns = min(_COLUMNS, len(cells))
    rows = -(-len(cells) // columns)
    figure, axes = _figure(theme, rows, columns, 1.2 + 2.8 * columns, 0.9 + 2.6 * rows)
    panels = axes.flatten()
    for panel in panels[len(cells) :]:
        panel.set_axis_off()
    for number, (panel, (label, found)) in enumerate(zip(panels, cells.items(), strict=False)):
        grid = np.array([[np.mean(found.get((d, n)) or [np.nan]) for n in lengths] for d in depths])
        image = panel.imshow(grid, cmap="viridis", vmin=0, vmax=1, aspect="auto")
        for (i, j), value in np.ndenumerate(grid):
            empty = np.isnan(value)
            colour = theme.ink if empty else "#ffffff" if value < 0.6 else "#101418"
            panel.text(j, i, "–" if empty else f"{value:.0%}", ha="center", va="center", color=colour, fontsize=9)
        panel.set_title(label, fontsize=10, loc="left")
        panel.set_xticks(range(len(lengths)), lengths)
        panel.set_yticks(range(len(depths)), depths)
        panel.grid(False)
        if number % columns == 0:
            panel.set_ylabel("depth (0 = first)")
        if number >= len(cells) - columns:
            panel.set_xlabel("length in tokens")
    bar = figure.colorbar(image, ax=axes, format="{x:.0%}", aspect=36)
    bar.ax.tick_params(colors=theme.ink)
    bar.outline.set_edgecolor(theme.grid)
    bar.set_label("needles found", color=theme.ink)
    return _png(figure)


def _figure(theme: Theme, rows: int, columns: int, width: float, height: float) -> tuple[Figure, np.ndarray[Any, Any]]:
    # Without pyplot: no global state, no window system.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor=theme.paper)
    axes: np.ndarray[Any, Any] = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flatten():
        axis.set_facecolor(theme.paper)
        axis.tick_params(colors=theme.ink, labelsize=9.5)
        axis.grid(True, color=theme.grid, linewidth=0.8)
        axis.set_axisbelow(True)
        for side, spine in axis.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(theme.grid)
        for text in (axis.title, axis._left_title, axis.xaxis.label, axis.yaxis.label):
            text.set_color(theme.ink)
    return figure, axes


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI, facecolor=figure.get_facecolor())
    return buffer.getvalue()


def style_axis(axis: Axes, theme: Theme, *, lines: Literal["both", "x", "y"] = "both") -> None:
    """Give an axis a theme's colours, with grid lines and without a frame."""
    axis.set_facecolor(theme.paper)
    axis.tick_params(colors=theme.ink, labelsize=9.5)
    axis.grid(True, axis=lines, color=theme.grid, linewidth=0.8)
    axis.set_axisbelow(True)
    for side, spine in axis.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(theme.grid)
    for label in (axis.xaxis.label, axis.yaxis.label):
        label.set_color(theme.ink)
