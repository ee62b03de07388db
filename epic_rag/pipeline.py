"""Documents in, answers out: chunk, compile and index at ingestion; retrieve, link and generate for a question."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from epic_engine import (
    ChunkKey,
    CompileContext,
    CompileEstimate,
    ConfigError,
    Engine,
    InsufficientResourcesError,
    LinkPolicy,
    SamplingParams,
    Stream,
)

from epic_rag.answers import Answer, AnswerStream, Source
from epic_rag.chunking import Chunker, ChunkingConfig
from epic_rag.documents import Document, content_hash
from epic_rag.ingest import IngestReport, Item, PendingDocument, Progress, batches, read_items
from epic_rag.prompt import PromptComposer
from epic_rag.registry import ChunkRecord, DocumentRecord, Registry
from epic_rag.retrieval import Embedder, FaissRetriever, Hit, MiniLMEmbedder, Retriever

__all__ = ["EpicRAG"]

logger = logging.getLogger(__name__)

_FRAME_VERSION = 1


class EpicRAG:
    """A directory of documents that answers questions; made by :meth:`open`.

    Any number of threads may ask. Several processes may use one directory.
    """

    def __init__(
        self,
        path: Path,
        engine: Engine,
        registry: Registry,
        embedder: Embedder,
        composer: PromptComposer,
        chunker: Chunker,
        context: CompileContext,
        *,
        owns_engine: bool,
    ) -> None:
        self.path = path
        self.engine = engine
        self.registry = registry
        self.composer = composer
        self.context = context
        self.retriever: Retriever = FaissRetriever(embedder)
        self._embedder = embedder
        self._chunker = chunker
        self._owns_engine = owns_engine
        self._indexed_at = -1
        self._lock = threading.RLock()

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        model: Any = "smollm2",
        *,
        embedder: Embedder | None = None,
        chunking: ChunkingConfig | None = None,
        system_prompt: str | None = None,
        context: str | None = None,
        **engine_options: Any,
    ) -> Self:
        """Open a directory of documents, making it if need be.

        Parameters
        ----------
        path
            Directory; holds ``registry.sqlite`` and ``chunks/``.
        model
            As for :class:`~epic_engine.Engine`, or an open engine (its store is used then, and it stays open).
        embedder
            Embeds chunks and questions; MiniLM from its wheel by default. Frozen at the first use of a directory.
        chunking
            How documents are split; changing it re-chunks documents when they are next added.
        system_prompt
            Replaces the default one.
        context
            Compile context (``"isolated"``, ``"sink:n"``, ``"head"``). For ``"head"`` the head in use when the
            directory was first opened with it is kept for good, so that a changed system prompt does not
            invalidate the corpus.
        **engine_options
            Passed to :class:`~epic_engine.Engine`.

        Raises
        ------
        RegistryError
            If the directory was made with another tokenizer or embedder.
        """
        root = Path(path).expanduser()
        root.mkdir(parents=True, exist_ok=True)
        embedder = embedder or MiniLMEmbedder()
        registry = Registry.open(root / "registry.sqlite")
        owns = not isinstance(model, Engine)
        engine: Engine | None = None
        try:
            registry.freeze_setting("embedder", embedder.name)
            engine = model if isinstance(model, Engine) else Engine(model, store=root / "chunks", **engine_options)
            if isinstance(model, Engine) and engine_options:
                raise ConfigError(f"an open engine takes no options: {', '.join(engine_options)}.")
            if engine.tokenizer is None:
                raise ConfigError("the engine has no tokenizer: pass tokenizer=… with a loaded model.")
            composer = (
                PromptComposer(engine.tokenizer)
                if system_prompt is None
                else PromptComposer(engine.tokenizer, system_prompt)
            )
            registry.freeze_setting("tokenizer", _tokenizer_digest(engine.tokenizer))
            chunker = Chunker(
                chunking or ChunkingConfig(),
                engine.tokenizer,
                count_tokens=lambda text: len(composer.tokenizer.encode_text(text)),
            )
            chosen = _compile_context(context, engine, registry, composer)
        except BaseException:
            registry.close()
            if owns and engine is not None:
                engine.close()
            raise
        return cls(root, engine, registry, embedder, composer, chunker, chosen, owns_engine=owns)

    # -- ingestion ---------------------------------------------------------------------------------------------

    def add(
        self,
        items: Item | Iterable[Item] = (),
        *,
        texts: Mapping[str, str] | None = None,
        progress: Progress | None = None,
        on_estimate: Callable[[CompileEstimate], None] | None = None,
    ) -> IngestReport:
        """Add or update documents; returns when they are durable and can be asked about.

        Unchanged documents cost nothing. An interrupted call goes on where it stopped when it is repeated.

        Parameters
        ----------
        items
            Files, folders (walked) or documents.
        texts
            Document id to text, for plain strings.
        progress
            See :data:`Progress`.
        on_estimate
            Called once with the predicted cost, before anything is compiled.

        Raises
        ------
        DocumentError
            If a file that was named cannot be read.
        InsufficientResourcesError
            If the KV would not fit the disk; before anything is compiled.
        """
        begin = time.perf_counter()
        report = IngestReport()
        pending = self._prepare(read_items(items, texts, report), report, progress)
        chunks = [ids for p in pending for ids in p.ids]
        if chunks:
            estimate = self.engine.estimate(chunks, self.context)
            if on_estimate:
                on_estimate(estimate)
            free = self.engine.store.free_bytes()
            if estimate.disk_bytes > free:
                raise InsufficientResourcesError(
                    f"these documents take {estimate} but {free / 2**20:.0f} MiB are free: add fewer at a time, free "
                    "some space, or use a smaller model."
                )
            report.compiled_chunks, report.compiled_tokens = estimate.chunks, estimate.tokens
        total, done = sum(len(ids) for ids in chunks), 0
        if progress:
            progress("compile", 0, total)
        for group in batches(pending, self.engine.config.rows_per_step):
            self._store(group, _shifted(progress, done, total))
            done += sum(len(ids) for p in group for ids in p.ids)
            if progress:
                progress("compile", done, total)
        report.chunks, report.tokens = len(chunks), total
        report.seconds = time.perf_counter() - begin
        return report

    def _prepare(
        self, documents: Iterable[Document], report: IngestReport, progress: Progress | None
    ) -> list[PendingDocument]:
        settings = self._settings_hash()
        pending: dict[str, PendingDocument] = {}
        for count, document in enumerate(documents, start=1):
            digest = content_hash(document)
            if self.registry.is_current(document.doc_id, digest, settings):
                report.unchanged.append(document.doc_id)
            else:
                known = document.doc_id in self.registry
                if document.doc_id not in pending:
                    (report.updated if known else report.added).append(document.doc_id)
                texts = self._chunker.split(document)
                ids = [self.composer.encode_chunk(text) for text in texts]
                pending[document.doc_id] = PendingDocument(document, digest, texts, ids)
            if progress:
                progress("read", count, count)
        return list(pending.values())

    def _store(self, group: Sequence[PendingDocument], progress: Callable[[int, int], None] | None) -> None:
        ids = [i for p in group for i in p.ids]
        keys = self.engine.compile_many(ids, self.context, progress=progress) if ids else []
        vectors = self._embedder.embed([t for p in group for t in p.texts])
        at = 0
        for p in group:
            chunks = [
                ChunkRecord(f"{p.document.doc_id}#{n}", p.document.doc_id, n, text, token_ids, keys[at + n].hex)
                for n, (text, token_ids) in enumerate(zip(p.texts, p.ids, strict=True))
            ]
            record = DocumentRecord(
                p.document.doc_id,
                p.document.source,
                p.hash,
                self._settings_hash(),
                p.document.metadata,
                time.time(),
            )
            freed = self.registry.put_document(record, chunks, vectors[at : at + len(chunks)])
            self._forget(freed)
            at += len(chunks)

    def _forget(self, keys: Sequence[str]) -> None:
        # Another process may have begun to use a key again; if it does so right now, its next link is a miss.
        unused = [ChunkKey(key) for key in keys if not self.registry.reference_count(key)]
        self.engine.forget(unused)

    def delete(self, doc_id: str) -> None:
        """Forget a document and the KV that no other document shares.

        Raises
        ------
        DocumentNotFoundError
            If there is no such document; names close matches.
        """
        self._forget(self.registry.delete_document(doc_id))

    def _settings_hash(self) -> str:
        return hashlib.sha256(f"{_FRAME_VERSION}:{self._chunker.settings_hash()}".encode()).hexdigest()

    # -- questions ---------------------------------------------------------------------------------------------

    def retrieve(self, question: str, k: int = 5) -> list[Source]:
        """The ``k`` chunks nearest to a question, nearest first."""
        with self._lock:
            now = self.registry.changes_token()
            if now != self._indexed_at:
                self.retriever.rebuild(*self.registry.embeddings())
                self._indexed_at = now
            hits = self.retriever.search(question, k)
        return self._sources(hits)

    def _sources(self, hits: Sequence[Hit]) -> list[Source]:
        scores = {hit.chunk_id: hit.score for hit in hits}
        chunks = self.registry.chunks_by_id(scores)
        where = {c.doc_id: self.registry.get_document(c.doc_id).source for c in chunks}
        return [Source(c.chunk_id, c.doc_id, where[c.doc_id], c.text, scores[c.chunk_id]) for c in chunks]

    def ask(
        self,
        question: str,
        *,
        k: int = 5,
        policy: str | LinkPolicy | None = None,
        sampling: SamplingParams | None = None,
        sources: Sequence[Source] | None = None,
    ) -> Answer:
        """Answer a question from the documents.

        Parameters
        ----------
        question
            In words.
        k
            Chunks to retrieve.
        policy
            Link policy; None takes the engine's default.
        sampling
            How to draw tokens; greedy with at most 200 tokens by default.
        sources
            Chunks to answer from instead of retrieving, in this order.
        """
        stream = self.stream(question, k=k, policy=policy, sampling=sampling, sources=sources)
        for _ in stream:
            pass
        return stream.answer

    def stream(
        self,
        question: str,
        *,
        k: int = 5,
        policy: str | LinkPolicy | None = None,
        sampling: SamplingParams | None = None,
        sources: Sequence[Source] | None = None,
        history: Sequence[Mapping[str, str]] | None = None,
    ) -> AnswerStream:
        """As :meth:`ask`, but yields the text as it comes.

        Parameters
        ----------
        question, k, policy, sampling, sources
            As in :meth:`ask`.
        history
            Earlier turns (``{"role", "content"}``), for conversations.

        Returns
        -------
        AnswerStream
            Iterates over pieces of text; has ``sources`` at once and ``answer`` at the end.
        """
        begin = time.perf_counter()
        params = sampling or SamplingParams(max_tokens=200)
        stop_ids = tuple({*params.stop_token_ids, *self.composer.stop_token_ids})
        params = replace(params, stop_token_ids=stop_ids)
        tail = self.composer.tail_ids(question, history)
        found = list(self.retrieve(question, k)) if sources is None else list(sources)
        records = self.registry.chunks_by_id([s.chunk_id for s in found])
        found, records = self._fitting(found, records, len(tail) + params.max_tokens)
        tokenised = time.perf_counter() - begin
        segments: list[tuple[int, ...] | ChunkRecord] = [self.composer.head_ids, *records, tail]

        def start() -> Stream:
            prompt: list[tuple[int, ...] | ChunkKey] = [
                self._key(s) if isinstance(s, ChunkRecord) else s for s in segments
            ]
            prompt[0] = self._head_key()
            return self.engine.stream(prompt, params, policy=policy)

        return AnswerStream(start, tuple(found), tokenised)

    def _head_key(self) -> ChunkKey:
        """The prompt's head, compiled: at the very beginning of a prompt its KV is exact."""
        key = self.engine.compile(self.composer.head_ids, "isolated")
        if self.registry.get_setting(f"head:{key}") is None:
            self.registry.set_setting(f"head:{key}", "kept for prompts")
        return key

    def _key(self, record: ChunkRecord) -> ChunkKey:
        """The chunk's KV for this model; compiled now if it was lost or belongs to another model."""
        key = self.engine.find(record.token_ids, self.context)
        if key is None:
            logger.info("chunk %s has no KV for this model: compiling it now", record.chunk_id)
            key = self.engine.compile(record.token_ids, self.context)
            self.registry.update_key(record.key, key.hex)
        return key

    def _fitting(
        self, found: list[Source], records: list[ChunkRecord], others: int
    ) -> tuple[list[Source], list[ChunkRecord]]:
        """Leave the least similar chunks out until the prompt fits, whole chunks only."""
        room = self.engine.max_model_len - len(self.composer.head_ids) - others
        used = sum(len(r.token_ids) for r in records)
        keep = set(range(len(found)))
        for index in sorted(keep, key=lambda i: found[i].score):
            if used <= room:
                break
            used -= len(records[index].token_ids)
            keep.discard(index)
        if len(keep) < len(found):
            dropped = ", ".join(found[i].chunk_id for i in range(len(found)) if i not in keep)
            logger.warning("the prompt would exceed %d tokens, left out: %s", self.engine.max_model_len, dropped)
        return [found[i] for i in sorted(keep)], [records[i] for i in sorted(keep)]

    # -- life --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the registry, and the engine unless it was passed in open."""
        self.registry.close()
        if self._owns_engine:
            self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _shifted(progress: Progress | None, base: int, total: int) -> Callable[[int, int], None] | None:
    """One batch's progress as that of the whole ingest."""
    if progress is None:
        return None

    def report(done: int, _: int) -> None:
        progress("compile", base + done, total)

    return report


def _tokenizer_digest(tokenizer: Any) -> str:
    """What token ids in the registry depend on: the backend's whole definition."""
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()


def _compile_context(name: str | None, engine: Engine, registry: Registry, composer: PromptComposer) -> CompileContext:
    if name != "head":
        return engine.context if name is None else engine.parse_context(name)
    stored = registry.get_setting("compile_head")
    ids = tuple(json.loads(stored)) if stored else composer.head_ids
    registry.freeze_setting("compile_head", json.dumps(list(ids)))
    return CompileContext("head", ids)
