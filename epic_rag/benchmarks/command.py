"""``epic-rag bench``. Registered by :mod:`epic_rag.cli`; heavy modules are imported when a command runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from epic_rag.console import err, ingest_table, out, scaling_table, stage_progress, ttft_table

if TYPE_CHECKING:
    from epic_engine import Engine

__all__ = ["bench_app"]

bench_app = typer.Typer(help="Measure on this machine.", no_args_is_help=True)

ModelOption = Annotated[
    str, typer.Option("--model", help="Folder, hub id, .gguf file or 'smollm2'.", envvar="EPIC_RAG_MODEL")
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
DtypeOption = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
DatasetOption = Annotated[
    str, typer.Option("--dataset", help="A file or generated data set, as `epic-rag eval` takes them.")
]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write everything measured to this file.")]


def _bench_engine(model: str, device: str, dtype: str) -> Engine:
    with err.status("loading the model …"):
        from epic_engine import Engine

        return Engine(model, device=device, dtype=dtype)


@bench_app.command("ttft")
def bench_ttft(
    dataset: DatasetOption,
    limit: Annotated[int, typer.Option(min=1, help="Examples to take.")] = 10,
    policies: Annotated[str, typer.Option(help="Comma-separated.")] = "full,prefix,naive,legolink:16,query_aware:0.1",
    context: Annotated[str, typer.Option(help="Compile context.")] = "isolated",
    repeats: Annotated[int, typer.Option(min=1, help="Times each prompt is asked with each policy.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the shuffles.")] = 0,
    json_path: JsonOption = None,
    model: ModelOption = "smollm2",
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
) -> None:
    """Time to first token per policy on the same prompts, with shuffled documents."""
    from epic_engine import parse_policies

    from epic_rag.benchmarks.ttft import bench_ttft
    from epic_rag.evaluation.datasets import load

    names = [str(policy) for policy in parse_policies(policies)]
    examples = load(dataset, limit=limit, seed=seed)
    with _bench_engine(model, device, dtype) as engine, stage_progress("prompts") as progress:
        result = bench_ttft(engine, examples, names, context=context, repeats=repeats, seed=seed, progress=progress)
    _finish(result, json_path)
    out.print(ttft_table(result))
    out.print(
        f"compiling costs {result['compile']['ratio']:.2f}× a plain forward pass of the same tokens",
        highlight=False,
    )


@bench_app.command("scaling")
def bench_scaling(
    chunks: Annotated[str, typer.Option(help="Comma-separated numbers of chunks.")] = "8,16,32,64",
    chunk_tokens: Annotated[int | None, typer.Option(help="Tokens a chunk; fits the context by default.")] = None,
    policies: Annotated[str, typer.Option(help="Comma-separated.")] = "naive,legolink:16",
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    json_path: JsonOption = None,
    model: ModelOption = "smollm2",
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
) -> None:
    """How cost and memory grow with the number of chunks."""
    from epic_engine import parse_policies

    from epic_rag.benchmarks.ttft import bench_scaling

    with _bench_engine(model, device, dtype) as engine, stage_progress("measurements") as progress:
        result = bench_scaling(
            engine,
            [int(c) for c in chunks.split(",")],
            chunk_tokens=chunk_tokens,
            policies=[str(policy) for policy in parse_policies(policies)],
            repeats=repeats,
            progress=progress,
        )
    _finish(result, json_path)
    out.print(scaling_table(result))


@bench_app.command("ingest")
def bench_ingest(
    dataset: DatasetOption,
    limit: Annotated[int, typer.Option(min=1, help="Examples whose documents are compiled.")] = 6,
    contexts: Annotated[str, typer.Option(help="Comma-separated.")] = "isolated,head,neighbours:1,neighbours:2",
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    json_path: JsonOption = None,
    model: ModelOption = "smollm2",
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
) -> None:
    """What compiling costs in each context, against compiling in isolation."""
    from epic_rag.benchmarks.ingest import bench_ingest
    from epic_rag.compiling import parse_context_name
    from epic_rag.evaluation.datasets import load
    from epic_rag.retrieval import MiniLMEmbedder

    names = [c.strip() for c in contexts.split(",") if c.strip()]
    wanted = [parse_context_name(name)[0] for name in names]
    texts = [text for example in load(dataset, limit=limit) for text in example.documents]
    with _bench_engine(model, device, dtype) as engine, stage_progress("contexts") as progress:
        embedder = MiniLMEmbedder() if "neighbours" in wanted else None
        result = bench_ingest(engine, texts, names, embedder=embedder, repeats=repeats, progress=progress)
    _finish(result, json_path)
    out.print(ingest_table(result))


def _finish(result: dict[str, Any], path: Path | None) -> None:
    result["command"] = " ".join(["epic-rag", *sys.argv[1:]])
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
