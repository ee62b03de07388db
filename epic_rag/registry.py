"""The registry: which documents are ingested, into which chunks, compiled under which keys.

One SQLite file is the single source of truth. The compiled KV lies in another store and is found by key;
several chunks may share a key (equal text is compiled once), so keys are reference-counted *by counting*:
the number of chunks that name a key is its reference count, and no second figure can disagree with it::

    documents ──1:n── chunks ──n:1── key ─ ─ ─> compiled KV, in another store
                        └ text, token ids, embedding

Several processes may use one registry at once. Every change is one transaction, durable once its method
returns (write-ahead log, ``synchronous=FULL``); a killed process leaves whole documents only.
"""

import difflib
import json
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from epic_rag import _registry_schema
from epic_rag._registry_records import (
    CHUNK_COLUMNS,
    DOCUMENT_COLUMNS,
    KEY_FORM,
    ChunkRecord,
    DocumentRecord,
    ListedDocument,
    check_chunks,
    check_embeddings,
    chunk_from_row,
    chunk_row,
    document_from_row,
    document_row,
)
from epic_rag._registry_statements import LISTED, check_dimension, keys_of, unreferenced
from epic_rag.errors import DocumentNotFoundError, RegistryError

__all__ = ["ChunkRecord", "DocumentRecord", "ListedDocument", "Registry"]

# Far below SQLite's limit on the variables of one statement.
_BATCH: Final = 500


class Registry:
    """Documents, chunks and their keys in one SQLite file.

    Made by :meth:`open`. Safe to use from several threads; after ``fork`` a child must open its own.

    Any method raises :class:`RegistryError` if the file cannot be read or written, if another process keeps
    it locked for over half a minute, or after :meth:`close`.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection: sqlite3.Connection | None = connection
        self._path = path
        self._lock = threading.RLock()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open a registry, creating it (and its folder) when absent.

        Raises
        ------
        RegistryError
            If the file is not a registry, was written by a newer version, or cannot be opened.
        """
        file = Path(os.path.abspath(path))
        return cls(_registry_schema.connect(file), file)

    def close(self) -> None:
        """Close the file. Closing twice is fine."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Documents

    def __contains__(self, doc_id: object) -> bool:
        return bool(self._rows("SELECT 1 FROM documents WHERE doc_id = ?", (doc_id,)))

    def is_current(self, doc_id: str, content_hash: str, settings_hash: str) -> bool:
        """Return whether a document is held with exactly this content, chunked with these settings."""
        return bool(
            self._rows(
                "SELECT 1 FROM documents WHERE doc_id = ? AND content_hash = ? AND settings_hash = ?",
                (doc_id, content_hash, settings_hash),
            )
        )

    def put_document(
        self, document: DocumentRecord, chunks: Sequence[ChunkRecord], embeddings: npt.NDArray[np.float32]
    ) -> list[str]:
        """Add a document, or replace the one of the same id, in one transaction.

        Parameters
        ----------
        document
            The document.
        chunks
            All its chunks, in order. May be empty.
        embeddings
            Float32 of shape ``(len(chunks), dim)``, all finite, ``dim`` the same for all documents.
            ``dim`` may be 0 where vectors live elsewhere.

        Returns
        -------
        list of str
            Sorted keys that the replaced document used and that no chunk uses any more. Another process may
            begin to use one of them again: ask :meth:`reference_count` before deleting what it names.

        Raises
        ------
        RegistryError
            If chunks and document or embeddings do not belong together; nothing is changed then.
        """
        return self.put_documents([(document, chunks, embeddings)])

    def put_documents(
        self, documents: Iterable[tuple[DocumentRecord, Sequence[ChunkRecord], npt.NDArray[np.float32]]]
    ) -> list[str]:
        """As :meth:`put_document` for each, in one transaction: the disk is waited for once."""
        ready: list[tuple[DocumentRecord, int, list[tuple[Any, ...]]]] = []
        for document, chunks, embeddings in documents:
            check_chunks(document.doc_id, chunks)
            matrix = check_embeddings(embeddings, len(chunks))
            rows = [chunk_row(chunk, vector) for chunk, vector in zip(chunks, matrix, strict=True)]
            ready.append((document, matrix.shape[1], rows))
        with self._transaction() as connection:
            old: set[str] = set()
            for document, dimension, rows in ready:
                old.update(keys_of(connection, document.doc_id))
                connection.execute("DELETE FROM documents WHERE doc_id = ?", (document.doc_id,))
                if rows:
                    check_dimension(connection, dimension)
                connection.execute(
                    f"INSERT INTO documents ({DOCUMENT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)",
                    document_row(document),
                )
                connection.executemany(
                    f"INSERT INTO chunks ({CHUNK_COLUMNS}, token_count, embedding) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    rows,
                )
            return unreferenced(connection, sorted(old))

    def delete_document(self, doc_id: str) -> list[str]:
        """Delete a document and its chunks.

        Returns
        -------
        list of str
            Sorted keys that no chunk uses any more, as in :meth:`put_document`.

        Raises
        ------
        DocumentNotFoundError
            If there is no such document; names close matches.
        """
        with self._transaction() as connection:
            old = keys_of(connection, doc_id)
            if connection.execute("DELETE FROM documents WHERE doc_id = ?", (doc_id,)).rowcount == 0:
                raise self._no_document(doc_id)
            return unreferenced(connection, old)

    def delete_documents(self, doc_ids: Iterable[str]) -> list[str]:
        """As :meth:`delete_document` for each, in one transaction; unknown ids are passed over."""
        with self._transaction() as connection:
            old: set[str] = set()
            for doc_id in doc_ids:
                old.update(keys_of(connection, doc_id))
                connection.execute("DELETE FROM documents WHERE doc_id = ?", (doc_id,))
            return unreferenced(connection, sorted(old))

    def get_document(self, doc_id: str) -> DocumentRecord:
        """Return a document.

        Raises
        ------
        DocumentNotFoundError
            If there is no such document; names close matches.
        """
        rows = self._rows(f"SELECT {DOCUMENT_COLUMNS} FROM documents WHERE doc_id = ?", (doc_id,))
        if not rows:
            raise self._no_document(doc_id)
        return document_from_row(rows[0])

    def documents(self) -> list[DocumentRecord]:
        """Return all documents, sorted by id."""
        rows = self._rows(f"SELECT {DOCUMENT_COLUMNS} FROM documents ORDER BY doc_id")
        return [document_from_row(row) for row in rows]

    def listed(self, after: str = "", limit: int = 100) -> list[ListedDocument]:
        """Return the next documents in the order of their ids, with what they hold.

        Parameters
        ----------
        after
            The last id that was seen; empty to begin.
        limit
            Most documents to return.
        """
        rows = self._rows(f"{LISTED} WHERE doc_id > ? ORDER BY doc_id LIMIT ?", (after, limit))
        return [ListedDocument(document_from_row(row[:-2]), *row[-2:]) for row in rows]

    def listed_document(self, doc_id: str) -> ListedDocument | None:
        """Return a document with what it holds, or None if there is no such document."""
        rows = self._rows(f"{LISTED} WHERE doc_id = ?", (doc_id,))
        return ListedDocument(document_from_row(rows[0][:-2]), *rows[0][-2:]) if rows else None

    def ending_before(self, name: str, number: float) -> list[str]:
        """Return the ids of documents whose metadata hold a number up to this one under a plain name, sorted."""
        statement = "SELECT doc_id FROM documents WHERE CAST(json_extract(metadata, ?) AS REAL) <= ? ORDER BY doc_id"
        return [row[0] for row in self._rows(statement, (f"$.{name}", number))]

    def set_metadata(self, metadata: Mapping[str, Mapping[str, str]]) -> None:
        """Give documents, by their ids, other metadata, in one transaction; unknown ids are passed over."""
        rows = [(json.dumps(dict(new), ensure_ascii=False), doc_id) for doc_id, new in metadata.items()]
        with self._transaction() as connection:
            connection.executemany("UPDATE documents SET metadata = ? WHERE doc_id = ?", rows)

    # Chunks

    def ids_of_source(self, source: str) -> list[str]:
        """Return the ids of all documents that came from a source, sorted."""
        return [
            row[0] for row in self._rows("SELECT doc_id FROM documents WHERE source = ? ORDER BY doc_id", (source,))
        ]

    def chunk(self, chunk_id: str) -> ChunkRecord:
        """Return a chunk.

        Raises
        ------
        DocumentNotFoundError
            If there is no such chunk.
        """
        return self.chunks_by_id([chunk_id])[0]

    def chunks(self, doc_id: str) -> list[ChunkRecord]:
        """Return a document's chunks in order.

        Raises
        ------
        DocumentNotFoundError
            If there is no such document; names close matches.
        """
        with self._lock:
            rows = self._rows(f"SELECT {CHUNK_COLUMNS} FROM chunks WHERE doc_id = ? ORDER BY ordinal", (doc_id,))
            if not rows and doc_id not in self:
                raise self._no_document(doc_id)
        return [chunk_from_row(row) for row in rows]

    def chunks_by_id(self, ids: Iterable[str]) -> list[ChunkRecord]:
        """Return chunks in the order of their ids, which may repeat.

        Raises
        ------
        DocumentNotFoundError
            If one of the ids is unknown; names it.
        """
        wanted = list(ids)
        unique = list(dict.fromkeys(wanted))
        found: dict[str, ChunkRecord] = {}
        for start in range(0, len(unique), _BATCH):
            batch = unique[start : start + _BATCH]
            marks = ", ".join("?" * len(batch))
            for row in self._rows(f"SELECT {CHUNK_COLUMNS} FROM chunks WHERE chunk_id IN ({marks})", batch):
                found[row[0]] = chunk_from_row(row)
        if missing := [chunk_id for chunk_id in unique if chunk_id not in found]:
            raise DocumentNotFoundError(
                f"chunk {missing[0]!r} is not in the registry {self._path}"
                + (f" (nor are {len(missing) - 1} others)" if len(missing) > 1 else "")
                + ": its document was deleted or changed since; search again"
            )
        return [found[chunk_id] for chunk_id in wanted]

    def chunks_by_key(self, keys: Iterable[str]) -> list[ChunkRecord]:
        """Return one chunk for each key; keys that no chunk has are left out."""
        found: list[ChunkRecord] = []
        for key in keys:
            rows = self._rows(f"SELECT {CHUNK_COLUMNS} FROM chunks WHERE key = ? LIMIT 1", (key,))
            found.extend(chunk_from_row(row) for row in rows)
        return found

    def texts(self, ids: Sequence[str]) -> list[str]:
        """Return the texts of chunks, in the order of their ids."""
        found = self.all_texts()
        return [found[chunk_id] for chunk_id in ids]

    def embeddings(self) -> tuple[list[str], npt.NDArray[np.float32]]:
        """Return all chunk ids and their embeddings, sorted by document id and place.

        Returns
        -------
        ids
            n chunk ids.
        matrix
            Float32 of shape ``(n, dim)``; ``(0, 0)`` for an empty registry.
        """
        rows = self._rows("SELECT chunk_id, embedding FROM chunks ORDER BY doc_id, ordinal")
        if not rows:
            return [], np.empty((0, 0), np.float32)
        if len({len(row[1]) for row in rows}) > 1 or len(rows[0][1]) % 4:
            raise RegistryError(f"embeddings in {self._path} are damaged: restore a backup, or ingest again")
        flat = np.frombuffer(b"".join(row[1] for row in rows), "<f4")
        return [row[0] for row in rows], flat.astype(np.float32).reshape(len(rows), -1 if flat.size else 0)

    def all_chunks(self) -> list[ChunkRecord]:
        """Return all chunks, sorted by document id and place."""
        return [chunk_from_row(r) for r in self._rows(f"SELECT {CHUNK_COLUMNS} FROM chunks ORDER BY doc_id, ordinal")]

    def all_texts(self) -> dict[str, str]:
        """Return the texts of all chunks by their ids."""
        return dict(self._rows("SELECT chunk_id, text FROM chunks"))

    def dimension(self) -> int | None:
        """Return the dimension of the embeddings, or None while there are none."""
        row = self._rows("SELECT length(embedding) / 4 FROM chunks LIMIT 1")
        return int(row[0][0]) if row else None

    # Keys

    def all_keys(self) -> set[str]:
        """Return the keys that some chunk uses."""
        return {row[0] for row in self._rows("SELECT DISTINCT key FROM chunks")}

    def reference_count(self, key: str) -> int:
        """Return how many chunks use a key."""
        return int(self._rows("SELECT count(*) FROM chunks WHERE key = ?", (key,))[0][0])

    def update_key(self, old_key: str, new_key: str) -> int:
        """Let the chunks of one key use another, after they were compiled anew.

        Returns
        -------
        int
            How many chunks there were; 0 for an unknown key.

        Raises
        ------
        RegistryError
            If the new key is not hexadecimal.
        """
        if not KEY_FORM.fullmatch(new_key):
            raise RegistryError(f"the new key is {new_key!r}: pass lower-case hexadecimal digits")
        with self._transaction() as connection:
            return connection.execute("UPDATE chunks SET key = ? WHERE key = ?", (new_key, old_key)).rowcount

    # The whole

    def counts(self) -> dict[str, int]:
        """Return the numbers of ``documents``, ``chunks`` and ``tokens`` (equal chunks count each)."""
        rows = self._rows(
            "SELECT (SELECT count(*) FROM documents), count(*), coalesce(sum(token_count), 0) FROM chunks"
        )
        return dict(zip(("documents", "chunks", "tokens"), map(int, rows[0]), strict=True))

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Return the numbers of chunks and tokens of each document that has any."""
        rows = self._rows("SELECT doc_id, count(*), sum(token_count) FROM chunks GROUP BY doc_id")
        return {doc_id: (chunks, tokens) for doc_id, chunks, tokens in rows}

    def changes_token(self) -> int:
        """Return a number that grows with every change committed by any process, this one included.

        Equal numbers mean that nothing derived from the registry, such as a search index, is out of date.
        """
        rows = self._rows("SELECT revision FROM state")
        if not rows:
            raise RegistryError(f"the registry {self._path} is damaged: restore a backup, or ingest again")
        return int(rows[0][0])

    # Settings

    def get_setting(self, name: str) -> str | None:
        """Return a setting, or None if it was never set."""
        rows = self._rows("SELECT value FROM settings WHERE name = ?", (name,))
        return rows[0][0] if rows else None

    def set_setting(self, name: str, value: str) -> None:
        """Store a setting.

        Raises
        ------
        RegistryError
            If it is frozen to another value.
        """
        with self._transaction() as connection:
            self._refuse_other(connection, name, value, only_frozen=True)
            connection.execute(
                "INSERT INTO settings (name, value, frozen) VALUES (?, ?, 0) "
                "ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                (name, value),
            )

    def freeze_setting(self, name: str, value: str) -> None:
        """Store a setting for good: what is in the registry depends on it.

        Raises
        ------
        RegistryError
            If it has another value already; names both.
        """
        # The usual case is a setting frozen long ago: it needs no write and leaves the revision as it is.
        if self._rows("SELECT 1 FROM settings WHERE name = ? AND value = ? AND frozen", (name, value)):
            return
        with self._transaction() as connection:
            self._refuse_other(connection, name, value, only_frozen=False)
            connection.execute(
                "INSERT INTO settings (name, value, frozen) VALUES (?, ?, 1) "
                "ON CONFLICT (name) DO UPDATE SET frozen = 1",
                (name, value),
            )

    def _refuse_other(self, connection: sqlite3.Connection, name: str, value: str, *, only_frozen: bool) -> None:
        row = connection.execute("SELECT value, frozen FROM settings WHERE name = ?", (name,)).fetchone()
        if row is not None and row[0] != value and (row[1] or not only_frozen):
            raise RegistryError(
                f"the data in {self._path.parent} was built with {name} = {row[0]!r}, not {value!r}: "
                f"set {name} back, or ingest into a new directory"
            )

    # Below: the connection

    def _open_connection(self) -> sqlite3.Connection:
        if self._connection is None:
            raise RegistryError(f"the registry {self._path} was closed: open it again with Registry.open")
        return self._connection

    def _rows(self, statement: str, values: Sequence[object] = ()) -> list[Any]:
        with self._lock, _registry_schema.translated_errors(self._path):
            return self._open_connection().execute(statement, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, _registry_schema.translated_errors(self._path):
            connection = self._open_connection()
            # IMMEDIATE takes the write lock at once: SQLite cannot let a transaction that has read already
            # wait for another writer and would fail it.
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("UPDATE state SET revision = revision + 1")
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def _no_document(self, doc_id: str) -> DocumentNotFoundError:
        rows = self._rows("SELECT doc_id FROM documents WHERE typeof(doc_id) = 'text' ORDER BY doc_id LIMIT 2000")
        ids = [row[0] for row in rows]
        # People type the file's name where the id is its whole path.
        close = [known for known in ids if doc_id and known.endswith("/" + doc_id)][:3]
        close = close or difflib.get_close_matches(str(doc_id), ids, n=3)
        hint = f"did you mean {', '.join(map(repr, close))}?" if close else "list the ids with documents()"
        return DocumentNotFoundError(f"document {doc_id!r} is not in the registry {self._path}: {hint}")
