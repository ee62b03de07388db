"""The command line: ``epic-rag``. Heavy modules are imported by the command that needs them."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from epic_engine.errors import EpicError

from epic_rag.benchmarks.command import bench_app
from epic_rag.cli_options import (
    ContextOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    KOption,
    KvDtypeOption,
    ModelOption,
    PolicyOption,
    StoreOption,
    TokensOption,
)
from epic_rag.console import (
    answer_footer,
    demo_table,
    err,
    ingest_progress,
    out,
    report_line,
    stage_progress,
)
from epic_rag.evaluation.command import evaluate
from epic_rag.evaluation.tune_command import tune_store
from epic_rag.server.command import serve_command
from epic_rag.store_commands import store_app

if TYPE_CHECKING:
    from epic_rag.pipeline import EpicRAG

__all__ = ["app", "main"]

app = typer.Typer(help="RAG answers in a fraction of the time.", no_args_is_help=True, add_completion=False)
app.add_typer(store_app, name="store")
app.add_typer(bench_app, name="bench")

_INTERRUPTED = 130


def main() -> None:
    """Run the command line: errors of ours become one line and exit code 1, Ctrl-C becomes 130."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        # Without its standalone mode typer returns the code of an Exit; Ctrl-C becomes one, too.
        code = app(standalone_mode=False) or 0
        if code == _INTERRUPTED:
            _interrupted()
        sys.exit(code)
    except EpicError as error:
        err.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        _interrupted()
    except typer.Abort:
        _interrupted()
    except Exception as error:
        # Usage errors know how to show themselves; anything else is a defect and keeps its traceback.
        show = getattr(error, "show", None)
        if show is None:
            raise
        show()
        sys.exit(getattr(error, "exit_code", 2))


def _interrupted() -> None:
    err.print("stopped; what was finished is kept, and the same command does the rest.")
    sys.exit(_INTERRUPTED)


@contextlib.contextmanager
def _open(store: Path, model: str, *, must_exist: bool, **options: Any) -> Iterator[EpicRAG]:
    if must_exist and not (store / "registry.sqlite").is_file():
        raise typer.BadParameter(f"{store} holds no documents yet: run `epic-rag ingest PATH --store {store}` first.")
    with err.status("loading the model …"):
        from epic_rag.pipeline import EpicRAG

        rag = EpicRAG.open(store, model, **options)
    with rag:
        yield rag


@app.command()
def ingest(
    paths: Annotated[list[Path], typer.Argument(help="Files and folders.")],
    store: StoreOption,
    model: ModelOption = "smollm2",
    context: ContextOption = "auto",
    max_chunk_tokens: Annotated[int, typer.Option(help="Longest chunk in tokens.")] = 384,
    keep_head_forms: Annotated[
        bool,
        typer.Option(
            "--keep-head-forms/--drop-head-forms",
            help="Whether the KV that chunks fall back to when a neighbour is deleted is kept: twice the disk.",
        ),
    ] = True,
    kv_dtype: KvDtypeOption = "auto",
    compression: Annotated[
        str | None, typer.Option(help="zstd compresses new chunks: fewer bytes, slower to load.")
    ] = None,
    max_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="What all chunks may take from now on, such as 8GiB: the least worthy go."),
    ] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Read, chunk, compile and index documents. Unchanged ones cost nothing; an interrupted run is resumed."""
    from epic_engine.memory.budget import parse_size

    from epic_rag.chunking import ChunkingConfig

    options: dict[str, Any] = {
        "context": context,
        "chunking": ChunkingConfig(max_tokens=max_chunk_tokens),
        "keep_head_forms": keep_head_forms,
        "kv_dtype": kv_dtype,
        "compression": compression,
        "max_bytes": None if max_bytes is None else parse_size(max_bytes),
    }
    with (
        _open(store, model, must_exist=False, device=device, dtype=dtype, **options) as rag,
        ingest_progress() as progress,
    ):
        report = rag.add(
            [*paths],
            progress=progress,
            on_estimate=lambda estimate: err.print(f"to compile: {estimate}", highlight=False),
        )
    if as_json:
        out.print_json(json.dumps(vars(report)))
        return
    out.print(report_line(report), highlight=False)
    for path, why in report.skipped:
        err.print(f"skipped {path}: {why}", style="dim", markup=False, highlight=False)


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="In words.")],
    store: StoreOption,
    model: ModelOption = "smollm2",
    policy: PolicyOption = "auto",
    context: ContextOption = "auto",
    k: KOption = 5,
    max_tokens: TokensOption = 200,
    kv_dtype: KvDtypeOption = "auto",
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Answer a question from the documents in a store."""
    from epic_engine import SamplingParams

    options = {"context": context, "policy": policy, "kv_dtype": kv_dtype, "device": device, "dtype": dtype}
    with _open(store, model, must_exist=True, **options) as rag:
        stream = rag.stream(question, k=k, sampling=SamplingParams(max_tokens=max_tokens))
        for piece in stream:
            if not as_json:
                out.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
        answer = stream.answer
    if not as_json:
        out.print()
        out.print(answer_footer(answer))
        return
    stats = answer.stats
    result = {
        "text": answer.text,
        "sources": [vars(s) for s in answer.sources],
        "policy": stats.policy,
        "reuse": stats.reuse,
        "tokens": {
            "prompt": stats.prompt,
            "linked": stats.linked,
            "recomputed": stats.recomputed,
            "reused": stats.reused,
            "generated": stats.generated,
        },
        "rows": stats.rows,
        "ttft_s": stats.times.first_token,
        "times": vars(stats.times),
        "finish_reason": answer.finish_reason,
    }
    # Plain print: rich would wrap long lines to the terminal.
    print(json.dumps(result, ensure_ascii=False))


@app.command()
def chat(
    store: StoreOption,
    model: ModelOption = "smollm2",
    policy: PolicyOption = "auto",
    context: ContextOption = "auto",
    k: KOption = 4,
    max_tokens: TokensOption = 200,
    kv_dtype: KvDtypeOption = "auto",
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
) -> None:
    """Converse about the documents in a store. Ctrl-C stops an answer, Ctrl-D (or an empty line) ends."""
    from epic_engine import SamplingParams

    history: list[dict[str, str]] = []
    options = {"context": context, "policy": policy, "kv_dtype": kv_dtype, "device": device, "dtype": dtype}
    with _open(store, model, must_exist=True, **options) as rag:
        while True:
            try:
                question = out.input("[bold]you: [/bold]").strip()
            except (EOFError, KeyboardInterrupt):
                question = ""
            if not question:
                return
            stream = rag.stream(question, k=k, history=history, sampling=SamplingParams(max_tokens=max_tokens))
            try:
                for piece in stream:
                    out.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
            except KeyboardInterrupt:
                stream.close()
            out.print()
            out.print(answer_footer(stream.answer))
            history += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": stream.answer.text or "…"},
            ]


@app.command()
def demo(
    everything: Annotated[bool, typer.Option("--all", help="All of the corpus instead of 30k tokens.")] = False,
    folder: Annotated[Path, typer.Option("--corpus", help="The handbook's folder.")] = Path("examples/corpus"),
    store: StoreOption = Path(".demo"),
    model: ModelOption = "smollm2",
    questions: Annotated[int, typer.Option(min=1, help="Questions to ask.")] = 6,
    k: KOption = 8,
    policy: PolicyOption = "auto",
    context: ContextOption = "auto",
    kv_dtype: KvDtypeOption = "auto",
) -> None:
    """Ingest a real corpus, ask several questions, and time the first token three ways."""
    from epic_rag import demo as demonstration
    from epic_rag.chunking import ChunkingConfig

    chunking = ChunkingConfig(max_tokens=demonstration.CHUNK_TOKENS)
    options: dict[str, Any] = {"policy": policy, "context": context, "kv_dtype": kv_dtype, "chunking": chunking}
    with _open(store, model, must_exist=False, **options) as rag:
        spec, gate = rag.engine.spec, rag.engine.selftest
        checked = f"; correctness gate passed (relative error {gate.linked_error:.1e})" if gate else ""
        kind = str(spec.dtype).removeprefix("torch.")
        out.print(f"{spec.architecture}, {kind} on {rag.engine.device}{checked}", highlight=False)
        documents = demonstration.corpus(
            folder, everything=everything, count=lambda text: len(rag.composer.tokenizer.encode_text(text))
        )
        with ingest_progress() as progress:
            report = rag.add(
                documents,
                progress=progress,
                on_estimate=lambda estimate: err.print(f"to compile: {estimate}", highlight=False),
            )
        out.print(report_line(report), highlight=False)
        answers = []
        asked = demonstration.demo_questions(folder, questions)
        with stage_progress("asking") as step:
            for number, (question, expected) in enumerate(asked):
                step(number, len(asked))
                answers.append(demonstration.run_question(rag, question, expected, k=k))
            step(len(asked), len(asked))
        out.print(demo_table(answers, demonstration.total(answers)))


@app.command()
def doctor(
    model: ModelOption = "smollm2",
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Load a model, compare the engine with the untouched model, and report what this machine offers."""
    with err.status("loading the model and comparing …"):
        from epic_engine import Engine

        from epic_rag.benchmarks.ttft import machine

        engine = Engine(model, device=device, dtype=dtype, selftest=False)
        report = engine.run_selftest()
    spec = engine.spec
    facts: dict[str, Any] = {
        **machine(),
        "model": spec.architecture,
        "fingerprint": engine.fingerprint,
        "device": str(engine.device),
        "dtype": str(spec.dtype).removeprefix("torch."),
        "max_model_len": engine.max_model_len,
        "kv_bytes_per_token": spec.kv_bytes_per_token,
        "error_full": report.full_error,
        "error_linked": report.linked_error,
        "tolerance": report.tolerance,
        "passed": report.passed,
    }
    engine.close()
    if as_json:
        print(json.dumps(facts))
    else:
        for name, value in facts.items():
            out.print(f"{name:>20}  {value}", highlight=False, markup=False)
    if not report.passed:
        raise typer.Exit(1)


app.command("eval")(evaluate)
app.command("tune")(tune_store)
app.command("serve")(serve_command)


if __name__ == "__main__":
    main()
