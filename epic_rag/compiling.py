"""From chunks' texts to compiled chunks: which head they stand behind, and which neighbours they see.

The engine compiles token ids behind what it is given. Which other chunks are likely to be retrieved together with a
chunk is known on this side: those whose embeddings are nearest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from epic_engine import ChunkKey, CompileContext, ConfigError, Engine

from epic_rag.neighbours import Pool, choose_neighbours
from epic_rag.prompt import PromptComposer
from epic_rag.retrieval import Embedder, Vectors

__all__ = ["ContextName", "compile_chunks", "parse_context_name"]

Progress = Callable[[int, int], None]
ContextName = tuple[str, int]
"""Name of a compile context and its number: ``("neighbours", 1)``, ``("sink", 4)``, ``("head", 0)``."""


def parse_context_name(text: str) -> ContextName:
    """A compile context's name and number.

    Raises
    ------
    ConfigError
        If it is unknown or its number does not fit.
    """
    name, _, argument = text.strip().partition(":")
    if name in ("isolated", "head") and not argument:
        return name, 0
    if name in ("sink", "neighbours"):
        most = 3 if name == "neighbours" else 1024
        if argument.isdigit() and 1 <= int(argument) <= most:
            return name, int(argument)
        raise ConfigError(f"context={text!r} needs a number from 1 to {most}, as in '{name}:1'.")
    raise ConfigError(f"unknown compile context {text!r}: use 'isolated', 'sink:n', 'head' or 'neighbours:n'.")


def compile_chunks(
    engine: Engine,
    ids: Sequence[Sequence[int]],
    texts: Sequence[str],
    context: str,
    *,
    composer: PromptComposer,
    embedder: Embedder | None = None,
    head: Sequence[int] | None = None,
    vectors: Vectors | None = None,
    pool: Pool | None = None,
    progress: Progress | None = None,
) -> list[ChunkKey]:
    """Compile chunks in a context named by a string.

    Parameters
    ----------
    engine
        Compiles and keeps them.
    ids, texts
        Token ids and texts of the chunks.
    context
        ``"isolated"``, ``"sink:n"``, ``"head"`` or ``"neighbours:n"``.
    composer
        Gives the head where ``head`` is None.
    embedder, vectors
        For neighbours: one of them is needed.
    head
        Token ids of the head to compile behind.
    pool
        Chunks that may become neighbours; by default the chunks themselves.
    progress
        Called with tokens done and tokens to do.

    Raises
    ------
    ConfigError
        If the context is unknown, or neighbours are asked for without vectors or embedder.
    """
    name, number = parse_context_name(context)
    behind = composer.head_ids if head is None else tuple(head)
    if name == "head":
        return engine.compile_many(ids, CompileContext("head", tuple(behind)), progress=progress)
    if name != "neighbours":
        return engine.compile_many(ids, context, progress=progress)
    if vectors is None:
        if embedder is None:
            raise ConfigError(f"context={context!r} needs an embedder to choose the neighbours.")
        vectors = embedder.embed(texts)
    pool = pool or Pool(texts, vectors, lambda places: [ids[i] for i in places])
    chosen = choose_neighbours(ids, texts, vectors, pool, number)
    room = engine.max_model_len - len(behind)
    fitting = [_fit(own, others, room) for own, others in zip(ids, chosen, strict=True)]
    return engine.compile_neighbours(ids, fitting, head=behind, progress=progress)


def _fit(own: Sequence[int], others: list[tuple[int, ...]], room: int) -> list[tuple[int, ...]]:
    """The nearest neighbours that fit the context together with the chunk."""
    kept: list[tuple[int, ...]] = []
    left = room - len(own)
    for other in reversed(others):
        if len(other) <= left:
            kept.insert(0, other)
            left -= len(other)
    return kept
