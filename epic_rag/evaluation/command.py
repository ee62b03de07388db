"""``epic-rag eval``. Registered by :mod:`epic_rag.cli`; heavy modules are imported when it runs."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from epic_rag.cli_options import DeviceOption, DtypeOption, ModelOption
from epic_rag.console import err, out, stage_progress

if TYPE_CHECKING:
    from epic_rag.evaluation.intervals import Interval
    from epic_rag.evaluation.summary import Summary

__all__ = ["evaluate"]


def evaluate(
    dataset: Annotated[
        str,
        typer.Argument(
            help="needle, needle:500,4000, templated, fewshot, order, tenants, or a file: JSON lines of our form, "
            "LongBench, MuSiQue or 2WikiMultihopQA."
        ),
    ],
    policies: Annotated[
        str, typer.Option(help="Comma-separated; full always runs.")
    ] = "naive,legolink:16,query_aware:0.1",
    contexts: Annotated[str, typer.Option(help="Compile contexts, comma-separated.")] = "isolated,neighbours:2",
    kv_dtypes: Annotated[
        str, typer.Option(help="What compiled chunks are kept as, comma-separated: auto, bf16, int8, fp8.")
    ] = "auto",
    limit: Annotated[int, typer.Option(min=1, help="Examples to take.")] = 20,
    seed: Annotated[int, typer.Option(help="Of generated examples and of the intervals.")] = 0,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer in tokens.")] = 32,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", help="Write the summary here, and each example to OUT.records.jsonl as it is done."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with pictures and tables.")] = None,
    model: ModelOption = "smollm2",
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
) -> None:
    """Answer quality and fidelity of link policies against full computation. With --json a stopped run goes on."""
    from epic_engine import ConfigError, EngineConfig, parse_policies

    from epic_rag.compiling import parse_context_name
    from epic_rag.evaluation.datasets import load
    from epic_rag.evaluation.plots import require_matplotlib

    # Refuse what cannot work before the model is loaded and hours are spent.
    names = tuple(str(policy) for policy in parse_policies(policies))
    wanted = tuple(c.strip() for c in contexts.split(",") if c.strip())
    for context in wanted:
        parse_context_name(context)
    kept = tuple(k.strip() for k in kv_dtypes.split(",") if k.strip())
    if not kept:
        raise ConfigError("--kv-dtypes names nothing to compare: 'auto' keeps chunks as the model computes them.")
    for kv_dtype in kept:
        EngineConfig(kv_dtype=kv_dtype)
    if html is not None:
        require_matplotlib()
    load(dataset, limit=1, seed=seed)
    with err.status("loading the model …"):
        from epic_engine import Engine

        from epic_rag.benchmarks.ttft import machine
        from epic_rag.evaluation.engines import engines_of
        from epic_rag.evaluation.runner import EvalSettings, Evaluation
        from epic_rag.evaluation.summary import summarise

        engine = Engine(model, device=device, dtype=dtype)
        embedder = None
        if any(parse_context_name(context)[0] == "neighbours" for context in wanted):
            from epic_rag.retrieval import MiniLMEmbedder

            embedder = MiniLMEmbedder()
    with engine, engines_of(engine, kept) as engines:
        settings = EvalSettings(dataset, names, wanted, seed, max_tokens, kept)
        evaluation = Evaluation(engine, settings, embedder=embedder, engines=engines)
        examples = load(
            dataset, limit=limit, seed=seed, count_tokens=lambda t: len(evaluation.composer.tokenizer.encode_text(t))
        )
        records = None if json_path is None else json_path.with_name(f"{json_path.name}.records.jsonl")
        with stage_progress("examples") as progress:
            results = evaluation.run(examples, records=records, progress=progress)
        facts: dict[str, Any] = {
            "command": " ".join(["epic-rag", *sys.argv[1:]]),
            "machine": {**machine(), "device": str(engine.device)},
            "model": engine.spec.architecture,
            "settings": evaluation.fingerprint,
        }
    summary = summarise(results, seed=seed)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        whole = {**facts, **summary.as_dict(), "records": [asdict(r) for r in results]}
        json_path.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if html is not None:
        from epic_rag.evaluation.report import write_report

        title = f"{Path(dataset).name} with {facts['model']} ({facts['settings']['dtype']})"
        write_report(html, summary, results, title=title, command=facts["command"], machine=facts["machine"])
    out.print(_table(dataset, summary))
    if summary.rounded:
        out.print(_rounding_table(summary))
    if summary.skipped:
        out.print(f"{summary.skipped} examples did not fit the model and were left out", highlight=False)


def _table(dataset: str, summary: Summary) -> Table:
    from epic_rag.evaluation.report import figure_text, interval_text

    def cell(interval: Interval, digits: int = 2, *, percent: bool = False) -> str:
        digits = 0 if percent else digits
        mean = figure_text(interval.mean, digits, percent=percent)
        return f"{mean}\n[dim]{interval_text(interval, digits, percent=percent)}[/dim]"

    right = summary.arms[0].right if summary.arms else 0
    table = Table(title=f"{dataset}: {summary.examples} examples, full gets {right} right (95 % intervals)")
    for name in ("policy", "context", "rows", "of prompt", "score", "kept", "KL", "top-1", "NLL", "TTFT", "vs full"):
        left = name in ("policy", "context")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for arm in summary.arms:
        table.add_row(
            arm.policy,
            arm.compiled,
            f"{arm.rows:.0f}",
            f"{arm.rows_share:.1%}",
            cell(arm.score, percent=True),
            cell(arm.kept, percent=True),
            cell(arm.kl, 3),
            cell(arm.agreement, percent=True),
            cell(arm.nll),
            f"{arm.ttft_s:.3f} s",
            f"{arm.speedup:.1f}×",
        )
    return table


def _rounding_table(summary: Summary) -> Table:
    from epic_rag.evaluation.report import figure_text, interval_text

    table = Table(title="chunks kept in a narrower type, against the same chunks as the model computes them")
    for name in ("policy", "context", "KL", "95 %", "top-1", "95 %"):
        table.add_column(name, justify="left" if name in ("policy", "context") else "right", no_wrap=True)
    for arm in summary.rounded:
        table.add_row(
            arm.policy,
            arm.compiled,
            figure_text(arm.kv_kl.mean, 5),
            interval_text(arm.kv_kl, 5),
            figure_text(arm.kv_agreement.mean, 2, percent=True),
            interval_text(arm.kv_agreement, 2, percent=True),
        )
    return table
