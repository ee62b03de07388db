"""Hostile documents, registries and data sets: the same few examples of every property each time."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from epic_rag.defaults import load_defaults
from epic_rag.documents import read_document
from epic_rag.errors import DocumentError, RegistryError
from epic_rag.evaluation.readers import read_file
from epic_rag.registry import Registry
from tests.fuzz.bounds import bounded
from tests.fuzz.running import run
from tests.fuzz.texts import PROPERTIES, sound_registry
from tests.rag.test_documents import make_pdf


@pytest.mark.parametrize("name", PROPERTIES)
def test_files(name: str) -> None:
    run(PROPERTIES[name], 40)


@pytest.mark.parametrize(
    "piece", ["<a ", "<a x='", "<!--", "<![CDATA[", "</", "<?", "&", " < ", "<title>", "<script></s"]
)
@pytest.mark.parametrize("end", ["", ">"])
def test_hostile_pages_take_no_time(tmp_path: Path, piece: str, end: str) -> None:
    """A tag without an end, over and over, took six seconds at 12 kB and the cube of it at more."""
    page = tmp_path / "a.html"
    page.write_text("<p>before</p>" + 8000 * piece + end)
    with bounded(seconds=10):
        assert read_document(page).text.startswith("before")


def test_a_page_that_was_cut(tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    page.write_text("<p>a < b, <3 and <em>c</em> d <a href='x")
    assert read_document(page).text == "a < b, <3 and c d"


def test_a_bomb_in_a_pdf_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "a.pdf"
    page.write_bytes(make_pdf(["x" * 300_000_000]))
    assert page.stat().st_size < 400_000
    with bounded(), pytest.raises(DocumentError, match=r"a\.pdf"):
        read_document(page)


def test_a_data_set_nested_beyond_the_recursion_limit(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    for text in ('{"a":' * 100_000, "[" * 100_000):
        file.write_text(text)
        with pytest.raises(DocumentError, match="neither JSON lines"):
            read_file(file, count_tokens=len)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("UPDATE chunks SET token_ids = x'0102030405'", "token ids"),
        ("UPDATE chunks SET embedding = x'0102' WHERE ordinal = 1", "embeddings"),
        ("UPDATE documents SET metadata = '[1]'", "metadata"),
        ("DELETE FROM state", "damaged"),
        ("UPDATE settings SET value = '{'", "tuned"),
        ("CREATE TRIGGER own AFTER INSERT ON chunks BEGIN DELETE FROM chunks; END", "triggers"),
    ],
)
def test_a_damaged_registry_says_what_is_damaged(tmp_path: Path, change: str, what: str) -> None:
    file = tmp_path / "r.sqlite"
    file.write_bytes(sound_registry())
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.execute(change)
    with pytest.raises(RegistryError, match=what):
        _read_all(file)


def _read_all(file: Path) -> None:
    with closing(Registry.open(file)) as registry:
        registry.all_chunks()
        registry.documents()
        registry.embeddings()
        registry.changes_token()
        load_defaults(registry, "f")
