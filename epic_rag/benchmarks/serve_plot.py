"""Picture of a serving benchmark: TTFT over the request rate, and throughput, decoding and fairness as bars."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from epic_rag.evaluation.plots import LIGHT, Theme, style_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_serve"]

# Apart from each other for most kinds of colour vision; full and prefix, the baselines, are grey.
_COLOURS = ("#3b82e0", "#e07b27", "#2e9e63", "#9a66d8", "#d9485c", "#1fa3a8", "#cf5fa8", "#a08a1e")
_BASES = {"full": "#5c626b", "prefix": "#a3a9b1"}
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_QUANTILES = ("p50", "p95", "p99")
_DPI = 144


def draw_serve(result: Mapping[str, Any], theme: Theme = LIGHT) -> bytes | None:
    """Draw a result of :func:`~epic_rag.benchmarks.serve.bench_serve`; a PNG, or None if it holds nothing to draw.

    A row of three panels (TTFT's median, 95th and 99th percentile) for each length of answer, and a row of bars.
    """
    # Without pyplot: no global state, no window system.
    from matplotlib.figure import Figure

    policies = list(result["settings"]["policies"])
    others = [p for p in policies if p not in _BASES]
    colours = {**_BASES, **{p: _COLOURS[i % len(_COLOURS)] for i, p in enumerate(others)}}
    markers = {p: _MARKERS[i % len(_MARKERS)] for i, p in enumerate(policies)}
    cells = result.get("load", [])
    lengths = sorted({c["tokens"] for c in cells})
    bars = {part: draw for part, draw in _BARS.items() if result.get(part)}
    rows = len(lengths) + bool(bars)
    if not rows:
        return None
    figure = Figure(figsize=(13, 0.6 + 3.7 * rows), layout="constrained", facecolor=theme.paper)
    axes = figure.subplots(rows, 3, squeeze=False)
    for axis in axes.flatten():
        style_axis(axis, theme, lines="y")
    for row, tokens in enumerate(lengths):
        for axis in axes[row][1:]:
            axis.sharey(axes[row][0])
        for axis, quantile in zip(axes[row], _QUANTILES, strict=True):
            found = [c for c in cells if c["tokens"] == tokens and quantile in c["ttft_s"]]
            _ttft(axis, found, quantile, colours, markers)
            axis.set_title(f"TTFT {quantile}, {tokens} output tokens", loc="left", color=theme.ink)
    if lengths:
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=len(labels), frameon=False, labelcolor=theme.ink)
    if bars:
        for axis, (part, draw) in zip(axes[-1], bars.items(), strict=False):
            draw(axis, result[part], colours, theme)
        for axis in axes[-1][len(bars) :]:
            axis.set_axis_off()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI, facecolor=theme.paper)
    return buffer.getvalue()


def _ttft(
    axis: Axes,
    cells: Sequence[Mapping[str, Any]],
    quantile: str,
    colours: Mapping[str, str],
    markers: Mapping[str, str],
) -> None:
    from matplotlib.ticker import LogLocator

    for policy in markers:
        points = sorted((c["rate"], c["ttft_s"][quantile]) for c in cells if c["policy"] == policy)
        if points:
            axis.plot(
                [rate for rate, _ in points],
                [seconds for _, seconds in points],
                color=colours[policy],
                marker=markers[policy],
                linewidth=1.8,
                markersize=6,
                label=policy,
            )
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g} s" if value >= 1 else f"{1000 * value:g} ms")
    axis.set_xlabel("requests a second offered")
    rates = sorted({c["rate"] for c in cells})
    axis.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axis.minorticks_off()


def _saturation(axis: Axes, table: Mapping[str, Any], colours: Mapping[str, str], theme: Theme) -> None:
    names = list(table)
    rps = [table[n]["rps"] for n in names]
    drawn = axis.barh(names, rps, color=[colours[n] for n in names], height=0.62)
    labels = []
    for name in names:
        ratio = table[name].get("vs_full")
        labels.append(f"{table[name]['rps']:.2f}" + (f"  ({ratio:.1f}× full)" if ratio and name != "full" else ""))
    axis.bar_label(drawn, labels, padding=4, color=theme.ink, fontsize=9)
    axis.set_xlabel("requests a second")
    _sideways(axis, theme, 1.2 * max(rps), "Throughput at saturation")


def _decode(axis: Axes, table: Mapping[str, Any], colours: Mapping[str, str], theme: Theme) -> None:
    kinds = {"same_tokens_s": "same chunks", "disjoint_tokens_s": "different chunks"}
    _pairs(axis, table, kinds, lambda entry, kind: float(entry[kind]), colours, theme, "{:.0f}")
    axis.set_xlabel("tokens a second")
    axis.set_title("Decoding together", loc="left", color=theme.ink)


def _beside(axis: Axes, table: Mapping[str, Any], colours: Mapping[str, str], theme: Theme) -> None:
    kinds = {"alone_s": "alone", "beside_s": "beside long ones"}
    _pairs(axis, table, kinds, lambda entry, kind: 1000 * float(entry[kind].get("p95", 0)), colours, theme, "{:.0f}")
    axis.set_xlabel("milliseconds")
    axis.set_title("TTFT p95 of short requests", loc="left", color=theme.ink)


def _pairs(
    axis: Axes,
    table: Mapping[str, Any],
    kinds: Mapping[str, str],
    value: Callable[[Mapping[str, Any], str], float],
    colours: Mapping[str, str],
    theme: Theme,
    form: str,
) -> None:
    """Two bars a policy, the second one pale."""
    from matplotlib.colors import to_rgb

    names, paper = list(table), to_rgb(theme.paper)
    most = 0.0
    ticks: list[tuple[float, str]] = []
    for row, name in enumerate(names):
        for half, (kind, label) in enumerate(kinds.items()):
            figure, place = value(table[name], kind), row + 0.4 * half - 0.2
            strength = 0.45 if half else 1.0  # mixed, for a transparent bar would show the grid
            mixed = [strength * a + (1 - strength) * b for a, b in zip(to_rgb(colours[name]), paper, strict=True)]
            drawn = axis.barh(place, figure, height=0.36, color=[mixed])
            axis.bar_label(drawn, [form.format(figure)], padding=4, color=theme.ink, fontsize=9)
            ticks.append((place, f"{name}\n{label}" if not half else label))
            most = max(most, figure)
    axis.set_yticks([place for place, _ in ticks], [label for _, label in ticks])
    _sideways(axis, theme, most, "")


def _sideways(axis: Axes, theme: Theme, most: float, title: str) -> None:
    axis.invert_yaxis()
    axis.grid(False)
    axis.grid(True, axis="x", color=theme.grid, linewidth=0.8)
    axis.set_xlim(0, 1.35 * most if most else 1)  # room for the labels
    axis.set_title(title, loc="left", color=theme.ink)


_BARS: dict[str, Callable[[Axes, Mapping[str, Any], Mapping[str, str], Theme], None]] = {
    "saturation": _saturation,
    "decode": _decode,
    "beside": _beside,
}
