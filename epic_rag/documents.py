"""Documents: what is read from disk, before anything is split or tokenised.

One reader a format, all strict: a byte that does not decode, a password or a scanned page is an error that
names the file, never a document with holes in it.
"""

import codecs
import hashlib
import io
import os
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

from epic_rag._html import html_to_text
from epic_rag.errors import DocumentError

__all__ = [
    "SUPPORTED_SUFFIXES",
    "Document",
    "DocumentKind",
    "PathInput",
    "content_hash",
    "iter_documents",
    "read_document",
]

DocumentKind: TypeAlias = Literal["text", "markdown", "python"]
PathInput: TypeAlias = str | os.PathLike[str]


@dataclass(frozen=True)
class Document:
    """A text to be ingested.

    Parameters
    ----------
    doc_id
        Identifies the document in the registry; ingesting the same id again replaces it.
    text
        The whole text. May be empty: an empty document has no chunks.
    source
        Where the text came from, for display (a path or URL).
    metadata
        Strings shown beside answers. Not part of the prompt.
    kind
        Selects the borders at which the text is split.

    Raises
    ------
    DocumentError
        If the id is empty, a field has the wrong type, or a string cannot be stored as UTF-8.
    """

    doc_id: str
    text: str
    source: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict, hash=False)
    kind: DocumentKind = "text"

    def __post_init__(self) -> None:
        if not isinstance(self.doc_id, str) or not self.doc_id:
            raise DocumentError(f"doc_id is {self.doc_id!r}: pass a non-empty string that names the document")
        if not isinstance(self.text, str):
            raise DocumentError(f"{self.doc_id}: text is a {type(self.text).__name__}: pass a str")
        if self.kind not in get_args(DocumentKind):
            raise DocumentError(f"{self.doc_id}: kind is {self.kind!r}: use one of {', '.join(get_args(DocumentKind))}")
        # The copy keeps a caller's later changes to its own dict out of a frozen object.
        object.__setattr__(self, "metadata", dict(self.metadata))
        for name, value in self.metadata.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise DocumentError(
                    f"{self.doc_id!r}: metadata {name!r} is {value!r}: names and values must be strings"
                )
        for what, string in (("doc_id", self.doc_id), ("text", self.text), ("source", self.source)):
            try:
                string.encode()
            except UnicodeEncodeError as error:
                raise DocumentError(
                    f"{self.doc_id!r}: {what} holds a lone surrogate at character {error.start}, which UTF-8 "
                    "cannot store: rename the file (its name is not UTF-8), or decode the text properly"
                ) from error


def content_hash(document: Document) -> str:
    """Return the SHA-256 of everything in a document that can change its chunks.

    Covers the text and the kind. Metadata and source are left out because they are not in the prompt.

    Returns
    -------
    str
        64 hexadecimal digits.
    """
    digest = hashlib.sha256(b"epic-rag document 1\0")
    digest.update(document.kind.encode() + b"\0")
    digest.update(document.text.encode())
    return digest.hexdigest()


def _normalise(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "")


def _decode(data: bytes, path: Path, encoding: str = "utf-8-sig", why: str = "is not UTF-8") -> str:
    if encoding == "utf-8-sig" and data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DocumentError(f"{path}: starts with a UTF-16 byte order mark: convert it with `iconv -f UTF-16 -t UTF-8`")
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        # `utf-8-sig` counts from behind the mark, a reader of the file from its first byte.
        skipped = len(codecs.BOM_UTF8) if encoding == "utf-8-sig" and data.startswith(codecs.BOM_UTF8) else 0
        offset = error.start + skipped
        raise DocumentError(
            f"{path}: {why}: byte {data[offset]:#04x} at offset {offset} does not decode ({error.reason}). "
            "Find out its encoding and convert the file, e.g. `iconv -f WINDOWS-1252 -t UTF-8`"
        ) from error
    except (LookupError, UnicodeError) as error:  # Python has codecs that are no encodings of text
        raise DocumentError(f"{path}: {why}: {error}. Correct the encoding that it declares") from error


def _read_text(path: Path) -> tuple[str, dict[str, str]]:
    return _decode(path.read_bytes(), path), {}


def _read_python(path: Path) -> tuple[str, dict[str, str]]:
    data = path.read_bytes()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    except SyntaxError as error:
        # An undecodable first line lands here too; strict decoding then names the offset.
        _decode(data, path)
        raise DocumentError(f"{path}: {error.msg}: correct the coding comment in its first lines") from error
    if encoding in ("utf-8", "utf-8-sig"):
        return _decode(data, path), {}
    return _decode(data, path, encoding, f"is not {encoding}, as its coding comment says"), {}


def _read_html(path: Path) -> tuple[str, dict[str, str]]:
    data = path.read_bytes()
    declared = None
    if not data.startswith(codecs.BOM_UTF8):
        from bs4.dammit import EncodingDetector

        declared = EncodingDetector.find_declared_encoding(data, is_html=True)
    if declared is None:
        markup = _decode(data, path)
    else:
        try:
            encoding = codecs.lookup(declared).name
        except LookupError:
            raise DocumentError(
                f"{path}: declares the unknown encoding {declared!r}: correct its <meta charset>"
            ) from None
        # As the HTML standard has it: pages that claim Latin-1 are Windows-1252 in truth, and one whose
        # ASCII declaration could be read cannot be UTF-16.
        if encoding in ("iso8859-1", "ascii"):
            encoding = "cp1252"
        elif encoding.startswith(("utf-16", "utf-32", "utf-8")):
            encoding = "utf-8-sig"
        markup = _decode(data, path, encoding, f"is not {declared}, as it declares")
    try:
        text, title = html_to_text(_normalise(markup))
    except Exception as error:  # as for PDF
        raise DocumentError(f"{path}: cannot be read as HTML ({type(error).__name__}: {error}): repair it") from error
    return text, {"title": title} if title else {}


def _read_pdf(path: Path) -> tuple[str, dict[str, str]]:
    import pypdf
    from pypdf.errors import DependencyError

    try:
        reader = pypdf.PdfReader(path)
        # Many files carry only an owner password, which the empty user password opens.
        if reader.is_encrypted and not reader.decrypt(""):
            raise DocumentError(
                f"{path}: needs a password: save a copy without one, "
                "e.g. `qpdf --decrypt --password=... in.pdf out.pdf`"
            )
        pages = [_join_surrogates(page.extract_text()).strip() for page in reader.pages]
        title = str(reader.metadata.title or "").strip() if reader.metadata else ""
    except DependencyError as error:
        raise DocumentError(f"{path}: is encrypted ({error}): save a copy with `qpdf --decrypt`") from error
    except DocumentError:
        raise
    except OSError:
        raise
    except Exception as error:  # pypdf lets a broken file surface as whatever its parser stumbled over
        raise DocumentError(
            f"{path}: cannot be read as PDF ({type(error).__name__}: {error}): repair it, e.g. with "
            "`qpdf in.pdf out.pdf`, or print it to a new PDF"
        ) from error
    if pages and not any(pages):
        raise DocumentError(
            f"{path}: none of its {len(pages)} pages holds text, it is probably scanned: run OCR over it "
            "first, e.g. `ocrmypdf in.pdf out.pdf`"
        )
    metadata = {"title": title} if title else {}
    if not all(pages):
        metadata["pages_without_text"] = ", ".join(str(i) for i, page in enumerate(pages, 1) if not page)
    return "\n\n".join(page for page in pages if page), metadata


def _join_surrogates(text: str) -> str:
    """Join the surrogate pairs that some PDF fonts map to; a half without its other becomes U+FFFD.

    Such a half is a glyph without a meaning in Unicode: there is nothing else it could be replaced by.
    """
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


_Reader: TypeAlias = Callable[[Path], tuple[str, dict[str, str]]]
_READERS: Final[dict[str, tuple[_Reader, DocumentKind]]] = {
    ".txt": (_read_text, "text"),
    ".rst": (_read_text, "text"),
    ".md": (_read_text, "markdown"),
    ".markdown": (_read_text, "markdown"),
    ".html": (_read_html, "text"),
    ".htm": (_read_html, "text"),
    ".pdf": (_read_pdf, "text"),
    ".py": (_read_python, "python"),
}

SUPPORTED_SUFFIXES: Final = tuple(sorted(_READERS))
"""The file name endings that can be read, in lower case."""


def _absolute(path: PathInput) -> Path:
    # Not resolved: a symbolic link names a document of its own and must keep the name the user gave it.
    return Path(os.path.abspath(os.fspath(path)))


def read_document(path: PathInput, *, doc_id: str | None = None) -> Document:
    """Read one file.

    Text must be UTF-8 (with or without a byte order mark); HTML and Python files may declare another
    encoding. Line ends become ``\\n`` and NUL characters are dropped.

    Parameters
    ----------
    path
        A file with one of :data:`SUPPORTED_SUFFIXES`.
    doc_id
        The document's id; the absolute path by default.

    Raises
    ------
    DocumentError
        If the file is absent, of an unsupported kind, damaged, encrypted, without a text layer, or not in the
        encoding it should be. The message names the file and what to do.
    """
    file = _absolute(path)
    reader, kind = _READERS.get(file.suffix.lower(), (None, None))
    if file.is_dir():
        raise DocumentError(f"{file}: is a folder: pass it to iter_documents")
    if not file.exists():
        raise DocumentError(f"{file}: does not exist: check the path")
    if reader is None or kind is None:
        raise DocumentError(
            f"{file}: {file.suffix or 'a name without suffix'} is not supported: convert it to one of "
            f"{', '.join(SUPPORTED_SUFFIXES)}, or build a Document from its text"
        )
    if not file.is_file():
        raise DocumentError(f"{file}: is not a regular file: copy its content to one")
    try:
        text, metadata = reader(file)
    except OSError as error:
        raise DocumentError(f"{file}: cannot be opened ({error.strerror or error}): check its permissions") from error
    return Document(
        doc_id=file.as_posix() if doc_id is None else doc_id,
        text=_normalise(text),
        source=str(file),
        metadata={name: _normalise(value) for name, value in metadata.items()},
        kind=kind,
    )


def iter_documents(
    paths: PathInput | Iterable[PathInput],
    *,
    recursive: bool = True,
    on_skip: Callable[[Path, str], None] | None = None,
    on_error: Callable[[Path, DocumentError], None] | None = None,
) -> Iterator[Document]:
    """Read files and folders, lazily and in a fixed order.

    Folders are walked in sorted order; what is hidden, of an unsupported kind or no regular file is skipped,
    and links to folders are not followed. A file reached twice is read once.

    Parameters
    ----------
    paths
        One path or several. Named files are read whatever they are called, hidden ones too.
    recursive
        Whether to enter the folders inside a folder.
    on_skip
        Called with the path and the reason for everything skipped.
    on_error
        Called instead of raising when a file *found in a folder* cannot be read, so that one bad file does
        not end the walk over a thousand. Named files always raise.

    Raises
    ------
    DocumentError
        As :func:`read_document`.
    """
    skip = on_skip or (lambda path, reason: None)
    named = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    seen: set[Path] = set()
    for path in map(_absolute, named):
        if not path.is_dir():
            if path not in seen:
                seen.add(path)
                yield read_document(path)
            continue
        for file in _walk(path, recursive, skip):
            if file in seen:
                continue
            seen.add(file)
            try:
                document = read_document(file)
            except DocumentError as error:
                if on_error is None:
                    raise
                on_error(file, error)
                continue
            yield document


def _walk(folder: Path, recursive: bool, skip: Callable[[Path, str], None]) -> Iterator[Path]:
    try:
        entries = sorted(folder.iterdir(), key=lambda entry: entry.name)
    except OSError as error:
        raise DocumentError(f"{folder}: cannot be listed ({error.strerror or error}): check its permissions") from error
    for entry in entries:
        if entry.name.startswith("."):
            skip(entry, "hidden")
        elif entry.is_dir():
            if entry.is_symlink():
                skip(entry, "link to a folder")
            elif recursive:
                yield from _walk(entry, recursive, skip)
            else:
                skip(entry, "folder inside a folder, and recursive is off")
        elif entry.suffix.lower() not in _READERS:
            skip(entry, f"unsupported suffix {entry.suffix!r}")
        elif not entry.is_file():
            skip(entry, "not a regular file")
        else:
            yield entry
