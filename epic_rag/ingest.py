"""Documents on their way in: what is read, what is pending, what was done."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from epic_rag.documents import Document, PathInput, iter_documents
from epic_rag.errors import DocumentError

__all__ = ["IngestReport", "Item", "PendingDocument", "Progress", "batches", "read_items", "shifted"]

Item = Document | PathInput
Progress = Callable[[str, int, int], None]
"""Called with the stage (``"read"``, ``"compile"``), how much is done and how much there is (documents, tokens)."""


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
class PendingDocument:
    """A new or changed document, split and tokenised."""

    document: Document
    hash: str
    texts: list[str]
    ids: list[tuple[int, ...]]


def read_items(
    items: Item | Iterable[Item], texts: Mapping[str, str] | None, report: IngestReport
) -> Iterator[Document]:
    """Documents behind paths, folders, documents and plain texts, in this order.

    Parameters
    ----------
    items
        One or several paths or documents.
    texts
        Document id to text.
    report
        Told of files in folders that were skipped.

    Raises
    ------
    DocumentError
        If a named path does not exist or cannot be read, or an item is neither path nor document.
    """
    single = isinstance(items, Document | str | os.PathLike)
    for item in [items] if single else items:  # type: ignore[union-attr]
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


def batches(pending: Sequence[PendingDocument], tokens: int) -> Iterator[list[PendingDocument]]:
    """Documents to compile together: enough for full batches, few enough that a crash loses little."""
    group: list[PendingDocument] = []
    size = 0
    for p in pending:
        group.append(p)
        size += sum(len(ids) for ids in p.ids)
        if size >= tokens:
            yield group
            group, size = [], 0
    if group:
        yield group


def shifted(progress: Progress | None, base: int, total: int) -> Callable[[int, int], None] | None:
    """One batch's progress as that of the whole ingest."""
    if progress is None:
        return None

    def report(done: int, _: int) -> None:
        progress("compile", base + done, total)

    return report
