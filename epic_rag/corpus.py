"""How the chunks of one directory are compiled: its context, its frozen head, its neighbours."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
from epic_engine import ChunkKey, CompileContext, CompileEstimate, Engine
from epic_engine.compiler import pack

from epic_rag.compiling import compile_chunks, parse_context_name
from epic_rag.errors import RegistryError
from epic_rag.ingest import PendingDocument
from epic_rag.neighbours import FormIndex, Pool
from epic_rag.prompt import PromptComposer
from epic_rag.registry import ChunkRecord, Registry
from epic_rag.retrieval import Embedder, Vectors

__all__ = ["CorpusCompiler", "frozen_head"]

logger = logging.getLogger(__name__)

# The second pass over a chunk reads its neighbours besides, so it takes somewhat longer than the first.
_SECOND_PASS = 1.5


class CorpusCompiler:
    """Compiles the chunks of one directory.

    Parameters
    ----------
    engine, registry, composer
        Of the directory.
    context
        ``"isolated"``, ``"sink:n"``, ``"head"`` or ``"neighbours:n"``.
    keep_head_forms
        Whether forms without neighbours are kept beside those with.

    Attributes
    ----------
    name
        The context.
    head
        Token ids that chunks are compiled behind; empty where the context has no head.
    """

    def __init__(
        self,
        engine: Engine,
        registry: Registry,
        composer: PromptComposer,
        context: str,
        *,
        keep_head_forms: bool = True,
    ) -> None:
        self.name = context
        self.keep_head_forms = keep_head_forms
        self.head = frozen_head(context, registry, composer)
        self._engine = engine
        self._registry = registry
        self._composer = composer
        self._forms = FormIndex()

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

    def _is_current(self, token_ids: Sequence[int], key: ChunkKey) -> bool:
        """Whether a chunk of this key is there and compiled in this context, as far as it has neighbours."""
        if not self._engine.has(key):
            return False
        if not self.wants_neighbours:
            return key == self._engine.key_of(token_ids, self.plain_context())
        return self._linked_form(token_ids) == key

    def _forget_other_forms(self, chunks: Sequence[Sequence[int]], keys: Sequence[ChunkKey]) -> None:
        """Forget all forms of chunks but the given ones, and those without neighbours if they are kept."""
        stale: list[ChunkKey] = []
        for ids, key in zip(chunks, keys, strict=True):
            keep = {key}
            if self.wants_neighbours:
                keep.add(self._engine.key_of(ids, self.plain_context()))
            stale += [form.key for form in self._engine.forms(ids) if form.key not in keep]
        self._engine.forget(stale)

    def tidy(self) -> int:
        """Forget forms without neighbours of chunks that have one with, unless they are kept; returns how many."""
        if self.keep_head_forms or not self.wants_neighbours:
            return 0
        mine = [e for e in self._engine.store.entries() if self._engine.has(e.key)]
        linked = {e.content for e in mine if e.depends}
        plain = self.plain_context()
        spare = [
            e.key
            for e in mine
            if not e.depends and e.content in linked and e.key == self._engine.key_of(e.token_ids, plain)
        ]
        return self._engine.forget(spare)

    def pool(
        self, pending: Sequence[PendingDocument], vectors: Sequence[Vectors], *, known_too: bool = True
    ) -> Pool | None:
        """Everything that may become a neighbour: what is being added and what is there; None if none is wanted.

        Parameters
        ----------
        pending
            Documents that are being added.
        vectors
            Embeddings of their chunks, in the same order.
        known_too
            Whether everything that is there may become a neighbour; reading it takes time in large corpora.
        """
        if not self.wants_neighbours:
            return None
        new = [ids for p in pending for ids in p.ids]
        replaced = {p.document.doc_id for p in pending}
        known, matrix = self._registry.embeddings() if known_too else ([], np.empty((0, 0), np.float32))
        keep = [i for i, chunk_id in enumerate(known) if chunk_id.rpartition("#")[0] not in replaced]
        known, matrix = [known[i] for i in keep], matrix[keep]

        def resolve(places: Sequence[int]) -> list[tuple[int, ...]]:
            there = [known[i - len(new)] for i in places if i >= len(new)]
            records = {r.chunk_id: r.token_ids for r in self._registry.chunks_by_id(there)}
            return [new[i] if i < len(new) else records[known[i - len(new)]] for i in places]

        texts = [text for p in pending for text in p.texts]
        texts += self._registry.texts(known) if known else []
        everything = np.concatenate([*vectors, matrix]) if known else np.concatenate(vectors)
        return Pool(texts, everything, resolve, self._forms)

    def compile(
        self,
        ids: Sequence[tuple[int, ...]],
        texts: Sequence[str],
        vectors: Vectors,
        pool: Pool | None,
        progress: Callable[[int, int], None] | None,
    ) -> list[ChunkKey]:
        """Compile chunks in this corpus's context; one that has such a form already costs nothing.

        Parameters
        ----------
        ids, texts, vectors
            Token ids, texts and embeddings of the chunks.
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
                [texts[i] for i in todo],
                self.name,
                composer=self._composer,
                head=self.head,
                vectors=vectors[todo],
                pool=pool,
                progress=progress,
            )
            keys.update(zip(chunks, made, strict=True))
        return [keys[own] for own in ids]

    def form_of(self, record: ChunkRecord) -> ChunkKey:
        """A chunk's best form for this model; compiled now if it has none."""
        key = ChunkKey(record.key)
        if self._engine.has(key):
            return key
        plain = self.plain_context()
        found = self._engine.find(record.token_ids, plain)
        if found is None:
            logger.info("chunk %s has no KV for this model: compiling it now", record.chunk_id)
            found = self._engine.compile(record.token_ids, plain)
        return found

    def erase(self, records: Sequence[ChunkRecord], freed: Sequence[str]) -> None:
        """Forget the KV of text that no document has any more, and of chunks that saw it while they were compiled.

        Parameters
        ----------
        records
            Chunks that went.
        freed
            Keys that the registry says nothing uses any more.
        """
        # Another process may have begun to use a key again; if it does so right now, its next link is a miss.
        gone = {key for key in freed if not self._registry.reference_count(key)}
        self._engine.erase([r.token_ids for r in records if r.key in gone])

    def restore(self, embedder: Embedder) -> int:
        """Compile again what the store has lost, or what fell back when a neighbour went; returns how many were."""
        keys = self._registry.all_keys()
        held = self._engine.store.known([ChunkKey(key) for key in keys])
        missing = [key for key in keys if ChunkKey(key) not in held]
        if not missing:
            return 0
        records = self._registry.chunks_by_key(missing)
        texts = [r.text for r in records]
        made = self.compile([r.token_ids for r in records], texts, embedder.embed(texts), self.pool([], []), None)
        for record, key in zip(records, made, strict=True):
            if key.hex != record.key:
                self._registry.update_key(record.key, key.hex)
        return len(records)

    def recompile(self, progress: Callable[[int, int], None] | None = None) -> int:
        """Compile every chunk in this context and forget its other forms.

        Each batch is durable before the next, so a repeated call goes on where an interrupted one stopped.

        Parameters
        ----------
        progress
            Called with tokens done and tokens to do.

        Returns
        -------
        int
            Chunks whose form changed.
        """
        records: dict[tuple[int, ...], list[ChunkRecord]] = defaultdict(list)
        for record in self._registry.chunks_by_key(self._registry.all_keys()):
            records[record.token_ids].append(record)
        todo = [i for i, found in records.items() if not all(self._is_current(i, ChunkKey(r.key)) for r in found)]
        if not todo:
            return 0
        known, vectors = self._registry.embeddings()
        rows = {chunk_id: row for row, chunk_id in enumerate(known)}
        pool = self.pool([], [])
        total, done, changed = sum(map(len, todo)), 0, 0
        if progress:
            progress(0, total)
        for batch in pack([len(ids) for ids in todo], self._engine.config.rows_per_step):
            group = [todo[i] for i in batch]
            first = [records[ids][0] for ids in group]
            near = vectors[[rows[r.chunk_id] for r in first]]
            keys = self.compile(group, [r.text for r in first], near, pool, None)
            for ids, key in zip(group, keys, strict=True):
                old = {r.key for r in records[ids]} - {key.hex}
                changed += bool(old)
                for one in old:
                    self._registry.update_key(one, key.hex)
            self._forget_other_forms(group, keys)
            done += sum(map(len, group))
            if progress:
                progress(done, total)
        self.tidy()
        return changed


def frozen_head(context: str, registry: Registry, composer: PromptComposer) -> tuple[int, ...]:
    """The head to compile behind: the first one ever used in this directory."""
    if parse_context_name(context)[0] not in ("head", "neighbours"):
        return ()
    stored = registry.get_setting("compile_head")
    ids = _ids(stored) if stored else composer.head_ids
    registry.freeze_setting("compile_head", json.dumps(list(ids)))
    return ids


def _ids(stored: str) -> tuple[int, ...]:
    try:
        ids = json.loads(stored)
    except (ValueError, RecursionError):
        ids = None
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise RegistryError("the head that this directory's chunks were compiled behind is damaged: ingest again.")
    return tuple(ids)
