"""The text side: documents, registries, data sets."""

from __future__ import annotations

import json
import logging
import sqlite3
import warnings
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from typing import Any

import numpy as np
from hypothesis import strategies as st

from epic_rag.defaults import load_defaults
from epic_rag.documents import iter_documents, read_document
from epic_rag.errors import DocumentError
from epic_rag.evaluation.readers import FORMATS, read_file
from epic_rag.registry import ChunkRecord, DocumentRecord, Registry
from tests.rag.test_documents import make_pdf

from .bounds import clean
from .damage import any_json, mutated
from .storage import folder

__all__ = ["PROPERTIES", "sound_registry"]

_HTML = (
    b"<!DOCTYPE html><html><head><title>A page</title><meta charset='utf-8'></head><body><h1>Head</h1>"
    b"<table><tr><td>a</td><td>b</td></tr></table><pre> x </pre><!-- no --><script>no()</script></body></html>"
)
_PYTHON = b"# -*- coding: latin-1 -*-\ndef f():\n    return 1\n"
_SAMPLES = {
    ".pdf": make_pdf(["First page", "", "Third page"], "A title"),
    ".html": _HTML,
    ".py": _PYTHON,
    ".md": b"# Head\n\ntext\n",
}
_CODECS = ("hex", "zlib", "rot13", "punycode", "idna", "undefined", "utf-7", "unicode_escape", "utf-16", "mbcs", "x")
_PIECES = (b"<", b"<!", b"<![CDATA[", b"<!--", b"</", b"&", b"&#", b"&#x110000;", b"<a ", b"='", b"\xff", b"\0", b"obj")


def damaged_documents(data: st.DataObject) -> None:
    suffix = data.draw(st.sampled_from(sorted(_SAMPLES)))
    match data.draw(st.sampled_from(("mutated", "binary", "pieces", "codec", "deep"))):
        case "mutated":
            raw = mutated(data, _SAMPLES[suffix])
        case "binary":
            raw = data.draw(st.binary(max_size=300))
        case "pieces":
            raw = b"".join(data.draw(st.lists(st.sampled_from(_PIECES), max_size=20)))
        case "codec":
            codec = data.draw(st.sampled_from(_CODECS)).encode()
            raw = _SAMPLES[suffix].replace(b"utf-8", codec).replace(b"latin-1", codec)
        case _:
            raw = data.draw(st.sampled_from((b"<b>", b"[", b"<</A", b"(", b"<!--"))) * 3000
    with folder() as path, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("pypdf").setLevel(logging.CRITICAL)
        file = path / f"a{suffix}"
        file.write_bytes(raw)
        text = None
        with clean():
            text = read_document(file).text
        refused: list[Any] = []
        found = list(iter_documents(path, on_error=lambda *why: refused.append(why)))
        assert [d.text for d in found] == ([] if text is None else [text])
        assert len(found) + len(refused) == 1


def read_data_sets(data: st.DataObject) -> None:
    text = st.text(max_size=4)
    some = any_json() | text
    fields = st.fixed_dictionaries(
        {},
        optional={
            "id": some, "_id": some, "documents": some | st.lists(some, max_size=2), "question": some, "answers": some,
            "answer": some, "scorer": some, "input": some, "context": some | st.lists(st.tuples(text, some)),
            "paragraphs": some | st.lists(st.fixed_dictionaries({"title": some, "paragraph_text": some}), max_size=2),
            "type": some, "dataset": some, "answer_aliases": some,
        },
    )  # fmt: skip
    records = data.draw(st.lists(fields | any_json(), min_size=1, max_size=3))
    raw = "\n".join(map(json.dumps, records)) if data.draw(st.booleans()) else json.dumps(records)
    whole = raw.encode("utf-8", "surrogatepass")
    if data.draw(st.integers(0, 3)) == 0:
        whole = mutated(data, whole)
    elif data.draw(st.integers(0, 9)) == 0:
        whole = data.draw(st.sampled_from((b"[", b'{"a":'))) * 100_000
    with folder() as path:
        file = path / "data.jsonl"
        file.write_bytes(whole)
        form = data.draw(st.none() | st.sampled_from(sorted(FORMATS)))
        with clean(DocumentError):
            for example in read_file(file, count_tokens=len, format=form):
                texts: Sequence[Any] = (example.question, example.example_id, *example.documents, *example.answers)
                assert all(isinstance(one, str) for one in texts)
                assert example.question.strip()
                assert example.documents


@cache
def sound_registry() -> bytes:
    """A registry of two documents, as a file."""
    with folder() as path:
        with closing(Registry.open(path / "r.sqlite")) as registry:
            for name in ("a", "b"):
                chunks = [ChunkRecord(f"{name}#{n}", name, n, f"text {n}", (n, 5), f"{n:064x}") for n in range(3)]
                document = DocumentRecord(name, "", "", "", {"title": name}, 1.0)
                registry.put_document(document, chunks, np.ones((3, 2), np.float32))
            registry.set_setting("link_defaults:f", json.dumps({"policy": "naive", "context": "isolated"}))
        with closing(sqlite3.connect(path / "r.sqlite")) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return (path / "r.sqlite").read_bytes()


def damaged_registry(data: st.DataObject) -> None:
    whole = sound_registry()
    raw = mutated(data, whole, before=data.draw(st.sampled_from((100, len(whole)))))
    with folder() as path, clean():
        file = path / "r.sqlite"
        file.write_bytes(raw)
        if data.draw(st.booleans()):
            file.write_bytes(whole)
            _change_a_row(data, path / "r.sqlite")
        with closing(Registry.open(file)) as registry:
            for use in (
                registry.documents,
                registry.all_chunks,
                registry.embeddings,
                registry.all_keys,
                registry.counts,
                registry.changes_token,
                registry.dimension,
                lambda: registry.chunks("a"),
                lambda: registry.get_document("b"),
                lambda: load_defaults(registry, "f"),
                lambda: registry.delete_document("a"),
                lambda: registry.set_setting("x", "y"),
            ):
                with clean():
                    use()


def _change_a_row(data: st.DataObject, file: Any) -> None:
    value = data.draw(any_json().map(json.dumps) | st.text(max_size=3) | st.binary(max_size=6) | st.integers(-9, 9))
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        table = data.draw(st.sampled_from(("documents", "chunks", "settings", "state")))
        columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
        try:
            if data.draw(st.integers(0, 9)) == 0:
                db.execute(f"DELETE FROM {table}")
            db.execute(f"UPDATE {table} SET {data.draw(st.sampled_from(columns))} = ?", (value,))
        except (sqlite3.Error, UnicodeEncodeError):  # the tables are strict
            return


PROPERTIES = {check.__name__: check for check in (damaged_documents, read_data_sets, damaged_registry)}
