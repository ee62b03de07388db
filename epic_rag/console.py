"""What the command line shows: progress, answers and tables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from epic_rag.answers import Answer
    from epic_rag.demo import DemoAnswer
    from epic_rag.ingest import IngestReport
    from epic_rag.ingest import Progress as OnProgress

__all__ = [
    "answer_footer",
    "demo_table",
    "err",
    "ingest_progress",
    "out",
    "report_line",
    "scaling_table",
    "serve_tables",
    "stage_progress",
    "ttft_table",
]

# A pipe or a file has no width; tables need some.
_PIPE_WIDTH = 150
out = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
err = Console(stderr=True, width=None if sys.stderr.isatty() else _PIPE_WIDTH)


@contextmanager
def stage_progress(what: str) -> Iterator[Any]:
    """A progress bar on standard error; yields ``(done, total) -> None``."""
    with _bar() as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def ingest_progress() -> Iterator[OnProgress]:
    """One bar a stage of ingestion."""
    names = {"read": "reading documents", "compile": "compiling tokens"}
    tasks: dict[str, TaskID] = {}
    with _bar() as progress:

        def update(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(names.get(stage, stage), total=total)
            progress.update(tasks[stage], completed=done, total=total)

        yield update


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description:>20}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=err,
    )


def report_line(report: IngestReport) -> str:
    """One line about an ingest."""
    parts = [
        f"{len(report.added)} added",
        f"{len(report.updated)} updated",
        f"{len(report.unchanged)} unchanged",
        f"{report.chunks} chunks ({report.tokens} tokens), {report.compiled_chunks} compiled",
        f"{report.seconds:.1f} s",
    ]
    if report.skipped:
        parts.append(f"{len(report.skipped)} files skipped")
    return ", ".join(parts)


def answer_footer(answer: Answer) -> Text:
    """Sources and costs, for under an answer."""
    stats = answer.stats
    text = Text()
    for source in answer.sources:
        text.append(f"  {source.score:.2f}  {source.chunk_id}\n", style="dim")
    text.append(
        f"  {stats.policy}: {stats.prompt} prompt tokens, {stats.reused} reused ({stats.reuse}), "
        f"{stats.recomputed} recomputed, first token after {stats.times.first_token:.2f} s",
        style="dim",
    )
    return text


def demo_table(answers: Sequence[DemoAnswer], totals: Mapping[str, float]) -> Table:
    """The demonstration's one table."""
    table = Table(title="Time to first token, the same prompts three ways", show_lines=True)
    table.add_column("question and answer", ratio=3)
    table.add_column("sources", ratio=2)
    for name in ("prompt", "reused", "recomputed", "linked", "prefix cache", "full prefill"):
        table.add_column(name, justify="right")
    for a in answers:
        stats = a.answer.stats
        mark = "[green]✓[/green] " if a.found else ("[red]✗[/red] " if a.expected else "")
        sources = list(dict.fromkeys(s.doc_id for s in a.answer.sources))
        table.add_row(
            Text.from_markup(f"[bold]{a.question}[/bold]\n{mark}").append(_shortened(a.answer.text)),
            "\n".join(sources),
            str(stats.prompt),
            str(stats.reused),
            str(stats.recomputed),
            f"[bold]{a.linked_s:.2f} s[/bold]",
            f"{a.prefix_s:.2f} s",
            f"{a.full_s:.2f} s",
        )
    table.add_row(
        "[bold]median[/bold]",
        "",
        "",
        "",
        "",
        f"[bold]{totals['linked_s']:.2f} s[/bold]",
        f"{totals['prefix_s']:.2f} s\n{totals['speedup_vs_prefix']:.1f}× slower",
        f"{totals['huggingface_s']:.2f} s\n{totals['speedup_vs_full']:.1f}× slower",
    )
    return table


def _shortened(text: str, length: int = 200) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 1] + "…"


def ttft_table(result: Mapping[str, Any]) -> Table:
    """Result of ``bench ttft``."""
    table = Table(title=f"TTFT, {result['examples']} prompts of about {result['prompt_tokens']:.0f} tokens")
    for name in (
        "policy",
        "rows",
        "median",
        "p95",
        "vs Hugging Face",
        "vs full",
        "vs prefix",
        "rows floor",
        "floor",
        "folded floor",
    ):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=name == "policy")

    def times(value: float | None, digits: int = 1) -> str:
        return "" if value is None else f"{value:.{digits}f}×"

    for policy, entry in result["policies"].items():
        table.add_row(
            policy,
            f"{entry['rows']:.0f}",
            f"{entry['median_s']:.3f} s",
            f"{entry['p95_s']:.3f} s",
            times(entry.get("speedup_vs_huggingface")),
            times(entry.get("speedup_vs_full")),
            times(entry.get("speedup_vs_prefix")),
            times(entry.get("over_floor_rows"), 2),
            times(entry.get("over_floor"), 2),
            times(entry.get("over_floor_folded"), 2),
        )
    return table


def ingest_table(result: Mapping[str, Any]) -> Table:
    """Result of ``bench ingest``."""
    table = Table(title=f"Compiling {result['chunks']} chunks of {result['tokens']} tokens")
    for name in ("context", "time", "of isolated", "second pass", "bytes", "of isolated"):
        table.add_column(name, justify="left" if name == "context" else "right", no_wrap=True)
    for name, row in result["contexts"].items():
        table.add_row(
            name,
            f"{row['seconds']:.1f} s",
            f"{row['ratio']:.2f}×",
            f"{row['second_pass']:.2f}×" if "second_pass" in row else "",
            f"{row['bytes'] / 2**20:.0f} MiB",
            f"{row['bytes_ratio']:.2f}×",
        )
    return table


def scaling_table(result: Mapping[str, Any]) -> Table:
    """Result of ``bench scaling``."""
    table = Table(title=f"TTFT as chunks of {result['chunk_tokens']} tokens are added")
    for name in ("policy", "chunks", "rows", "TTFT", "over floor", "over folded floor", "extra memory"):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=name == "policy")
    for p in sorted(result["points"], key=lambda p: (p["policy"], p["chunks"])):
        table.add_row(
            p["policy"],
            str(p["chunks"]),
            str(p["rows"]),
            f"{p['ttft_s']:.3f} s",
            f"{p['over_floor']:.2f}×",
            f"{p['over_floor_folded']:.2f}×",
            f"{p['peak_bytes'] / 2**20:.0f} MiB",
        )
    return table


def serve_tables(result: Mapping[str, Any]) -> list[Table]:
    """Results of ``bench serve``, a table for each part that was measured."""
    tables: dict[str, Callable[[Any], Table]] = {
        "load": _load_table,
        "saturation": _saturation_table,
        "decode": _decode_table,
        "beside": _beside_table,
        "memory": _memory_table,
    }
    return [draw(result[part]) for part, draw in tables.items() if result.get(part)]


def _columns(title: str, *names: str) -> Table:
    table = Table(title=title)
    for name in names:
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=name == "policy")
    return table


def _number(value: float | None, form: str = "{:.2f}") -> str:
    return "–" if value is None else form.format(value)


def _unserved(entry: Mapping[str, Any]) -> str:
    return f"{entry['refused']} / {entry['failed']}"


def _load_table(cells: Sequence[Mapping[str, Any]]) -> Table:
    table = _columns(
        "Requests a second that arrive and are served (TTFT counts from when a request was due)",
        *("policy", "output", "rate", "offered", "reached", "tokens/s", "TTFT p50", "p95", "p99", "per token"),
        *("linked", "reused", "memory", "refused / failed"),
    )
    order = list(dict.fromkeys(c["policy"] for c in cells))  # cells are measured in an order that turns
    for c in sorted(cells, key=lambda c: (c["tokens"], c["rate"], order.index(c["policy"]))):
        peak = c["peak_bytes"]
        table.add_row(
            c["policy"],
            str(c["tokens"]),
            f"{c['rate']:g}",
            f"{c['offered_rps']:.2f}",
            f"{c['reached_rps']:.2f}",
            f"{c['output_tokens_s']:.1f}",
            *(_number(c["ttft_s"].get(q), "{:.3f} s") for q in ("p50", "p95", "p99")),
            _number(c["per_token_s"].get("p50"), "{:.3f} s"),
            _number(c["linked_share"], "{:.0%}"),
            _number(c["reused_share"], "{:.0%}"),
            _number(None if peak is None else peak / 2**20, "{:.0f} MiB"),
            _unserved(c),
        )
    return table


def _saturation_table(entries: Mapping[str, Mapping[str, Any]]) -> Table:
    table = _columns(
        "As many requests as can be served",
        "policy",
        "requests/s",
        "tokens/s",
        "vs full",
        "vs prefix",
        "refused / failed",
    )
    for policy, e in entries.items():
        table.add_row(
            policy,
            f"{e['rps']:.2f}",
            f"{e['output_tokens_s']:.1f}",
            *(_number(e.get(base), "{:.2f}×") for base in ("vs_full", "vs_prefix")),
            _unserved(e),
        )
    return table


def _decode_table(entries: Mapping[str, Mapping[str, Any]]) -> Table:
    table = _columns(
        "Decoding at once over the same chunks",
        *("policy", "same, tokens/s", "different, tokens/s", "ratio", "refused / failed"),
    )
    for policy, e in entries.items():
        # Requests that never decoded together say nothing about sharing.
        ratio = _number(e["ratio"], "{:.2f}×") + ("" if e["together"] else " (not at once)")
        table.add_row(policy, f"{e['same_tokens_s']:.1f}", f"{e['disjoint_tokens_s']:.1f}", ratio, _unserved(e))
    return table


def _beside_table(entries: Mapping[str, Mapping[str, Any]]) -> Table:
    first = next(iter(entries.values()))
    long = f"requests of {first['chunks']} chunks ({first['prompt_tokens']} tokens)"
    table = _columns(
        f"TTFT of short requests, alone and beside {long}",
        *("policy", "alone p50", "p95", "beside p50", "p95", "ratio p50", "p95", "long request", "refused / failed"),
    )
    for policy, e in entries.items():
        table.add_row(
            policy,
            *(_number(e[kind].get(q), "{:.3f} s") for kind in ("alone_s", "beside_s") for q in ("p50", "p95")),
            *(_number(e["ratio"].get(q), "{:.2f}×") for q in ("p50", "p95")),
            _number(e["long_ttft_s"], "{:.2f} s"),
            _unserved(e),
        )
    return table


def _memory_table(entries: Mapping[str, Mapping[str, Any]]) -> Table:
    table = _columns(
        "What a further request adds over chunks that are there",
        "policy",
        "held",
        "added",
        "a private copy",
        "share",
        "refused / failed",
    )
    for policy, e in entries.items():
        added = e.get("added_bytes")
        table.add_row(
            policy,
            f"{e['held']} of {e['requests']}",
            _number(None if added is None else added / 2**20, "{:.2f} MiB"),
            f"{e['copy_bytes'] / 2**20:.2f} MiB",
            _number(e.get("share"), "{:.1%}"),
            _unserved(e),
        )
    return table
