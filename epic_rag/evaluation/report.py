"""One page about an evaluation that needs nothing but itself: pictures, tables and style are inside."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from epic_rag.evaluation.intervals import Interval
from epic_rag.evaluation.plots import DARK, LIGHT, needle_map, quality_over_cost
from epic_rag.evaluation.records import ExampleResult
from epic_rag.evaluation.summary import RIGHT, ArmSummary, Summary

__all__ = ["figure_text", "interval_text", "write_report"]

_ANSWERS_SHOWN = 12

_STYLE = """
:root { color-scheme: light dark; --ink: #22262d; --soft: #5d6570; --paper: #fff; --line: #dfe3e8; --band: #f5f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --soft: #9aa3ae; --paper: #15181d; --line: #343a43; --band: #1c2027; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 76rem; margin: 2rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.5rem; margin-bottom: .25rem; } h2 { font-size: 1.1rem; margin-top: 2.25rem; }
p, figcaption { color: var(--soft); max-width: 60rem; } figure { margin: 1rem 0; }
img { max-width: 100%; height: auto; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .75rem; text-align: right; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; white-space: nowrap; } td:first-child, th:first-child, .text td, .text th { text-align: left; }
tbody tr:nth-child(odd) { background: var(--band); } small { color: var(--soft); display: block; white-space: nowrap; }
code, pre { font: 13px/1.5 ui-monospace, monospace; } pre { white-space: pre-wrap; background: var(--band);
  padding: .75rem 1rem; border-radius: .4rem; }
"""


def figure_text(value: float | None, digits: int | None = None, *, percent: bool = False) -> str:
    """A figure as text, with two digits behind the point, or none in percent; a dash where there is no figure."""
    if value is None or not np.isfinite(value):
        return "–"
    if percent:
        return f"{value:.{digits or 0}%}"
    return f"{value:.{2 if digits is None else digits}f}"


def interval_text(interval: Interval, digits: int | None = None, *, percent: bool = False) -> str:
    """An interval's two ends as text, empty where there is none."""
    if not np.isfinite(interval.mean):
        return ""
    return " … ".join(figure_text(end, digits, percent=percent) for end in (interval.low, interval.high))


def write_report(
    path: Path,
    summary: Summary,
    results: Sequence[ExampleResult],
    *,
    title: str,
    command: str,
    machine: Mapping[str, Any],
) -> list[Path]:
    """Write the page, and its pictures as PNG files beside it.

    Parameters
    ----------
    path
        The page; its folders are made.
    summary, results
        What was measured.
    title
        Heading, such as the data set and the model.
    command
        How the run was started.
    machine
        What it ran on.

    Returns
    -------
    list of Path
        The page and the PNG files.

    Raises
    ------
    MissingDependencyError
        If matplotlib is not installed.
    """
    pictures = [
        (
            "quality",
            "Quality over cost: each policy in each compile context, bars at 95 %, the Pareto front outlined and "
            "dotted. Left, lower is better; right, higher is better; in both, further left is cheaper.",
            quality_over_cost(summary.arms, LIGHT),
            quality_over_cost(summary.arms, DARK),
        )
    ]
    light, dark = needle_map(results, LIGHT), needle_map(results, DARK)
    if light and dark:
        pictures.append(
            ("needle", "Needles found, by the depth of the needle and the length of the prompt.", light, dark)
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    written = [path]
    for name, _, picture, _ in pictures:
        written.append(path.with_name(f"{path.stem}.{name}.png"))
        written[-1].write_bytes(picture)
    sections = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{summary.examples} examples{_skipped(summary)}. Every arm of an example has the same token ids; only the "
        "compile context and the link policy differ. Intervals hold 95 % of resamples of the examples; "
        "answers kept have Wilson's.</p>",
        *(_figure(*picture[1:]) for picture in pictures),
        "<h2>Policies</h2>",
        _policies(summary.arms),
        f"<p>An answer counts as right from a score of {RIGHT:g}. KL, top-1 and first token compare the predictions "
        "of full computation's own greedy answer. NLL is the gold answer’s, per token. Times depend on the machine "
        "and the moment: compare the ratio.</p>",
        *_rounding(summary.rounded),
        *_groups(summary),
        *_answers(results),
        "<h2>Run</h2>",
        f"<pre>{escape(command)}</pre>",
        f"<pre>{escape(chr(10).join(f'{name}: {value}' for name, value in machine.items()))}</pre>",
    ]
    path.write_text(
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(sections)
        + "\n</body></html>\n",
        encoding="utf-8",
    )
    return written


def _skipped(summary: Summary) -> str:
    return f", {summary.skipped} more did not fit the model" if summary.skipped else ""


def _figure(caption: str, light: bytes, dark: bytes) -> str:
    inline = ["data:image/png;base64," + base64.b64encode(picture).decode() for picture in (light, dark)]
    text = escape(caption)
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{inline[1]}"/>'
        f'<img src="{inline[0]}" alt="{text}"/></picture><figcaption>{text}</figcaption></figure>'
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """A table of cells that are HTML already."""
    cells = "".join(f"<th>{cell}</th>" for cell in head)
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    attribute = f' class="{kind}"' if kind else ""
    return f'<div class="scroll"><table{attribute}><thead><tr>{cells}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def _with_interval(interval: Interval, digits: int | None = None, *, percent: bool = False) -> str:
    mean = figure_text(interval.mean, digits, percent=percent)
    return f"{mean}<small>{interval_text(interval, digits, percent=percent)}</small>"


def _policies(arms: Sequence[ArmSummary]) -> str:
    consistency = any(a.consistency is not None for a in arms)
    head = [
        *("policy · context", "rows", "of prompt", "TTFT", "vs full", "score", "kept", "KL", "top-1", "first token"),
        *("NLL", "NLL − full", "recomputed"),
        *(["same answer"] if consistency else []),
    ]
    rows = []
    for arm in arms:
        row = [
            escape(arm.label),
            f"{arm.rows:.0f}",
            f"{arm.rows_share:.1%}",
            f"{arm.ttft_s:.3f} s",
            f"{arm.speedup:.1f}×",
            _with_interval(arm.score, percent=True),
            _with_interval(arm.kept, percent=True),
            _with_interval(arm.kl, 3),
            _with_interval(arm.agreement, percent=True),
            _with_interval(arm.first_token, percent=True),
            _with_interval(arm.nll),
            _with_interval(arm.nll_change),
            f"{arm.recomputed:.0f}",
        ]
        rows.append([*row, figure_text(arm.consistency, percent=True)] if consistency else row)
    return _table(head, rows)


def _rounding(arms: Sequence[ArmSummary]) -> list[str]:
    """What keeping chunks in a narrower type changes by itself."""
    if not arms:
        return []
    rows = [
        [escape(arm.label), _with_interval(arm.kv_kl, 5), _with_interval(arm.kv_agreement, 2, percent=True)]
        for arm in arms
    ]
    return [
        "<h2>Stored KV</h2>",
        _table(["policy · context · stored", "KL", "top-1"], rows),
        "<p>Against the same policy and context with chunks kept as the model computes them, over the same tokens.</p>",
    ]


def _groups(summary: Summary) -> list[str]:
    parts = []
    for dimension, values in summary.groups.items():
        parts.append(f"<h2>By {escape(dimension)}</h2>")
        counts = [arms[0].examples for arms in values.values()]
        head = ["score, KL", *(f"{escape(v)}<small>n = {n}</small>" for v, n in zip(values, counts, strict=True))]
        rows = [
            [
                escape(arm.label),
                *(
                    f"{figure_text(arms[number].score.mean, percent=True)}"
                    f"<small>KL {figure_text(arms[number].kl.mean, 3)}</small>"
                    for arms in values.values()
                ),
            ]
            for number, arm in enumerate(summary.arms)
        ]
        parts.append(_table(head, rows))
    return parts


def _answers(results: Sequence[ExampleResult]) -> list[str]:
    """Answers of examples on which arms disagree with full, to be read by people."""
    changed = [r for r in results if len({a.answer for a in r.arms}) > 1][:_ANSWERS_SHOWN]
    if not changed:
        return []
    rows = []
    for result in changed:
        by_answer: dict[str, list[str]] = {}
        for arm in result.arms:
            by_answer.setdefault(arm.answer, []).append(arm.label + (" ✓" if (arm.score or 0) >= RIGHT else ""))
        for number, (answer, labels) in enumerate(by_answer.items()):
            rows.append(["" if number else escape(result.example_id), escape(", ".join(labels)), escape(answer)])
    return ["<h2>Answers that differ</h2>", _table(["example", "policies (✓ right)", "answer"], rows, "text")]
