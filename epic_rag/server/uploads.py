"""Files that clients send, read as documents. A client's name for a file is an id and never a path."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from starlette.datastructures import UploadFile

from epic_rag.documents import SUPPORTED_SUFFIXES, Document, read_document
from epic_rag.errors import DocumentError
from epic_rag.server.errors import ApiError

__all__ = ["check_names", "read_uploads"]


def check_names(files: Sequence[UploadFile]) -> None:
    """Refuse files that nobody can read, before anything of them is.

    Raises
    ------
    ApiError
        400, with the name.
    """
    for file in files:
        if not file.filename:
            raise _bad("a file has no name: its name becomes the document's id.")
        if _suffix(file.filename) not in SUPPORTED_SUFFIXES:
            raise _bad(f"{file.filename[:200]!r} cannot be read: send one of {', '.join(SUPPORTED_SUFFIXES)}.")


def read_uploads(files: Sequence[UploadFile], progress: Callable[[int, int], None]) -> list[Document]:
    """Documents in files, each under its file's name.

    Parameters
    ----------
    files
        As a form holds them; closed afterwards.
    progress
        Called with files done and files in all.

    Raises
    ------
    ApiError
        400 if a file cannot be read; names it.
    """
    documents = []
    with tempfile.TemporaryDirectory(prefix="epic-rag-upload-") as folder:
        for number, file in enumerate(files):
            name = file.filename or ""
            path = Path(folder) / f"{number}{_suffix(name)}"
            with file.file, path.open("wb") as out:
                shutil.copyfileobj(file.file, out)
            try:
                document = read_document(path, doc_id=name)
            except DocumentError as error:
                raise _bad(str(error).replace(str(path), name[:200]).replace(folder, "")) from None
            documents.append(replace(document, source=name))
            path.unlink()
            progress(number + 1, len(files))
    return documents


def _suffix(name: str) -> str:
    return PurePosixPath(name).suffix.lower()


def _bad(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_document", param="files")
