"""``epic-rag tune``. Registered by :mod:`epic_rag.cli`; heavy modules are imported when it runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from epic_rag.cli_options import DeviceOption, DtypeOption, JsonFileOption, ModelOption, StoreOption
from epic_rag.console import err, ingest_progress, out, stage_progress

if TYPE_CHECKING:
    from epic_rag.evaluation.tuning import Tuning

__all__ = ["tune_store"]


def tune_store(
    store: StoreOption,
    dataset: Annotated[
        Path | None,
        typer.Option("--dataset", help="Your questions: text, one a line, or JSON with question and answers."),
    ] = None,
    min_agreement: Annotated[
        float, typer.Option("--min-agreement", min=0, max=1, help="Share of answer tokens that full must agree on.")
    ] = 0.99,
    policies: Annotated[str | None, typer.Option(help="Comma-separated; a choice of them by default.")] = None,
    contexts: Annotated[
        str | None, typer.Option(help="Compile contexts; isolated and neighbours:2 by default.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Questions to take, or to let the model write.")] = 30,
    k: Annotated[int, typer.Option("--k", "-k", min=1, help="Chunks to retrieve for each.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the chunks that questions are written about.")] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Measure, but leave the store's default as it is.")
    ] = False,
    json_path: JsonFileOption = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with pictures and tables.")] = None,
    model: ModelOption = "smollm2",
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
) -> None:
    """Find the cheapest policy and context that keep full computation's answers on your documents; make it default.

    A stopped run goes on. Fidelity is compared with full computation, so questions need no answers.
    """
    from epic_engine import parse_policies

    from epic_rag.compiling import parse_context_name
    from epic_rag.evaluation.plots import require_matplotlib

    if not (store / "registry.sqlite").is_file():
        raise typer.BadParameter(f"{store} holds no documents yet: run `epic-rag ingest PATH --store {store}` first.")
    names = None if policies is None else tuple(str(policy) for policy in parse_policies(policies))
    wanted = None if contexts is None else tuple(c.strip() for c in contexts.split(",") if c.strip())
    for context in wanted or ():
        parse_context_name(context)
    if html is not None:
        require_matplotlib()
    questions = None if dataset is None else _read(dataset, limit)
    with err.status("loading the model …"):
        from epic_rag.benchmarks.ttft import machine
        from epic_rag.evaluation import tuning
        from epic_rag.pipeline import EpicRAG

        rag = EpicRAG.open(store, model, device=device, dtype=dtype)
    kept = store / "tuning"
    with rag:
        if questions is None:
            with stage_progress("questions") as progress:
                name = f"questions-{rag.engine.fingerprint[:12]}-{rag.registry.changes_token()}-{seed}.jsonl"
                questions = tuning.write_questions(rag, limit, seed=seed, kept=kept / name, progress=progress)
        with stage_progress("examples") as progress:
            found = tuning.tune(
                rag,
                tuning.examples_from(rag, questions, k),
                policies=names or tuning.POLICIES,
                contexts=wanted or tuning.CONTEXTS,
                min_agreement=min_agreement,
                records=kept,
                progress=progress,
            )
        command = " ".join(["epic-rag", *sys.argv[1:]])
        facts: dict[str, Any] = {"command": command, "machine": machine(), "model": rag.engine.spec.architecture}
        if json_path is not None:
            json_path.parent.mkdir(parents=True, exist_ok=True)
            whole = {**facts, **tuning.as_dict(found)}
            json_path.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        if html is not None:
            from epic_rag.evaluation.report import write_report

            title = f"Tuning {store} with {facts['model']}"
            write_report(html, found.summary, found.results, title=title, command=command, machine=facts["machine"])
        out.print(curve_table(found))
        _say(found)
        if not dry_run:
            defaults = found.defaults(rag.compiler.name)
            with ingest_progress() as progress:
                changed = rag.use(defaults, progress=progress)
            out.print(
                f"{store} now uses {defaults.policy} and {defaults.context}"
                + (f"; {changed} chunks were compiled anew" if changed else ""),
                highlight=False,
            )


def _read(path: Path, limit: int) -> list[Any]:
    from epic_rag.errors import DocumentError
    from epic_rag.evaluation.readers import read_file

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DocumentError(f"the questions {path} cannot be read: {error}") from error
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise DocumentError(f"{path} holds no questions: write one a line.")
    if lines[0][0] in "{[":
        return list(read_file(path, limit=limit, count_tokens=lambda t: max(1, len(t) // 4), questions_alone=True))
    return list(dict.fromkeys(lines))[:limit]


def curve_table(found: Tuning) -> Table:
    """All arms, the cheapest first; the chosen one is marked."""
    from epic_rag.evaluation.report import figure_text, interval_text

    table = Table(title=f"{found.summary.examples} questions, cheapest first (95 % intervals)")
    for name in ("", "policy", "context", "rows", "of prompt", "top-1 agreement", "first token", "KL", "TTFT"):
        table.add_column(name, justify="left" if name in ("", "policy", "context") else "right", no_wrap=True)
    for arm in found.curve:
        table.add_row(
            "→" if arm is found.chosen else "",
            arm.policy,
            arm.context,
            f"{arm.rows:.0f}",
            f"{arm.rows_share:.1%}",
            f"{arm.agreement.mean:.1%} [dim]{interval_text(arm.agreement, percent=True)}[/dim]",
            figure_text(arm.first_token.mean, percent=True),
            f"{arm.kl.mean:.3f} [dim]{interval_text(arm.kl, 3)}[/dim]",
            f"{arm.ttft_s:.3f} s",
        )
    return table


def _say(found: Tuning) -> None:
    if found.chosen.policy != "full":
        return
    best = max((a for a in found.summary.arms if a.policy != "full"), key=lambda a: a.agreement.mean, default=None)
    hint = "" if best is None else f"; the nearest is {best.label} with {best.agreement.mean:.1%}"
    out.print(
        f"nothing cheaper than full agrees on {found.min_agreement:.1%} of the tokens{hint}. Lower --min-agreement, or "
        "try more --policies and --contexts.",
        highlight=False,
    )
