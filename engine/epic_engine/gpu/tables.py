"""What a run found, as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .report import Report
from .shapes import Sizes

__all__ = ["accept", "acceptance_table", "markdown", "part_tables"]

_DECODE_TARGET = 0.70
_LINK_TARGET = 0.60
_FIRST_TOKEN_TARGET = 8.0
_SHARED_TARGET = 4.0
_FLASH = "torch's flash attention, rows behind all keys"
_NOTHING = "–"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that also reads well as text."""
    cells = [list(head), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = [f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |" for row in cells]
    lines.insert(1, f"|{'|'.join('-' * (width + 2) for width in widths)}|")
    return "\n".join(lines)


def _percent(value: float | None) -> str:
    return _NOTHING if value is None else f"{100 * value:.0f} %"


def _number(value: float | None, digits: int = 2) -> str:
    return _NOTHING if value is None else f"{value:.{digits}f}"


def _thousands(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 and not tokens % 1024 else str(tokens)


# -- acceptance ------------------------------------------------------------------------------------------------


def accept(report: Report, sizes: Sizes) -> None:
    """Hold what was measured against the targets; fills ``report.acceptance``."""
    model, context = sizes.models[0].name, sizes.contexts[-1]
    few, many, prompt = sizes.requests[1], sizes.requests[-1], sizes.prompts[-1]

    def decode(requests: int, shared: bool, field: str) -> float | None:
        found = report.find("decode", requests=requests, context=context, shared=shared)
        return None if found is None else found[field]

    def link(kernel: str) -> float | None:
        found = report.find("link", kernel=kernel)
        return None if found is None else found["flops_per_second"]

    def ttft(policy: str) -> float | None:
        found = report.find("ttft", model=model, context=prompt, policy=policy)
        return None if found is None else found["seconds"]

    found: list[tuple[str, str, float | None, float]] = [
        (
            f"decoding attention, {few} x {_thousands(context)}: share of copy bandwidth",
            f"at least {_percent(_DECODE_TARGET)}",
            decode(few, False, "of_copy"),
            _DECODE_TARGET,
        ),
        (
            "link attention: share of the speed of torch's flash kernel",
            f"at least {_percent(_LINK_TARGET)}",
            _ratio(link("rows among the chunks"), link(_FLASH)),
            _LINK_TARGET,
        ),
        (
            f"TTFT at {_thousands(prompt)}, {model}: `full` by `legolink:16`",
            f"at least {_FIRST_TOKEN_TARGET:.0f} times",
            _ratio(ttft("full"), ttft("legolink:16")),
            _FIRST_TOKEN_TARGET,
        ),
        (
            f"decoding attention, {many} x {_thousands(context)}: disjoint by shared",
            f"at least {_SHARED_TARGET:.0f} times",
            _ratio(decode(many, False, "microseconds"), decode(many, True, "microseconds")),
            _SHARED_TARGET,
        ),
    ]
    report.acceptance = [
        {"figure": figure, "target": target, "value": value, "verdict": _verdict(value, limit, sizes.tiny)}
        for figure, target, value, limit in found
    ]


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _verdict(value: float | None, limit: float, tiny: bool) -> str:
    if tiny or value is None:
        return "not measured"
    return "pass" if value >= limit else "FAIL"


# -- parts -----------------------------------------------------------------------------------------------------


def part_tables(report: Report, part: str) -> str:
    """The tables of one part; empty if it has none."""
    makers: dict[str, Sequence[Callable[[Report], str]]] = {
        "numerics": (_checks, _sixteen_bit),
        "attention": (_decode,),
        "link": (_link,),
        "write": (_write,),
        "models": (_ttft, _generation),
    }
    return "\n\n".join(text for make in makers[part] if (text := make(report)))


def _checks(report: Report) -> str:
    """Those that failed, and of each kind of those that passed how near they came to their limit."""
    if not report.checks:
        return ""
    groups: dict[str, list[dict[str, Any]]] = {}
    for check in report.checks:
        groups.setdefault(check["name"].split(":")[0].split(",")[0], []).append(check)
    rows = []
    for name, checks in groups.items():
        good = [c for c in checks if c["passed"]]
        nearest = max((c["error"] / c["limit"] for c in good if c["limit"]), default=0.0)
        rows.append([name, f"{len(good)} of {len(checks)}", _percent(nearest)])
    text = table(["check", "passed", "largest error as a share of its limit"], rows)
    wrong = [
        [c["name"], f"{c['error']:.2e}", f"{c['limit']:.2e}", c.get("note", "")]
        for c in report.checks
        if not c["passed"]
    ]
    return text + ("\n\n" + table(["failed check", "error", "limit", "note"], wrong) if wrong else "")


def _records(report: Report, name: str) -> list[dict[str, Any]]:
    return report.measurements.get(name, [])


def _sixteen_bit(report: Report) -> str:
    rows = [
        [r["model"], f"{r['transformers_error']:.2e}", f"{r['engine_error']:.2e}"]
        for r in _records(report, "sixteen_bit")
    ]
    return table(["16-bit logits against float32", "transformers", "engine"], rows) if rows else ""


def _decode(report: Report) -> str:
    rows = [
        [
            f"{r['requests']} x {_thousands(r['context'])}",
            "shared" if r["shared"] else "disjoint",
            _number(r["microseconds"], 1),
            _number(r["bytes"] / 1e6, 1),
            _number(r["bytes_per_second"] / 1e12),
            _percent(r["of_copy"]),
            r["timer"],
        ]
        for r in _records(report, "decode")
    ]
    head = ["one layer, decoding", "contexts", "µs", "MB moved", "TB/s", "of copy bandwidth", "timer"]
    copy = report.find("copy")
    text = f"Copy bandwidth: {copy['bytes_per_second'] / 1e12:.2f} TB/s, read and written.\n\n" if copy else ""
    return text + table(head, rows) if rows else ""


def _link(report: Report) -> str:
    records = _records(report, "link")
    flash = report.find("link", kernel=_FLASH)
    rows = [
        [
            r["kernel"],
            _number(r["microseconds"], 1),
            _number(r["flops_per_second"] / 1e12, 1),
            _percent(_ratio(r["flops_per_second"], flash["flops_per_second"] if flash else None)),
            r["timer"],
        ]
        for r in records
    ]
    return table(["one layer, link phase", "µs", "TFLOP/s", "of torch's", "timer"], rows) if rows else ""


def _write(report: Report) -> str:
    rows = [
        [str(r["rows"]), _number(r["microseconds"], 1), _number(r["bytes_per_second"] / 1e12), _percent(r["of_copy"])]
        for r in _records(report, "write")
    ]
    return table(["one layer, rows written", "µs", "TB/s", "of copy bandwidth"], rows) if rows else ""


def _ttft(report: Report) -> str:
    rows = []
    for r in _records(report, "ttft"):
        full = report.find("ttft", model=r["model"], context=r["context"], policy="full")
        ratio = _ratio(full["seconds"] if full else None, r["seconds"])
        rows.append([r["model"], _thousands(r["context"]), f"`{r['policy']}`", _number(r["seconds"] * 1e3, 1)])
        rows[-1].append(_NOTHING if ratio is None else f"{ratio:.1f} x")
    return table(["model", "context", "policy", "TTFT, ms (p50)", "faster than `full`"], rows) if rows else ""


def _generation(report: Report) -> str:
    rows = [
        [
            r["model"],
            f"{r['requests']} x {_thousands(r['context'])}",
            "yes" if r["graphs"] else "no",
            _number(r["tokens_per_second"], 1),
        ]
        for r in _records(report, "generation")
    ]
    return table(["model", "requests", "CUDA graphs", "tokens/s"], rows) if rows else ""


# -- the whole -------------------------------------------------------------------------------------------------


def acceptance_table(report: Report) -> str:
    """Figures against targets."""
    rows = [
        [a["figure"], a["target"], _NOTHING if a["value"] is None else f"{a['value']:.2f}", a["verdict"]]
        for a in report.acceptance
    ]
    return table(["figure", "target", "measured", "verdict"], rows)


def markdown(report: Report) -> str:
    """The whole report, to be pasted below a heading."""
    e = report.environment
    lines = [f"### {e['date']}: {e['card']}", ""]
    if e["tiny"]:
        lines += ["**Toy sizes: the times below mean nothing, only the numeric checks do.**", ""]
    programs = ("driver", "cuda", "torch", "triton", "transformers", "python")
    versions = ", ".join(f"{name} {e[name]}" for name in programs)
    state = "all of it" if report.finished else "cut off"
    lines += [f"{versions}. {report.elapsed:.0f} s, {state}.", ""]
    if report.acceptance:
        lines += [acceptance_table(report), ""]
    for part, outcome in report.parts.items():
        text = part_tables(report, part)
        lines += [f"#### {part} ({outcome['state']}, {outcome['seconds']:.0f} s)", "", *([text, ""] if text else [])]
    for title, entries, field in (("Skipped", report.skipped, "reason"), ("Failed", report.failures, "error")):
        if entries:
            lines += [f"#### {title}", "", *(f"- {s['part']}: {s['step']}: {s[field]}" for s in entries), ""]
    return "\n".join(lines)
