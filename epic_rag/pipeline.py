"""Documents in, answers out: chunk, compile and index at ingestion; retrieve, link and generate for a question."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from epic_engine import (
    ChunkKey,
    ChunkStore,
    CompileEstimate,
    ConfigError,
    Engine,
    FileStore,
    InsufficientResourcesError,
    LinkPolicy,
    RemoteStore,
    SamplingParams,
    Stream,
    parse_policy,
)

from epic_rag.answers import Answer, AnswerStream, Source
from epic_rag.chunking import Chunker, ChunkingConfig
from epic_rag.corpus import CorpusCompiler
from epic_rag.defaults import AUTO, LinkDefaults, keep_kv_dtype, kept_kv_dtype, load_defaults, save_defaults
from epic_rag.documents import Document, content_hash
from epic_rag.ingest import IngestReport, Item, PendingDocument, Progress, batches, read_items, shifted
from epic_rag.prompt import PromptComposer
from epic_rag.publishing import fetch_documents
from epic_rag.registry import ChunkRecord, DocumentRecord, Registry
from epic_rag.retrieval import Embedder, FaissRetriever, Hit, MiniLMEmbedder, Retriever, Vectors

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
        compiler: CorpusCompiler,
        policy: LinkPolicy,
        opened: ExitStack,
    ) -> None:
        self.path = path
        self.engine = engine
        self.registry = registry
        self.composer = composer
        self.compiler = compiler
        self.policy = policy
        self.embedder = embedder
        self.retriever: Retriever = FaissRetriever(embedder)
        self._chunker = chunker
        self._opened = opened
        self._indexed_at = -1
        self._fell_back = False
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
        context: str = AUTO,
        policy: str | LinkPolicy = AUTO,
        keep_head_forms: bool = True,
        compression: str | None = None,
        max_bytes: int | None = None,
        remote: str | None = None,
        remote_options: Mapping[str, Any] | None = None,
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
            Compile context (``"isolated"``, ``"sink:n"``, ``"head"``, ``"neighbours:n"``); ``"auto"`` is what
            ``epic-rag tune`` chose for this directory, or else
            :data:`~epic_rag.defaults.BUILT_IN`. For the last two the head in use when the directory was first opened
            with one of them is kept for good, so that a changed system prompt does not invalidate the corpus.
        policy
            Link policy of questions that name none; ``"auto"`` as for ``context``.
        keep_head_forms
            Whether the KV that a chunk falls back to when its neighbour is deleted is kept. Without it a corpus
            compiled with neighbours takes half the disk, and adding documents compiles their neighbours once more.
        compression, max_bytes
            Of the chunk store, see :class:`~epic_engine.FileStore`.
        remote
            URL that another machine publishes its directory to, see :mod:`epic_rag.publishing`. Documents are taken
            over from there now, and compiled chunks read from there when they are needed.
        remote_options
            For fsspec: credentials, endpoints.
        **engine_options
            Passed to :class:`~epic_engine.Engine`. ``kv_dtype="auto"`` is what the directory's chunks are kept as.

        Raises
        ------
        RegistryError
            If the directory was made with another tokenizer or embedder or for another namespace, or its chunks are
            kept as another ``kv_dtype``.
        RagError
            If newer documents are published than were taken over last, and those here were changed since.
        """
        root = Path(path).expanduser()
        root.mkdir(parents=True, exist_ok=True)
        if remote is not None:
            fetch_documents(root, remote, storage_options=remote_options)
        embedder = embedder or MiniLMEmbedder()
        with ExitStack() as opened:
            registry = opened.enter_context(Registry.open(root / "registry.sqlite"))
            registry.freeze_setting("embedder", embedder.name)
            if isinstance(model, Engine):
                if engine_options or compression or max_bytes or remote:
                    raise ConfigError("an open engine takes no options: give them to it, or to its store.")
                keep_kv_dtype(registry, model.config.kv_dtype)
                engine = model
            else:
                kv_dtype = engine_options.pop("kv_dtype", AUTO)
                if kv_dtype == AUTO:
                    kv_dtype = kept_kv_dtype(registry) or AUTO
                keep_kv_dtype(registry, kv_dtype)
                local = FileStore(root / "chunks", compression=compression, max_bytes=max_bytes)
                opened.callback(local.close)
                store: ChunkStore = local
                if remote is not None:
                    store = RemoteStore(remote, local, storage_options=remote_options)
                    opened.callback(store.close)
                engine = opened.enter_context(Engine(model, store=store, kv_dtype=kv_dtype, **engine_options))
            registry.freeze_setting("namespace", engine.config.namespace)
            if engine.tokenizer is None:
                raise ConfigError("the engine has no tokenizer: pass tokenizer=… with a loaded model.")
            composer = (
                PromptComposer(engine.tokenizer)
                if system_prompt is None
                else PromptComposer(engine.tokenizer, system_prompt)
            )
            registry.freeze_setting("tokenizer", composer.tokenizer.digest)
            chunker = Chunker(
                chunking or ChunkingConfig(),
                engine.tokenizer,
                count_tokens=lambda text: len(composer.tokenizer.encode_text(text)),
            )
            defaults = load_defaults(registry, engine.fingerprint)
            compiler = CorpusCompiler(
                engine,
                registry,
                composer,
                defaults.context if context == AUTO else context,
                keep_head_forms=keep_head_forms,
            )
            chosen = parse_policy(defaults.policy if policy == AUTO else policy)
            return cls(root, engine, registry, embedder, composer, chunker, compiler, chosen, opened.pop_all())

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
            estimate = self.compiler.estimate(chunks)
            if on_estimate:
                on_estimate(estimate)
            free = self.engine.store.free_bytes()
            if estimate.disk_bytes > free:
                raise InsufficientResourcesError(
                    f"these documents take {estimate} but {free / 2**20:.0f} MiB are free: add fewer at a time, free "
                    "some space, or use a smaller model."
                )
            report.compiled_chunks, report.compiled_tokens = estimate.chunks, estimate.tokens
        if pending:
            self._store(pending, progress)
        if pending or self._fell_back:
            self.refresh()
        self.compiler.tidy()
        report.chunks, report.tokens = len(chunks), sum(len(ids) for ids in chunks)
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

    def _store(self, pending: Sequence[PendingDocument], progress: Progress | None) -> None:
        """Compile, embed and register documents, a batch at a time; each is durable before the next."""
        total = sum(len(ids) for p in pending for ids in p.ids)
        done = 0
        if progress:
            progress("compile", 0, total)
        groups = list(batches(pending, self.engine.config.rows_per_step))
        vectors = [self.embedder.embed([t for p in group for t in p.texts]) for group in groups]
        pool = self.compiler.pool(pending, vectors)
        for group, matrix in zip(groups, vectors, strict=True):
            ids = [i for p in group for i in p.ids]
            texts = [t for p in group for t in p.texts]
            keys = self.compiler.compile(ids, texts, matrix, pool, shifted(progress, done, total)) if ids else []
            at = 0
            for p in group:
                self._register(p, keys[at : at + len(p.ids)], matrix[at : at + len(p.ids)])
                at += len(p.ids)
            done += sum(map(len, ids))
            if progress:
                progress("compile", done, total)

    def _register(self, pending: PendingDocument, keys: Sequence[ChunkKey], vectors: Vectors) -> None:
        doc = pending.document
        chunks = [
            ChunkRecord(f"{doc.doc_id}#{n}", doc.doc_id, n, text, ids, key.hex)
            for n, (text, ids, key) in enumerate(zip(pending.texts, pending.ids, keys, strict=True))
        ]
        record = DocumentRecord(doc.doc_id, doc.source, pending.hash, self._settings_hash(), doc.metadata, time.time())
        old = self.registry.chunks(doc.doc_id) if doc.doc_id in self.registry else []
        self.compiler.erase(old, self.registry.put_document(record, chunks, vectors))

    def refresh(self) -> int:
        """Compile again what the store has lost, or what fell back when a neighbour went.

        Returns
        -------
        int
            Chunks compiled.
        """
        self._fell_back = False
        return self.compiler.restore(self.embedder)

    def use(self, defaults: LinkDefaults, *, progress: Progress | None = None) -> int:
        """Make a policy and a compile context this directory's default, and compile what is not compiled so.

        Parameters
        ----------
        defaults
            From :meth:`Tuning.defaults <epic_rag.evaluation.tuning.Tuning.defaults>`, for instance.
        progress
            See :data:`Progress`.

        Returns
        -------
        int
            Chunks compiled anew. An interrupted call goes on where it stopped when it is repeated.

        Raises
        ------
        ConfigError
            If the policy or the context is unknown.
        """
        policy = parse_policy(defaults.policy)
        compiler = CorpusCompiler(
            self.engine, self.registry, self.composer, defaults.context, keep_head_forms=self.compiler.keep_head_forms
        )
        save_defaults(self.registry, self.engine.fingerprint, defaults)
        self.policy, self.compiler = policy, compiler
        return compiler.recompile(progress and partial(progress, "compile"))

    def delete(self, doc_id: str) -> None:
        """Forget a document and the KV that no other document shares.

        Raises
        ------
        DocumentNotFoundError
            If there is no such document; names close matches.
        """
        old = self.registry.chunks(doc_id) if doc_id in self.registry else []
        self.compiler.erase(old, self.registry.delete_document(doc_id))
        self._fell_back = True

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
        priority: int = 0,
        timeout: float | None = None,
    ) -> Answer:
        """Answer a question from the documents.

        Parameters
        ----------
        question
            In words.
        k
            Chunks to retrieve.
        policy
            Link policy; None takes this directory's (see :meth:`open`).
        sampling
            How to draw tokens; greedy with at most 200 tokens by default.
        sources
            Chunks to answer from instead of retrieving, in this order.
        priority
            Higher goes first.
        timeout
            Seconds after which the answer ends with what there is.
        """
        stream = self.stream(
            question, k=k, policy=policy, sampling=sampling, sources=sources, priority=priority, timeout=timeout
        )
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
        priority: int = 0,
        timeout: float | None = None,
    ) -> AnswerStream:
        """As :meth:`ask`, but yields the text as it comes.

        Parameters
        ----------
        question, k, policy, sampling, sources, priority, timeout
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
                self.key_of(s) if isinstance(s, ChunkRecord) else s for s in segments
            ]
            prompt[0] = self.head_key()
            return self.engine.stream(
                prompt, params, policy=self.policy if policy is None else policy, priority=priority, timeout=timeout
            )

        return AnswerStream(start, tuple(found), tokenised)

    def head_key(self) -> ChunkKey:
        """The prompt's head, compiled: at the very beginning of a prompt its KV is exact."""
        return self.engine.compile(self.composer.head_ids, "isolated")

    def key_of(self, record: ChunkRecord) -> ChunkKey:
        """The chunk's best form for this model; compiled now if it has none."""
        key = self.compiler.form_of(record)
        self._fell_back |= key.hex != record.key
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
        """Close the registry, and the engine with its store unless it was passed in open."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
