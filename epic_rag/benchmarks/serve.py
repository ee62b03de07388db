"""Many requests at once, measured: latency under load, throughput, decoding, fairness and memory, per policy.

Clients use the engine as an application does: a thread a request, which iterates over its stream. All policies are
given the same requests, at the same times, in one process; what is compared are ratios within one run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from epic_engine import Engine

from epic_rag.benchmarks.serve_clients import Clients, ReadMemory, Timeline, engine_memory
from epic_rag.benchmarks.serve_corpus import Corpus
from epic_rag.benchmarks.serve_parts import PARTS, ServeSettings, steps
from epic_rag.benchmarks.ttft import machine

__all__ = ["ServeSettings", "bench_serve"]

Progress = Callable[[str, int, int], None]
Save = Callable[[Mapping[str, Any]], None]


def bench_serve(
    engine: Engine,
    corpus: Corpus,
    settings: ServeSettings,
    *,
    timeline: Timeline | None = None,
    read_memory: ReadMemory = engine_memory,
    progress: Progress | None = None,
    save: Save | None = None,
) -> dict[str, Any]:
    """Measure the chosen parts one after another.

    Every policy answers one request before, which is not counted. A request that is refused or fails is counted and
    not raised. After Ctrl-C running requests are cancelled and what was measured so far comes back.

    Parameters
    ----------
    engine
        Serves the requests; ``prefix`` keeps a radix cache over all earlier prompts of the run.
    corpus
        Compiled by it, see :func:`~epic_rag.benchmarks.serve_corpus.compile_corpus`.
    settings
        What to measure.
    timeline
        Time and threads; real ones by default.
    read_memory
        Reads what the engine holds.
    progress
        Called with a part's name, its steps done and to do.
    save
        Called with the result so far after each step.

    Returns
    -------
    dict
        ``machine``, ``settings``, ``corpus``, ``interrupted``, and a key a part: ``load`` (list of cells),
        ``saturation``, ``decode``, ``beside`` and ``memory`` (by policy). Times in seconds, sizes in bytes.

    Raises
    ------
    ConfigError
        If answers do not fit the context, or the corpus is too small for ``decode``.
    """
    _check(corpus, settings)
    clients = Clients(engine, timeline, read_memory)
    result: dict[str, Any] = {
        "machine": {**machine(), "device": str(engine.device)},
        "model": engine.spec.architecture,
        "dtype": str(engine.spec.dtype).removeprefix("torch."),
        "max_model_len": engine.max_model_len,
        "settings": asdict(settings),
        "corpus": {
            "chunks": len(corpus.chunks),
            "tokens": sum(len(c.token_ids) for c in corpus.chunks),
            "head_tokens": len(corpus.head.token_ids),
        },
        "interrupted": False,
    }
    try:
        for policy in settings.policies:
            clients.ask(corpus.request(range(min(settings.k, len(corpus.chunks))), 0, settings.tokens[0]), policy)
        for part, total in steps(settings).items():
            if progress:
                progress(part, 0, total)
            for done, figures in enumerate(PARTS[part](clients, corpus, settings), start=1):
                result[part] = figures
                if progress:
                    progress(part, done, total)
                if save:
                    save(result)
        result["memory_at_end"] = dict(clients.memory())
    except KeyboardInterrupt:
        result["interrupted"] = True
    return result


def _check(corpus: Corpus, settings: ServeSettings) -> None:
    """Fail before anything is measured where a later part could not run."""
    longest = max(settings.tokens)
    if "decode" in settings.parts:
        corpus.disjoint(settings.concurrency, settings.k)
        longest = max(longest, settings.decode_tokens)
    for tail in range(len(corpus.tails)):
        corpus.request((), tail, longest)
