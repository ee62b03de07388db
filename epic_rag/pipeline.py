"""Documents in, answers out: chunk, compile and index at ingestion; retrieve, link and generate for a question."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from epic_engine import (
    ChunkKey,
    ChunkNotFoundError,
    CompileContext,
    CompileEstimate,
    Completion,
    ConfigError,
    Engine,
    InsufficientResourcesError,
    LinkPolicy,
    RequestStats,
    SamplingParams,
    Stream,
)

from epic_rag.chunking import Chunker, ChunkingConfig
from epic_rag.documents import Document, PathInput, content_hash, iter_documents
from epic_rag.errors import DocumentError
from epic_rag.prompt import PromptComposer
from epic_rag.registry import ChunkRecord, DocumentRecord, Registry
from epic_rag.retrieval import Embedder, FaissRetriever, Hit, MiniLMEmbedder, Retriever

__all__ = ["Answer", "AnswerStream", "EpicRAG", "IngestReport", "Source"]

logger = logging.getLogger(__name__)

Item = Document | PathInput
Progress = Callable[[str, int, int], None]
"""Called with the stage (``"read"``, ``"compile"``), how much is done and how much there is (documents, tokens)."""

_FRAME_VERSION = 1


@dataclass(frozen=True)
class Source:
    """A chunk that an answer was given from.

    Attributes
    ----------
    chunk_id, doc_id
        Its ids in the registry.
    source
        Where the document came from.
    text
        The chunk's text.
    score
        Similarity to the question, -1 to 1.
    """

    chunk_id: str
    doc_id: str
    source: str
    text: str
    score: float


@dataclass(frozen=True)
class Answer:
    """An answer with its sources and its cost.

    Attributes
    ----------
    text
        The model's answer.
    sources
        Chunks in the prompt, in prompt order.
    stats
        Token counts, reuse kind and stage times.
    finish_reason
        ``stop``, ``length`` or ``cancelled``.
    """

    text: str
    sources: tuple[Source, ...]
    stats: RequestStats
    finish_reason: str


@dataclass
class IngestReport:
    """What :meth:`EpicRAG.add` did.

    Attributes
    ----------
    added, updated, unchanged
        Ids of documents.
    chunks, tokens
        Chunks and tokens of the added and updated documents.
    compiled_chunks, compiled_tokens
        Of these, what had to be compiled; the rest was known.
    seconds
        Wall-clock time.
    skipped
        Path and reason of files that were not read.
    """

    added: list[str] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    chunks: int = 0
    tokens: int = 0
    compiled_chunks: int = 0
    compiled_tokens: int = 0
    seconds: float = 0.0
    skipped: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class _Pending:
    """A new or changed document, split and tokenised."""

    document: Document
    hash: str
    texts: list[str]
    ids: list[tuple[int, ...]]


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
        pending = self._prepare(_documents(items, texts, report), report, progress)
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
        for group in _groups(pending, self.engine.config.rows_per_step):
            self._store(group, lambda now, _total, base=done: progress and progress("compile", base + now, total))
            done += sum(len(ids) for p in group for ids in p.ids)
            if progress:
                progress("compile", done, total)
        report.chunks, report.tokens = len(chunks), total
        report.seconds = time.perf_counter() - begin
        return report

    def _prepare(
        self, documents: Iterable[Document], report: IngestReport, progress: Progress | None
    ) -> list[_Pending]:
        settings = self._settings_hash()
        pending: dict[str, _Pending] = {}
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
                pending[document.doc_id] = _Pending(document, digest, texts, ids)
            if progress:
                progress("read", count, count)
        return list(pending.values())

    def _store(self, group: Sequence[_Pending], progress: Callable[[int, int], object]) -> None:
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


class AnswerStream:
    """An answer as it is generated; made by :meth:`EpicRAG.stream`. ``close()`` cancels it."""

    def __init__(self, start: Callable[[], Stream], sources: tuple[Source, ...], tokenise_seconds: float) -> None:
        self.sources = sources
        self._start = start
        self._tokenise = tokenise_seconds
        self._stream = start()
        self._pieces = self._run()

    def _run(self) -> Iterator[str]:
        first = None
        for _ in range(len(self.sources) + 2):
            try:
                first = next(self._stream, None)
                break
            except ChunkNotFoundError as error:
                # A stored chunk turned out to be damaged and was set aside: it is compiled again. There may be more.
                logger.warning("%s", error)
                self._stream = self._start()
        if first is not None and first.text:
            yield first.text
        for event in self._stream:
            if event.text:
                yield event.text

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Cancel; what was generated so far stays in :attr:`answer`."""
        self._stream.close()

    @property
    def answer(self) -> Answer:
        """The whole answer, once the stream has ended."""
        done: Completion = self._stream.completion
        done.stats.times.tokenise = self._tokenise
        return Answer(done.text.strip(), self.sources, done.stats, done.finish_reason)


def _documents(
    items: Item | Iterable[Item], texts: Mapping[str, str] | None, report: IngestReport
) -> Iterator[Document]:
    single = isinstance(items, Document | str | os.PathLike)
    for item in [items] if single else items:  # type: ignore[list-item, union-attr]
        if isinstance(item, Document):
            yield item
        elif isinstance(item, str | os.PathLike):
            if not Path(item).expanduser().exists():
                raise DocumentError(
                    f"{os.fspath(item)[:200]!r} is no file or folder: check the path, or pass a plain string as "
                    "texts={'its id': '…'}."
                )
            yield from iter_documents(
                item,
                on_skip=lambda path, why: report.skipped.append((str(path), why)),
                on_error=lambda path, error: report.skipped.append((str(path), str(error))),
            )
        else:
            raise DocumentError(f"documents are paths or Document objects, not {type(item).__name__}.")
    for doc_id, text in (texts or {}).items():
        yield Document(doc_id, text, source=doc_id)


def _groups(pending: Sequence[_Pending], tokens: int) -> Iterator[list[_Pending]]:
    """Documents to compile together: enough for full batches, few enough that a crash loses little."""
    group: list[_Pending] = []
    size = 0
    for p in pending:
        group.append(p)
        size += sum(len(ids) for ids in p.ids)
        if size >= tokens:
            yield group
            group, size = [], 0
    if group:
        yield group


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
