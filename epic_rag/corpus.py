"""How the chunks of one directory are compiled: its context, its frozen head, its neighbours."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np
from epic_engine import ChunkKey, CompileContext, CompileEstimate, Engine

from epic_rag.compiling import Pool, compile_chunks, parse_context_name
from epic_rag.ingest import PendingDocument
from epic_rag.prompt import PromptComposer
from epic_rag.registry import Registry
from epic_rag.retrieval import Vectors

__all__ = ["CorpusCompiler", "frozen_head"]

# The second pass over a chunk reads its neighbours besides, so it takes somewhat longer than the first.
_SECOND_PASS = 1.2


class CorpusCompiler:
    """Compiles the chunks of one directory.

    Parameters
    ----------
    engine, registry, composer
        Of the directory.
    context
        ``"isolated"``, ``"sink:n"``, ``"head"`` or ``"neighbours:n"``.

    Attributes
    ----------
    name
        The context.
    head
        Token ids that chunks are compiled behind; empty where the context has no head.
    """

    def __init__(self, engine: Engine, registry: Registry, composer: PromptComposer, context: str) -> None:
        self.name = context
        self.head = frozen_head(context, registry, composer)
        self._engine = engine
        self._registry = registry
        self._composer = composer

    @property
    def wants_neighbours(self) -> bool:
        """Whether chunks see other chunks while they are compiled."""
        return parse_context_name(self.name)[0] == "neighbours"

    def estimate(self, chunks: Sequence[Sequence[int]]) -> CompileEstimate:
        """What :meth:`compile` will take for these chunks, both passes of neighbours included."""
        if not self.wants_neighbours:
            return self._engine.estimate(chunks, self.plain_context())
        todo = [ids for ids in dict.fromkeys(map(tuple, chunks)) if self._linked_form(ids) is None]
        first = self._engine.estimate(todo, self.plain_context())
        every = self._engine.estimate(todo, self.plain_context(), known_too=True)
        return CompileEstimate(
            chunks=len(todo),
            tokens=every.tokens,
            disk_bytes=first.disk_bytes + every.disk_bytes,
            memory_bytes=every.memory_bytes,
            seconds=first.seconds + _SECOND_PASS * every.seconds,
        )

    def plain_context(self) -> str | CompileContext:
        """The context that needs no neighbours: what is compiled first, and fallen back to."""
        return CompileContext("head", self.head) if self.head else self.name

    def _linked_form(self, token_ids: Sequence[int]) -> ChunkKey | None:
        """A form of these tokens that saw neighbours, if there is one."""
        key = self._engine.find(token_ids, self.plain_context())
        forms = self._engine.forms(token_ids) if key is not None else []
        return next((f.key for f in reversed(forms) if f.context == self.name), None)

    def pool(self, pending: Sequence[PendingDocument], vectors: Sequence[Vectors]) -> Pool | None:
        """Everything that may become a neighbour: what is being added and what is there; None if none is wanted.

        Parameters
        ----------
        pending
            Documents that are being added.
        vectors
            Embeddings of their chunks, in the same order.
        """
        if not self.wants_neighbours:
            return None
        new = [ids for p in pending for ids in p.ids]
        replaced = {p.document.doc_id for p in pending}
        known, matrix = self._registry.embeddings()
        keep = [i for i, chunk_id in enumerate(known) if chunk_id.rpartition("#")[0] not in replaced]
        known, matrix = [known[i] for i in keep], matrix[keep]

        def resolve(places: Sequence[int]) -> list[tuple[int, ...]]:
            there = [known[i - len(new)] for i in places if i >= len(new)]
            records = {r.chunk_id: r.token_ids for r in self._registry.chunks_by_id(there)}
            return [new[i] if i < len(new) else records[known[i - len(new)]] for i in places]

        return Pool(np.concatenate([*vectors, matrix]) if known else np.concatenate(vectors), resolve)

    def compile(
        self,
        ids: Sequence[tuple[int, ...]],
        vectors: Vectors,
        pool: Pool | None,
        progress: Callable[[int, int], None] | None,
    ) -> list[ChunkKey]:
        """Compile chunks in this corpus's context; one that has such a form already costs nothing.

        Parameters
        ----------
        ids, vectors
            Token ids and embeddings of the chunks.
        pool
            From :meth:`pool`.
        progress
            Called with tokens done and tokens to do.
        """
        if pool is None:
            return self._engine.compile_many(ids, self.plain_context(), progress=progress)
        keys = {own: key for own in dict.fromkeys(ids) if (key := self._linked_form(own)) is not None}
        todo = [i for i, own in enumerate(ids) if own not in keys]
        if todo:
            chunks = [ids[i] for i in todo]
            made = compile_chunks(
                self._engine,
                chunks,
                [""] * len(chunks),
                self.name,
                composer=self._composer,
                head=self.head,
                vectors=vectors[todo],
                pool=pool,
                progress=progress,
            )
            keys.update(zip(chunks, made, strict=True))
        return [keys[own] for own in ids]


def frozen_head(context: str, registry: Registry, composer: PromptComposer) -> tuple[int, ...]:
    """The head to compile behind: the first one ever used in this directory."""
    if parse_context_name(context)[0] not in ("head", "neighbours"):
        return ()
    stored = registry.get_setting("compile_head")
    ids = tuple(json.loads(stored)) if stored else composer.head_ids
    registry.freeze_setting("compile_head", json.dumps(list(ids)))
    return ids
