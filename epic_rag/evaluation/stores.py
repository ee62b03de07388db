"""Where an evaluation's compiled documents come from."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from epic_engine import ChunkKey, ConfigError, Engine

from epic_rag.compiling import compile_chunks, parse_context_name
from epic_rag.corpus import CorpusCompiler
from epic_rag.evaluation.example import EvalExample
from epic_rag.neighbours import Pool
from epic_rag.pipeline import EpicRAG
from epic_rag.prompt import PromptComposer
from epic_rag.retrieval import Embedder, Vectors

__all__ = ["CorpusStore", "DataSetStores", "DocumentStore"]


class DocumentStore(Protocol):
    """Compiles documents for an evaluation."""

    @property
    def composer(self) -> PromptComposer:
        """Of prompts with the default system prompt, whose head documents may be compiled behind."""
        ...

    def gather(self, examples: Sequence[EvalExample]) -> None:
        """Take note of all examples that will be asked for."""
        ...

    def keys(self, example: EvalExample, ids: Sequence[tuple[int, ...]], context: str) -> list[ChunkKey]:
        """Compile an example's documents in a context, given their token ids."""
        ...

    def on(self, engine: Engine) -> DocumentStore:
        """The same documents, compiled by another engine of the same model."""
        ...


@dataclass
class _Documents:
    texts: tuple[str, ...]
    vectors: Vectors | None = None
    pool: Pool | None = None


class DataSetStores:
    """The stores that a data set speaks of: a chunk's neighbours are sought among all documents of its store.

    Parameters
    ----------
    engine
        Compiles.
    composer
        Its head is compiled behind.
    embedder
        Chooses neighbours.
    """

    def __init__(self, engine: Engine, composer: PromptComposer, embedder: Embedder | None) -> None:
        self.composer = composer
        self._engine = engine
        self._embedder = embedder
        self._stores: dict[str, _Documents] = {}

    def on(self, engine: Engine) -> DataSetStores:
        """The same documents, compiled by another engine; what was embedded once is shared."""
        other = copy.copy(self)
        other._engine = engine
        return other

    def gather(self, examples: Sequence[EvalExample]) -> None:
        """Note which documents each store holds; they are embedded when neighbours are sought."""
        texts: dict[str, dict[str, None]] = defaultdict(dict)
        for example in examples:
            texts[example.corpus].update(dict.fromkeys((*example.documents, *example.others)))
        self._stores.clear()
        self._stores.update({name: _Documents(tuple(found)) for name, found in texts.items()})

    def keys(self, example: EvalExample, ids: Sequence[tuple[int, ...]], context: str) -> list[ChunkKey]:
        """Compile; an example that was not gathered stands in a store of its own."""
        composer = self.composer
        if parse_context_name(context)[0] != "neighbours":
            return compile_chunks(self._engine, ids, example.documents, context, composer=composer)
        if self._embedder is None:
            raise ConfigError("neighbours are chosen by their embeddings: pass embedder=… to Evaluation().")
        store = self._stores.get(example.corpus)
        if store is None or not set(store.texts).issuperset(example.documents):
            store = _Documents(tuple(dict.fromkeys((*example.documents, *example.others))))
        if store.vectors is None:
            store.vectors = self._embedder.embed(store.texts)
        texts = store.texts
        if store.pool is None:
            store.pool = Pool(texts, store.vectors, lambda places: [composer.encode_chunk(texts[i]) for i in places])
        vectors = store.vectors[[texts.index(t) for t in example.documents]]
        return compile_chunks(
            self._engine, ids, example.documents, context, composer=composer, vectors=vectors, pool=store.pool
        )


class CorpusStore:
    """A directory of documents: what is compiled there already costs nothing, and neighbours come from all of it.

    Parameters
    ----------
    rag
        The directory.
    """

    def __init__(self, rag: EpicRAG) -> None:
        self.composer = rag.composer
        self._rag = rag
        self._compilers: dict[str, tuple[CorpusCompiler, Pool | None]] = {}

    def on(self, engine: Engine) -> CorpusStore:
        """Refused: a directory belongs to one engine."""
        raise ConfigError("a directory's chunks are kept as its engine says: open it with another kv_dtype instead.")

    def gather(self, examples: Sequence[EvalExample]) -> None:
        """The directory knows its documents."""

    def keys(self, example: EvalExample, ids: Sequence[tuple[int, ...]], context: str) -> list[ChunkKey]:
        """Compile as an ingest would."""
        rag = self._rag
        if context not in self._compilers:
            compiler = CorpusCompiler(rag.engine, rag.registry, rag.composer, context)
            self._compilers[context] = compiler, compiler.pool([], [])
        compiler, pool = self._compilers[context]
        return compiler.compile(ids, example.documents, rag.embedder.embed(example.documents), pool, None)
