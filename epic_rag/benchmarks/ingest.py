"""What compiling costs in each context: time and bytes over those of compiling in isolation, in one run."""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from epic_engine import Engine

from epic_rag.benchmarks.ttft import machine
from epic_rag.compiling import compile_chunks, parse_context_name
from epic_rag.errors import DocumentError
from epic_rag.neighbours import Pool
from epic_rag.prompt import PromptComposer
from epic_rag.retrieval import Embedder

__all__ = ["bench_ingest"]

Progress = Callable[[int, int], None]
_BASE = "isolated"


def bench_ingest(
    engine: Engine,
    texts: Sequence[str],
    contexts: Sequence[str],
    *,
    embedder: Embedder | None = None,
    repeats: int = 3,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Compile the same documents in several contexts, the contexts in a new order each time.

    Parameters
    ----------
    engine
        With a tokenizer and an empty store.
    texts
        Documents; equal ones count once.
    contexts
        Compile contexts; ``isolated`` always runs, it is what the others are compared with.
    embedder
        Chooses neighbours; embedding is timed apart, for retrieval needs it anyway.
    repeats
        Times each context is measured; medians are reported.
    seed
        Of the orders.
    progress
        Called with measurements done and to do.

    Returns
    -------
    dict
        ``contexts``: per context seconds, bytes and their ratios to ``isolated``; for neighbours also
        ``second_pass``, what comes after the ``head`` form of every chunk, as a ratio to ``isolated``.

    Raises
    ------
    DocumentError
        If the store is not empty: what it holds would cost nothing.
    """
    if next(iter(engine.store.entries()), None) is not None:
        raise DocumentError("the store holds chunks already, which would cost nothing: measure with an empty one.")
    composer = PromptComposer(engine.tokenizer)
    texts = list(dict.fromkeys(texts))
    ids = [composer.encode_chunk(text) for text in texts]
    names = list(dict.fromkeys([_BASE, *contexts]))
    near: dict[str, Any] = {}
    embed_seconds = 0.0
    if any(parse_context_name(name)[0] == "neighbours" for name in names):
        if embedder is None:
            raise DocumentError("neighbours are chosen by their embeddings: pass embedder=….")
        begin = time.perf_counter()
        vectors = embedder.embed(texts)
        embed_seconds = time.perf_counter() - begin
        near = {"vectors": vectors, "pool": Pool(texts, vectors, lambda places: [ids[i] for i in places])}
    compile_chunks(engine, ids[:2], texts[:2], _BASE, composer=composer)  # warm-up
    seconds: dict[str, list[float]] = defaultdict(list)
    first: dict[str, list[float]] = defaultdict(list)
    stored: dict[str, int] = {}
    rng, done = random.Random(seed), 0
    for _ in range(repeats):
        for name in rng.sample(names, len(names)):
            if progress:
                progress(done, repeats * len(names))
            _clear(engine)
            begin = time.perf_counter()
            if parse_context_name(name)[0] == "neighbours":
                compile_chunks(engine, ids, texts, "head", composer=composer)
                first[name].append(time.perf_counter() - begin)
            compile_chunks(engine, ids, texts, name, composer=composer, **(near if name in first else {}))
            seconds[name].append(time.perf_counter() - begin)
            stored[name] = sum(entry.nbytes for entry in engine.store.entries())
            done += 1
    _clear(engine)
    if progress:
        progress(done, done)
    base = statistics.median(seconds[_BASE])
    table: dict[str, dict[str, float]] = {}
    for name in names:
        took = statistics.median(seconds[name])
        table[name] = {
            "seconds": took,
            "ratio": statistics.median(a / b for a, b in zip(seconds[name], seconds[_BASE], strict=True)),
            "bytes": stored[name],
            "bytes_ratio": stored[name] / stored[_BASE],
        }
        if name in first:
            second = [whole - part for whole, part in zip(seconds[name], first[name], strict=True)]
            table[name]["second_pass"] = statistics.median(second) / base
    return {
        "machine": {**machine(), "device": str(engine.device)},
        "model": engine.spec.architecture,
        "dtype": str(engine.spec.dtype).removeprefix("torch."),
        "chunks": len(ids),
        "tokens": sum(map(len, ids)),
        "repeats": repeats,
        "embed_seconds": embed_seconds,
        "contexts": table,
    }


def _clear(engine: Engine) -> None:
    engine.forget([entry.key for entry in list(engine.store.entries())])
