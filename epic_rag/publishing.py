"""A directory of documents, published with its compiled chunks: one machine ingests, many answer.

Below a URL, beside what :func:`epic_engine.storage.publish.publish` writes::

    URL/corpus/current.json             which files are the newest; its replacement is the commit
    URL/corpus/<32 hex>.sqlite(.zst)    a copy of registry.sqlite or of one of texts/<namespace>/texts.sqlite

Who reads them has copies of his own, which are replaced when something newer was published, unless they were changed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sqlite3
import tempfile
import uuid
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from epic_engine import ConfigError, FileStore, StoreError
from epic_engine.storage.objects import Objects, within
from epic_engine.storage.packed_files import PackedFile, fetch_file, pack_file
from epic_engine.storage.publish import PublishReport, publish

from epic_rag._registry_schema import connect
from epic_rag.errors import RagError

__all__ = ["fetch_documents", "publish_corpus"]

logger = logging.getLogger(__name__)

_FORMAT: Final = "epic-rag corpus"
_VERSION: Final = 1
_CURRENT: Final = "corpus/current.json"
_MOST_CURRENT: Final = 1 << 20
_MOST_BYTES: Final = 32 << 30
_OBJECT: Final = re.compile(r"corpus/[0-9a-f]{32}\.sqlite(\.zst)?", re.ASCII)
_FILE: Final = re.compile(r"registry\.sqlite|texts/(?!\.{1,2}/)[A-Za-z0-9%_.~-]{1,250}/texts\.sqlite", re.ASCII)
_STATE: Final = "published.json"


def publish_corpus(
    root: str | os.PathLike[str],
    url: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PublishReport:
    """Publish a directory's chunks, and then its documents, which name them. One publisher at a time.

    Parameters
    ----------
    root
        What :meth:`EpicRAG.open <epic_rag.EpicRAG.open>` or a framework's model was given; may be in use.
    url
        Where to, such as ``"s3://bucket/prefix"``.
    storage_options
        For fsspec: credentials, endpoints.
    progress
        Called with the chunks copied and all that are to be copied.

    Raises
    ------
    ConfigError
        If there is no chunk store, or the URL cannot be used.
    StoreError
        If it cannot be written. What was published before is whole.
    """
    folder = Path(root).expanduser()
    if not (folder / "chunks").is_dir():
        raise ConfigError(f"{folder} holds no chunks: give the directory that documents were ingested into.")
    objects = Objects(url, storage_options)
    # Copied first: a chunk that is compiled from here on may be published, but no document without its chunks.
    with tempfile.TemporaryDirectory(prefix="epic-rag-publish-") as scratch:
        try:
            copies = {name: _copied(folder / name, Path(scratch)) for name in _files(folder)}
        except sqlite3.Error as error:
            raise StoreError(f"the documents of {folder} could not be copied: {error}. Try again.") from error
        with closing(FileStore(folder / "chunks")) as store:
            report = publish(store, url, storage_options=storage_options, progress=progress)
        try:
            _publish_files(objects, copies)
        except StoreError:
            raise
        except Exception as error:  # every file system has errors of its own
            raise StoreError(
                f"the documents of {folder} could not be published to {url}: {error}. Those published before are "
                "whole: mend the cause and publish again."
            ) from error
    return report


def _files(folder: Path) -> list[str]:
    found = [folder / "registry.sqlite", *(folder / "texts").glob("*/texts.sqlite")]
    return sorted(path.relative_to(folder).as_posix() for path in found if path.is_file())


def _copied(file: Path, scratch: Path) -> Path:
    copy = scratch / f"{uuid.uuid4().hex}.sqlite"
    with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as source, closing(sqlite3.connect(copy)) as to:
        source.backup(to)
        to.execute("PRAGMA journal_mode=DELETE")
    return copy


def _publish_files(objects: Objects, copies: Mapping[str, Path]) -> None:
    try:
        text: bytes | None = objects.read_small(_CURRENT, _MOST_CURRENT)
        before, previous = _parsed(text or b"")
    except FileNotFoundError:
        text, before, previous = None, {}, []
    files: dict[str, PackedFile] = {}
    for name, copy in copies.items():
        packed, file = pack_file(copy, f"corpus/{copy.name}")
        old = before.get(name)
        if old is not None and (old.digest, old.unpacked) == (packed.digest, packed.unpacked):
            files[name] = old
        else:
            objects.upload(packed.name, file)
            files[name] = packed
    if files != before or text is None:
        try:
            meanwhile: bytes | None = objects.read_small(_CURRENT, _MOST_CURRENT)
        except FileNotFoundError:
            meanwhile = None
        if meanwhile != text:
            raise StoreError(
                f"somebody else has published to {objects.url} meanwhile: publish again when that has ended."
            )
        # Whoever is fetching the files before needs them until something else is published.
        previous = [packed.name for packed in before.values()]
        listed = {name: asdict(packed) for name, packed in files.items()}
        new = {"format": _FORMAT, "version": _VERSION, "files": listed, "previous": previous}
        objects.write(_CURRENT, json.dumps(new, indent=1).encode())
    needed = {_CURRENT, *previous, *(packed.name for packed in files.values())}
    objects.remove([name for name in objects.names("corpus") if name not in needed])


def _parsed(text: bytes) -> tuple[dict[str, PackedFile], list[str]]:
    """Files and objects of before that a ``current.json`` names; ValueError if it is damaged or of another version."""
    try:
        found: Any = json.loads(text)
        if (found["format"], found["version"]) != (_FORMAT, _VERSION):
            raise ValueError("it has another format: publish and read with the same version of epic-rag")
        files = {name: PackedFile(**fields) for name, fields in found["files"].items()}
        for name, packed in files.items():
            packed.check(_MOST_BYTES)
            if not _FILE.fullmatch(name) or not _OBJECT.fullmatch(packed.name):
                raise ValueError("it names files that no corpus has")
        previous = [str(name) for name in found["previous"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{_CURRENT} cannot be used: {error}") from error
    return files, previous


# -- reading ---------------------------------------------------------------------------------------------------


def fetch_documents(
    root: str | os.PathLike[str],
    url: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    timeout: float = 60.0,
) -> bool:
    """Take over the documents that were published, if they are newer than those that were taken over last.

    Parameters
    ----------
    root
        Directory; made if absent.
    url, storage_options
        As for :func:`publish_corpus`.
    timeout
        Seconds after which an answer of the network is not awaited any more.

    Returns
    -------
    bool
        Whether anything changed here.

    Raises
    ------
    RagError
        If documents were added or deleted here since; if what was published cannot be used; or if it cannot be reached
        and nothing was ever taken over.
    """
    folder = Path(root).expanduser()
    objects = Objects(url, storage_options)
    state = _read_state(folder, url)
    try:
        text = within(timeout, lambda: objects.read_small(_CURRENT, _MOST_CURRENT))
        files, _ = _parsed(text)
    except FileNotFoundError:
        logger.warning("no documents are published under %s", url)
        return False
    except Exception as error:  # every file system has errors of its own
        if state:
            logger.warning("the documents under %s cannot be read, those of last time are used: %s", url, error)
            return False
        raise RagError(
            f"the documents under {url} cannot be read: {error}. Check the URL and its options, or try again later."
        ) from error
    newer = {name: packed for name, packed in files.items() if state.get(name, {}).get("digest") != packed.digest}
    for name, packed in newer.items():
        _take_over(folder, name, packed, state, lambda *part: within(timeout, lambda: objects.read(*part)))
        _write_state(folder, url, state)
    return bool(newer)


def _take_over(
    folder: Path,
    name: str,
    packed: PackedFile,
    state: dict[str, dict[str, Any]],
    read: Callable[[str, int, int], bytes],
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder) as scratch:
        copy = Path(scratch) / "copy.sqlite"
        with closing(connect(folder / name)) as mine:
            if _revision(mine) != state.get(name, {}).get("revision", 0):
                raise RagError(
                    f"newer documents are published, and those in {folder / name} were changed here: open another "
                    "directory with remote=…, or this one without it."
                )
            try:
                fetch_file(read, packed, copy)
                with closing(connect(copy)) as published:
                    _check(published, mine)
                    published.backup(mine)  # in one transaction: whoever has it open sees either
            except Exception as error:  # every file system has errors of its own
                raise RagError(
                    f"the documents that were published cannot be used: {error}. Publish them again."
                ) from error
            state[name] = {"digest": packed.digest, "revision": _revision(mine)}


def _check(published: sqlite3.Connection, mine: sqlite3.Connection) -> None:
    """What a registry has, and nothing else; it comes from elsewhere."""
    tables = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name"
    if published.execute(tables).fetchall() != mine.execute(tables).fetchall():
        raise ValueError("its tables are not those of a registry of this version")
    if published.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
        raise ValueError("its pages are damaged")


def _revision(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT revision FROM state").fetchone()[0])


def _read_state(folder: Path, url: str) -> dict[str, dict[str, Any]]:
    """What was taken over from this URL, by file."""
    try:
        found: Any = json.loads((folder / _STATE).read_text())
        return dict(found["files"]) if found["url"] == url else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _write_state(folder: Path, url: str, state: Mapping[str, Mapping[str, Any]]) -> None:
    temporary = folder / f"{_STATE}.{uuid.uuid4().hex}.tmp"
    temporary.write_text(json.dumps({"url": url, "files": state}, indent=1))
    os.replace(temporary, folder / _STATE)
