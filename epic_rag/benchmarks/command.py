"""``epic-rag bench``. Registered by :mod:`epic_rag.cli`; heavy modules are imported when a command runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from epic_rag.cli_options import DatasetOption, DeviceOption, DtypeOption, JsonFileOption, ModelOption
from epic_rag.console import (
    err,
    ingest_progress,
    ingest_table,
    out,
    scaling_table,
    serve_tables,
    stage_progress,
    ttft_table,
)

if TYPE_CHECKING:
    from epic_engine import Engine

__all__ = ["bench_app"]

_Number = TypeVar("_Number", int, float)

bench_app = typer.Typer(help="Measure on this machine.", no_args_is_help=True)


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
    json_path: JsonFileOption = None,
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
    json_path: JsonFileOption = None,
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
    json_path: JsonFileOption = None,
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


@bench_app.command("serve")
def bench_serve(
    dataset: Annotated[
        str, typer.Option("--dataset", help="Documents and questions; a file or generated data set.")
    ] = "templated",
    limit: Annotated[int, typer.Option(min=1, help="Examples to take.")] = 24,
    parts: Annotated[
        str, typer.Option(help="Comma-separated: load, saturation, decode, beside, memory.")
    ] = "load,saturation,decode,beside,memory",
    policies: Annotated[str, typer.Option(help="Comma-separated.")] = "full,prefix,legolink:16,query_aware:0.1",
    context: Annotated[str, typer.Option(help="Compile context.")] = "isolated",
    rates: Annotated[str, typer.Option(help="Arrivals a second, comma-separated.")] = "0.5,1,2",
    tokens: Annotated[str, typer.Option(help="Output tokens, comma-separated; saturation takes the first.")] = "16",
    requests: Annotated[int, typer.Option(min=1, help="Requests a policy at each rate and in each round.")] = 32,
    k: Annotated[int, typer.Option("--k", "-k", min=1, help="Chunks of a request.")] = 6,
    exponent: Annotated[float, typer.Option(min=0, help="Of the chunks' popularity (Zipf); 0 is uniform.")] = 1.0,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once; in load it follows from rates.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of interleaved policies.")] = 3,
    decode_tokens: Annotated[int, typer.Option(min=2, help="Output tokens in decode.")] = 128,
    beside_chunks: Annotated[int, typer.Option(min=1, help="Chunks of the long requests.")] = 64,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small run: caps rates, requests, rounds and tokens.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of arrivals and draws.")] = 0,
    json_path: JsonFileOption = None,
    png: Annotated[Path | None, typer.Option("--png", help="Draw latency and throughput into this file.")] = None,
    model: ModelOption = "smollm2",
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
) -> None:
    """Many requests at once: latency under load, throughput, decoding, fairness and memory per policy."""
    from epic_engine import parse_policies

    from epic_rag.benchmarks.serve import ServeSettings, bench_serve
    from epic_rag.benchmarks.serve_corpus import compile_corpus
    from epic_rag.benchmarks.serve_plot import draw_serve
    from epic_rag.compiling import parse_context_name
    from epic_rag.evaluation.datasets import load
    from epic_rag.evaluation.plots import require_matplotlib
    from epic_rag.retrieval import MiniLMEmbedder
    from epic_rag.tokenization import SegmentTokenizer

    settings = ServeSettings(
        policies=tuple(str(policy) for policy in parse_policies(policies)),
        parts=tuple(part.strip() for part in parts.split(",") if part.strip()),
        rates=tuple(_numbers(rates, float, "rates")),
        tokens=tuple(_numbers(tokens, int, "tokens")),
        requests=requests,
        k=k,
        exponent=exponent,
        concurrency=concurrency,
        rounds=rounds,
        decode_tokens=decode_tokens,
        beside_chunks=beside_chunks,
        seed=seed,
    )
    if quick:
        settings = settings.capped()
    near = parse_context_name(context)[0] == "neighbours"
    if png is not None:
        require_matplotlib("the picture needs", "--png")
    load(dataset, limit=1, seed=seed)
    with _bench_engine(model, device, dtype) as engine, ingest_progress() as progress:
        count = SegmentTokenizer(engine.tokenizer).encode_text
        examples = load(dataset, limit=limit, seed=seed, count_tokens=lambda text: len(count(text)))
        corpus = compile_corpus(
            engine,
            examples,
            context=context,
            seed=seed,
            embedder=MiniLMEmbedder() if near else None,
            progress=lambda done, total: progress("compile", done, total),
        )
        facts = {"dataset": dataset, "context": context}
        result = bench_serve(
            engine, corpus, settings, progress=progress, save=lambda found: _finish({**facts, **found}, json_path)
        )
    _finish(result := {**facts, **result}, json_path)
    for table in serve_tables(result):
        out.print(table)
    picture = draw_serve(result) if png is not None else None
    if png is not None and picture is not None:
        png.parent.mkdir(parents=True, exist_ok=True)
        png.write_bytes(picture)
    if result["interrupted"]:
        raise typer.Exit(130)


@bench_app.command("store")
def bench_store(
    chunks: Annotated[int, typer.Option(min=1, help="Tiny chunks to put.")] = 1_000_000,
    batch: Annotated[int, typer.Option(min=1, help="Chunks of one put.")] = 1000,
    parts: Annotated[str, typer.Option("--part", help="Comma-separated: chunks, loads.")] = "chunks,loads",
    lookups: Annotated[int, typer.Option(min=1, help="Look-ups of each kind.")] = 10_000,
    loads: Annotated[int, typer.Option(min=1, help="Chunks whose loads are timed, 8.4 MiB each.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Times each way to load is timed.")] = 7,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Keep the stores here, and go on with what is there; else they are removed."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the chunks.")] = 0,
    json_path: JsonFileOption = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw rates and latencies into this PNG file.")] = None,
) -> None:
    """The chunk store with very many chunks: puts, look-ups, memory, and loads against plain reads. No model."""
    from contextlib import nullcontext
    from tempfile import TemporaryDirectory

    from epic_rag.benchmarks.store import StoreSettings, bench_store
    from epic_rag.benchmarks.store_plot import draw_store
    from epic_rag.benchmarks.store_tables import store_tables
    from epic_rag.evaluation.plots import require_matplotlib

    if plot is not None:
        require_matplotlib("the picture needs", "--plot")
    settings = StoreSettings(
        parts=tuple(part.strip() for part in parts.split(",") if part.strip()),
        chunks=chunks,
        batch=batch,
        lookups=lookups,
        loads=loads,
        rounds=rounds,
        seed=seed,
    )
    place = TemporaryDirectory(prefix="epic-store-") if directory is None else nullcontext(str(directory))
    with place as folder, ingest_progress() as progress:
        result = bench_store(
            Path(folder), settings, progress=progress, save=lambda found: _finish(dict(found), json_path)
        )
    _finish(result, json_path)
    for table in store_tables(result):
        out.print(table)
    picture = draw_store(result) if plot is not None else None
    if plot is not None and picture is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        plot.write_bytes(picture)
    if result["interrupted"]:
        if directory is not None:
            err.print(f"interrupted: the same command with --dir {directory} goes on.", highlight=False)
        raise typer.Exit(130)


@bench_app.command("gateway")
def bench_gateway(
    dataset: DatasetOption,
    limit: Annotated[int, typer.Option(min=1, help="Examples to take.")] = 16,
    url: Annotated[
        str | None, typer.Option(help="A gateway that runs, such as http://127.0.0.1:8000; else one is started.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="API key of that gateway.", envvar="EPIC_RAG_API_KEY")] = None,
    policies: Annotated[str, typer.Option(help="Comma-separated, measured one after another.")] = "auto,prefix",
    clients: Annotated[int, typer.Option(min=1, help="Streaming clients at once.")] = 64,
    seconds: Annotated[float, typer.Option(min=1, help="For which requests are begun, for each policy.")] = 120.0,
    k: Annotated[int, typer.Option("--k", "-k", min=1, help="Chunks that a request names.")] = 6,
    tokens: Annotated[int, typer.Option(min=1, help="Output tokens.")] = 16,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    json_path: JsonFileOption = None,
    model: ModelOption = "smollm2",
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
) -> None:
    """Many streaming clients of an OpenAI-compatible gateway at once: throughput and TTFT per policy, over HTTP."""
    from contextlib import nullcontext

    from epic_rag.benchmarks.gateway import GatewayLoad, bench_gateway, own_gateway
    from epic_rag.benchmarks.gateway_table import gateway_table
    from epic_rag.evaluation.datasets import load

    plan = GatewayLoad(
        policies=tuple(name.strip() for name in policies.split(",") if name.strip()),
        clients=clients,
        seconds=seconds,
        k=k,
        tokens=tokens,
        seed=seed,
    )
    examples = load(dataset, limit=limit, seed=seed)
    own = own_gateway("--model", model, "--device", device, "--dtype", dtype, requests=clients)
    with nullcontext(url) if url is not None else own as address, ingest_progress() as progress:
        result = bench_gateway(address, examples, plan, key=key, progress=progress)
    _finish(result, json_path)
    out.print(gateway_table(result))


def _numbers(text: str, kind: type[_Number], name: str) -> list[_Number]:
    try:
        return [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of numbers, as in '1,2'.", param_hint=f"--{name}") from None


def _finish(result: dict[str, Any], path: Path | None) -> None:
    result["command"] = " ".join(["epic-rag", *sys.argv[1:]])
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
