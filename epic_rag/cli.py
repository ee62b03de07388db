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

if TYPE_CHECKING:
    from epic_engine import FileStore

    from epic_rag.pipeline import EpicRAG
    from epic_rag.registry import Registry

__all__ = ["app", "main"]

app = typer.Typer(help="RAG answers in a fraction of the time.", no_args_is_help=True, add_completion=False)
store_app = typer.Typer(help="Look into a store, check it, remove documents.", no_args_is_help=True)
app.add_typer(store_app, name="store")
app.add_typer(bench_app, name="bench")

StoreOption = Annotated[Path, typer.Option("--store", help="Directory of documents and compiled chunks.")]
ModelOption = Annotated[
    str, typer.Option("--model", help="Folder, hub id, .gguf file or 'smollm2'.", envvar="EPIC_RAG_MODEL")
]
PolicyOption = Annotated[
    str, typer.Option("--policy", help="Link policy, e.g. full, naive, legolink:16; auto is the store's own.")
]
ContextOption = Annotated[
    str,
    typer.Option("--context", help="Compile context: isolated, sink:n, head, neighbours:n; auto is the store's own."),
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
DtypeOption = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
KOption = Annotated[int, typer.Option("--k", "-k", min=1, help="Chunks to retrieve.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
TokensOption = Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer in tokens.")]


def main() -> None:
    """Run the command line: errors of ours become one line and exit code 1, Ctrl-C becomes 130."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        # Without its standalone mode typer returns the code of an Exit.
        sys.exit(app(standalone_mode=False) or 0)
    except EpicError as error:
        err.print(f"error: {error}", style="red", markup=False, highlight=False)
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
    err.print("stopped; what was finished is kept, and the same command goes on from there.")
    sys.exit(130)


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
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Read, chunk, compile and index documents. Unchanged ones cost nothing; an interrupted run is resumed."""
    from epic_rag.chunking import ChunkingConfig

    chunking = ChunkingConfig(max_tokens=max_chunk_tokens)
    options: dict[str, Any] = {"context": context, "chunking": chunking, "keep_head_forms": keep_head_forms}
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
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Answer a question from the documents in a store."""
    from epic_engine import SamplingParams

    with _open(store, model, must_exist=True, context=context, policy=policy, device=device, dtype=dtype) as rag:
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
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
) -> None:
    """Converse about the documents in a store. Ctrl-C stops an answer, Ctrl-D (or an empty line) ends."""
    from epic_engine import SamplingParams

    history: list[dict[str, str]] = []
    with _open(store, model, must_exist=True, context=context, policy=policy, device=device, dtype=dtype) as rag:
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
) -> None:
    """Ingest a real corpus, ask several questions, and time the first token three ways."""
    from epic_rag import demo as demonstration
    from epic_rag.chunking import ChunkingConfig

    chunking = ChunkingConfig(max_tokens=demonstration.CHUNK_TOKENS)
    with _open(store, model, must_exist=False, policy=policy, context=context, chunking=chunking) as rag:
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


def _files(store: Path) -> tuple[Registry, FileStore]:
    if not (store / "registry.sqlite").is_file():
        raise typer.BadParameter(f"{store} is no store: it holds no registry.sqlite.")
    from epic_engine import FileStore

    from epic_rag.registry import Registry

    return Registry.open(store / "registry.sqlite"), FileStore(store / "chunks")


@store_app.command("ls")
def store_ls(store: StoreOption, as_json: JsonOption = False) -> None:
    """List documents."""
    registry, chunks = _files(store)
    with registry, contextlib.closing(chunks):
        rows = [
            {
                "doc_id": d.doc_id,
                "source": d.source,
                "chunks": len(registry.chunks(d.doc_id)),
                "added_at": d.added_at,
            }
            for d in registry.documents()
        ]
    if as_json:
        print(json.dumps(rows))
        return
    for row in rows:
        out.print(f"{row['chunks']:>6} chunks  {row['doc_id']}", highlight=False, markup=False, soft_wrap=True)


@store_app.command("stats")
def store_stats(store: StoreOption, as_json: JsonOption = False) -> None:
    """Count documents, chunks, tokens and bytes."""
    registry, chunks = _files(store)
    with registry, contextlib.closing(chunks):
        compiled = list(chunks.entries())
        contexts = sorted({c.context for c in compiled})
        facts = {
            **registry.counts(),
            "compiled_chunks": len(compiled),
            "kv_bytes": sum(c.nbytes for c in compiled),
            **{f"kv_bytes {c}": sum(x.nbytes for x in compiled if x.context == c) for c in contexts},
            "models": len({c.fingerprint for c in compiled}),
        }
    if as_json:
        print(json.dumps(facts))
        return
    for name, value in facts.items():
        out.print(f"{name:>20}  {value}", highlight=False)


@store_app.command("verify")
def store_verify(
    store: StoreOption,
    repair: Annotated[bool, typer.Option("--repair", help="Drop what is damaged or unnamed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare every compiled chunk with its checksum; exit code 1 if something is wrong."""
    registry, chunks = _files(store)
    with registry, contextlib.closing(chunks), err.status("reading every chunk …"):
        report = chunks.verify(repair=repair)
        held = {c.key.hex for c in chunks.entries()}
        absent = sorted(registry.all_keys() - held)
    facts = {**vars(report), "not_compiled": absent, "clean": report.clean}
    if as_json:
        print(json.dumps(facts))
    else:
        out.print(
            f"{report.checked} chunks checked: {len(report.corrupt)} corrupt, {len(report.missing)} missing, "
            f"{len(report.orphans)} files without entry, {len(absent)} to compile when they are next used"
            + (" (repaired)" if repair and not report.clean else ""),
            highlight=False,
        )
    if not report.clean and not repair:
        raise typer.Exit(1)


@store_app.command("rm")
def store_rm(
    doc_ids: Annotated[list[str], typer.Argument(help="Documents, as `store ls` names them.")],
    store: StoreOption,
) -> None:
    """Forget documents and the KV that no other document shares."""
    registry, chunks = _files(store)
    from epic_engine.chunks import content_digest

    with registry, contextlib.closing(chunks):
        namespaces = {c.namespace for c in chunks.entries()}
        for given in doc_ids:
            # Files are known by their absolute paths; a relative one means the same file.
            path = Path(given).absolute().as_posix()
            doc_id = path if given not in registry and path in registry else given
            records = registry.chunks(doc_id) if doc_id in registry else []
            freed = {key for key in registry.delete_document(doc_id) if not registry.reference_count(key)}
            # What was compiled behind the text that goes must go, too.
            contents = [content_digest(r.token_ids) for r in records if r.key in freed]
            count = sum(chunks.erase(namespace, contents) for namespace in namespaces)
            out.print(f"forgot {doc_id}: {count} compiled chunks freed", highlight=False, markup=False)


if __name__ == "__main__":
    main()
