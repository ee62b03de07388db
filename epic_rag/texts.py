"""Compiled texts under ids of the application's own: what the framework integrations stand on.

The application keeps its documents and its index; this keeps the KV of their texts in step, finds the texts in whatever
prompt the framework makes of them, and turns the prompt into segments that the engine links.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np
from epic_engine import ChunkKey, ConfigError, Engine, LinkPolicy, parse_policy

from epic_rag.corpus import CorpusCompiler
from epic_rag.defaults import AUTO, load_defaults
from epic_rag.discovery import TextIndex
from epic_rag.documents import Document
from epic_rag.errors import DocumentNotFoundError, RagError
from epic_rag.ingest import PendingDocument
from epic_rag.prompt import PromptComposer, TextPart
from epic_rag.registry import ChunkRecord, DocumentRecord, Registry
from epic_rag.retrieval import Vectors
from epic_rag.structured import Grammars
from epic_rag.text_items import AddReport, Drift, TextItem

__all__ = ["AddReport", "CompiledTexts", "Drift", "TextItem", "cut_known"]

Prompt = list[tuple[int, ...] | ChunkKey]

# Stands for the settings that a text was tokenised with.
_GIVEN_IDS = "token ids were given"


class CompiledTexts:
    """Texts under ids, compiled with one engine. Any number of threads may use one; several processes one directory.

    Parameters
    ----------
    path
        Directory that keeps the ids and texts; the KV lies in the engine's store.
    engine
        Compiles; it stays open. It needs a tokenizer.
    context
        Compile context; ``"auto"`` is the directory's own, see :mod:`epic_rag.defaults`.
    policy
        Link policy; ``"auto"`` likewise.

    Raises
    ------
    RegistryError
        If the directory was made with another tokenizer, or for another namespace.
    ConfigError
        If the engine has no tokenizer, or context or policy are unknown.
    """

    def __init__(
        self, path: str | os.PathLike[str], engine: Engine, *, context: str = AUTO, policy: str | LinkPolicy = AUTO
    ) -> None:
        if engine.tokenizer is None:
            raise ConfigError("the engine has no tokenizer: pass tokenizer=… with a loaded model.")
        self.engine = engine
        self.composer = PromptComposer(engine.tokenizer, "", documents_header="", question_prefix="")
        self.registry = Registry.open(Path(path).expanduser() / "texts.sqlite")
        try:
            self.registry.freeze_setting("namespace", engine.config.namespace)
            self.registry.freeze_setting("tokenizer", self.composer.tokenizer.digest)
            defaults = load_defaults(self.registry, engine.fingerprint)
            self.policy = parse_policy(defaults.policy if policy == AUTO else policy)
            self.compiler = CorpusCompiler(
                engine, self.registry, self.composer, defaults.context if context == AUTO else context
            )
        except BaseException:
            self.registry.close()
            raise
        self._index = TextIndex()
        self._indexed_at = -1
        self._lock = threading.RLock()  # for changes; compiling takes its time
        self._indexing = threading.Lock()
        self._grammars: Grammars | None = None
        self._making_grammars = threading.Lock()

    # -- in step with an index -----------------------------------------------------------------------------------

    def add(
        self,
        items: Iterable[TextItem],
        *,
        progress: Callable[[int, int], None] | None = None,
        among: Sequence[TextItem] | None = None,
    ) -> AddReport:
        """Compile texts, or what changed of them; returns when they are durable.

        Parameters
        ----------
        items
            Of one id the last counts. A text without token ids or any character but white space is none: it is left
            out, and what was compiled under its id is removed.
        progress
            Called with tokens done and tokens to do.
        among
            Texts that these may be compiled behind, where the context has neighbours; None looks through all that are
            kept.

        Raises
        ------
        InsufficientResourcesError
            If the KV would not fit; before anything is compiled.
        """
        report = AddReport()
        last = {item.text_id: item for item in items}
        wanted = {text_id: item for text_id, item in last.items() if item.token_ids or item.text.strip()}
        with self._lock:
            self.remove(text_id for text_id in last if text_id not in wanted)
            todo: list[TextItem] = []
            described: dict[str, Mapping[str, str]] = {}
            for item in wanted.values():
                known = self._record(item.text_id)
                if known is None:
                    report.added.append(item.text_id)
                    todo.append(item)
                    continue
                document = self.registry.get_document(item.text_id)
                if not self._holds(known, document, item):
                    report.updated.append(item.text_id)
                    todo.append(item)
                elif document.metadata != item.metadata:
                    report.updated.append(item.text_id)
                    described[item.text_id] = item.metadata
                else:
                    report.unchanged.append(item.text_id)
            if described:
                before = self.registry.changes_token()
                self.registry.set_metadata(described)
                self._follow({}, (), before)
            if todo:
                self._compile(todo, progress, among)
        return report

    def _holds(self, known: ChunkRecord, document: DocumentRecord, item: TextItem) -> bool:
        """Whether what is compiled is this item's, its metadata aside."""
        text = item.text.strip()
        if known.text != text or document.source != item.group:
            return False
        if item.token_ids is not None:
            return known.token_ids == item.token_ids
        return document.settings_hash != _GIVEN_IDS or known.token_ids == self.encode(text)

    def _compile(
        self,
        items: Sequence[TextItem],
        progress: Callable[[int, int], None] | None,
        among: Sequence[TextItem] | None,
    ) -> None:
        pending = self._pending(items)
        texts, ids = [p.texts[0] for p in pending], [p.ids[0] for p in pending]
        vectors = self._vectors(items)
        if among is None:
            pool = self.compiler.pool(pending, [vectors])
        elif self.compiler.wants_neighbours:
            pool = self.compiler.pool(self._pending(among), [self._vectors(among)], known_too=False)
        else:
            pool = None
        keys = self.compiler.compile(ids, texts, vectors, pool, progress)
        before = self.registry.changes_token()
        old = [record for item in items if (record := self._record(item.text_id)) is not None]
        records = []
        for number, (item, text, own, key) in enumerate(zip(items, texts, ids, keys, strict=True)):
            digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
            settings = "" if item.token_ids is None else _GIVEN_IDS
            document = DocumentRecord(item.text_id, item.group, digest, settings, item.metadata, time.time())
            chunk = ChunkRecord(f"{item.text_id}#0", item.text_id, 0, text, own, key.hex)
            records.append((document, [chunk], vectors[number : number + 1]))
        self.compiler.erase(old, self.registry.put_documents(records))
        self._follow(dict(zip((item.text_id for item in items), texts, strict=True)), (), before)

    def _pending(self, items: Sequence[TextItem]) -> list[PendingDocument]:
        pending = []
        for item in items:
            text = item.text.strip()
            ids = self.encode(text) if item.token_ids is None else item.token_ids
            pending.append(PendingDocument(Document(item.text_id, text, source=item.group), "", [text], [ids]))
        return pending

    def _vectors(self, items: Sequence[TextItem]) -> Vectors:
        """Embeddings as the registry can hold them: all of one dimension, which the first ones set."""
        known = self.registry.dimension()
        given = next((len(item.vector) for item in items if item.vector is not None), 0)
        dim = given if known is None else known
        rows = np.zeros((len(items), dim), np.float32)
        for row, item in zip(rows, items, strict=True):
            if item.vector is not None and len(item.vector) == dim:
                row[:] = np.asarray(item.vector, np.float32)
                row /= max(float(np.linalg.norm(row)), 1e-12)
        return rows

    def remove(self, text_ids: Iterable[str]) -> int:
        """Forget texts, and the KV that no other text shares or saw; returns how many there were."""
        text_ids = list(dict.fromkeys(text_ids))
        with self._lock:
            before = self.registry.changes_token()
            records = [record for text_id in text_ids if (record := self._record(text_id)) is not None]
            if records:
                self.compiler.erase(records, self.registry.delete_documents(r.doc_id for r in records))
                self._follow({}, text_ids, before)
        return len(records)

    def remove_group(self, group: str) -> list[str]:
        """Forget all texts of a group; returns their ids."""
        ids = self.group(group)
        self.remove(ids)
        return ids

    def group(self, group: str) -> list[str]:
        """Ids of a group's texts."""
        return self.registry.ids_of_source(group)

    def ids(self) -> list[str]:
        """Ids of all texts."""
        return [d.doc_id for d in self.registry.documents()]

    def __contains__(self, text_id: object) -> bool:
        return text_id in self.registry

    def text(self, text_id: str) -> str:
        """A text as it was compiled.

        Raises
        ------
        DocumentNotFoundError
            If there is none of that id.
        """
        return self.registry.chunk(f"{text_id}#0").text

    def compare(self, texts: Mapping[str, str]) -> Drift:
        """Where these texts by id, an index's own, and the compiled ones disagree."""
        held = {r.doc_id: r for r in self._records()}
        return Drift(
            missing=tuple(i for i, t in texts.items() if i not in held and t.strip()),
            stale=tuple(i for i in held if i not in texts),
            changed=tuple(i for i, r in held.items() if i in texts and texts[i].strip() != r.text),
            lost=tuple(i for i, r in held.items() if i in texts and not self.engine.has(ChunkKey(r.key))),
        )

    def reconcile(self, items: Iterable[TextItem]) -> Drift:
        """Mend what :meth:`compare` finds against an index's own items; returns what was wrong."""
        wanted = {item.text_id: item for item in items}
        drift = self.compare({text_id: item.text for text_id, item in wanted.items()})
        self.remove(drift.stale)
        self.add([wanted[i] for i in (*drift.missing, *drift.changed)])
        if drift.lost:
            self.restore()
        return drift

    def restore(self) -> int:
        """Compile again what the store has lost, or what fell back when a neighbour went; returns how many were."""
        records = self._records()
        lost = [r for r in records if not self.engine.has(ChunkKey(r.key))]
        if lost:
            vectors = dict(zip(*self.registry.embeddings(), strict=True))
            near = np.stack([vectors[r.chunk_id] for r in lost])
            pool = self.compiler.pool([], [])
            keys = self.compiler.compile([r.token_ids for r in lost], [r.text for r in lost], near, pool, None)
            for record, key in zip(lost, keys, strict=True):
                if key.hex != record.key:
                    self.registry.update_key(record.key, key.hex)
        return len(lost)

    # -- prompts ---------------------------------------------------------------------------------------------------

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text, as it is compiled."""
        return tuple(self.composer.tokenizer.encode_text(text.strip()))

    def find(self, text: str) -> list[TextPart]:
        """A text cut into the compiled texts that it holds and what stands between them."""
        parts: list[TextPart] = []
        at = 0
        for match in self.index().find(text):
            parts += [TextPart(text[at : match.start])] if match.start > at else []
            parts.append(TextPart(text[match.start : match.stop], match.name))
            at = match.stop
        return [*parts, TextPart(text[at:])] if at < len(text) else parts

    def finder(self, text_ids: Sequence[str]) -> Callable[[str], list[TextPart]]:
        """As :meth:`find`, for prompts that are known to hold certain texts.

        Those are found however short they are and whatever overlaps them; ids that are unknown or whose text a
        prompt does not hold are passed over.

        Parameters
        ----------
        text_ids
            In the order in which the texts stand in the prompt.
        """
        records = [self._record(text_id) for text_id in text_ids]
        known = [(record.doc_id, record.text) for record in records if record is not None and record.text]
        return lambda text: cut_known(text, known, self.find)

    def index(self) -> TextIndex:
        """The index of texts by their ids, in step with the registry, which another process may have changed."""
        with self._indexing:
            now = self.registry.changes_token()
            if now != self._indexed_at:
                records = {chunk_id.rpartition("#")[0]: text for chunk_id, text in self.registry.all_texts().items()}
                self._index.discard([name for name in self._index if name not in records])
                for name, text in records.items():
                    self._index.add(name, text)
                self._indexed_at = now
            return self._index

    def prompt(self, parts: Sequence[tuple[int, ...] | TextPart]) -> Prompt:
        """Segments for the engine: compiled texts by their keys, everything else by its token ids.

        A text that was removed or changed since it was found is computed like any other.

        Parameters
        ----------
        parts
            From :meth:`PromptComposer.segments <epic_rag.prompt.PromptComposer.segments>`.
        """
        return [self._key_or_ids(part) if isinstance(part, TextPart) else part for part in parts]

    def _key_or_ids(self, part: TextPart) -> ChunkKey | tuple[int, ...]:
        record = self._record(part.name or "")
        # Somebody may have removed or changed the text since it was found.
        if record is None or record.text != part.text:
            return self.encode(part.text)
        return self.compiler.form_of(record)

    def key_of(self, text_id: str) -> ChunkKey:
        """The text's best form for this model; compiled now if it has none.

        Raises
        ------
        RagError
            If there is no text of that id.
        """
        record = self._record(text_id)
        if record is None:
            raise RagError(f"there is no compiled text {text_id!r}: add() it first.")
        return self.compiler.form_of(record)

    @property
    def grammars(self) -> Grammars:
        """Constraints for answers of this engine; the first use reads the vocabulary, which takes about a second.

        Raises
        ------
        MissingDependencyError
            If llguidance is not installed.
        GrammarError
            If no grammar can be laid over this kind of tokenizer.
        """
        with self._making_grammars:
            if self._grammars is None:
                spec, composer = self.engine.spec, self.composer
                ends = {*spec.end_ids, *composer.stop_token_ids}
                self._grammars = Grammars(self.engine.tokenizer, spec.vocab_size, ends, segments=composer.tokenizer)
            return self._grammars

    # -- life ------------------------------------------------------------------------------------------------------

    def _record(self, text_id: str) -> ChunkRecord | None:
        try:
            return self.registry.chunk(f"{text_id}#0")
        except DocumentNotFoundError:
            return None

    def _records(self) -> list[ChunkRecord]:
        return self.registry.all_chunks()

    def _follow(self, added: Mapping[str, str], gone: Iterable[str], before: int) -> None:
        """Note one change of our own in the index of texts, which then is still in step if it was before it."""
        with self._indexing:
            if self._indexed_at == before:
                self._index.discard(gone)
                for name, text in added.items():
                    self._index.add(name, text)
                # Not the number of now: another process may have made the next change.
                self._indexed_at = before + 1

    def close(self) -> None:
        """Close the directory; the engine stays open."""
        self.registry.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def cut_known(
    text: str, known: Iterable[tuple[str, str]], find: Callable[[str], list[TextPart]] | None = None
) -> list[TextPart]:
    """Cut a text at known texts that it holds.

    Parameters
    ----------
    text
        To be cut.
    known
        Names and texts, in the order in which they stand there; those that do not are passed over.
    find
        Cuts what stands between them; None leaves it whole.
    """
    find = find or (lambda between: [TextPart(between)] if between else [])
    parts: list[TextPart] = []
    at = 0
    for name, own in known:
        start = text.find(own, at)
        if start >= 0:
            parts += find(text[at:start])
            parts.append(TextPart(own, name))
            at = start + len(own)
    return [*parts, *find(text[at:])]
