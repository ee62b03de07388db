"""Tables of what a campaign found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .kinds import KINDS

__all__ = ["summary", "write_markdown"]

_BEGIN, _END = "<!-- faults: begin -->", "<!-- faults: end -->"
_COLUMNS = ("trials", "damaged", "reported", "misses", "rebuilt", "wrong hits", "lost intact", "unreported",
            "false alarms", "other")  # fmt: skip


def _rows(outcomes: Sequence[dict[str, Any]]) -> list[tuple[str, list[int]]]:
    names = [kind.name for kind in KINDS]
    rows = []
    for name in (*names, "**all**"):
        found = [o for o in outcomes if name in (o["kind"], "**all**")]
        counts = [
            len(found),
            *(sum(int(o[key]) for o in found) for key in ("damaged", "reported", "misses", "rebuilt")),
        ]
        counts += [
            sum(len(o[key]) for o in found)
            for key in ("wrong_hits", "lost_intact", "unreported", "false_alarms", "other")
        ]
        rows.append((name, counts))
    return rows


def summary(outcomes: Sequence[dict[str, Any]], seconds: float) -> str:
    """For the screen."""
    spent: Counter[str] = Counter()
    for outcome in outcomes:
        spent[outcome["kind"]] += outcome["seconds"]
    lines = [f"{'':38}" + "".join(f"{name:>13}" for name in _COLUMNS) + f"{'seconds':>10}"]
    for name, counts in _rows(outcomes):
        if counts[0]:
            line = f"{name.strip('*'):38}" + "".join(f"{count:>13}" for count in counts)
            lines.append(f"{line}{spent.get(name, spent.total()):>10.1f}")
    return "\n".join([*lines, f"{len(outcomes)} trials in {seconds:.0f} s"])


def write_markdown(path: Path, outcomes: Sequence[dict[str, Any]]) -> None:
    """Put the table between the markers of a page.

    Raises
    ------
    ValueError
        If the page has no markers.
    """
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{path} has no lines {_BEGIN} and {_END}: add them where the table belongs.")
    lines = [f"| fault | {' | '.join(_COLUMNS)} |", "| --- |" + " ---: |" * len(_COLUMNS)]
    lines += [f"| {name} | {' | '.join(map(str, counts))} |" for name, counts in _rows(outcomes)]
    path.write_text("\n".join([before.rstrip("\n"), "", begin, *lines, end]) + after, encoding="utf-8")
