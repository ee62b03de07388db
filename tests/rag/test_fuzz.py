"""Hostile documents, registries and data sets: the same few examples of every property each time."""

from __future__ import annotations

from pathlib import Path

import pytest

from epic_rag.documents import read_document
from epic_rag.errors import DocumentError
from tests.fuzz.bounds import bounded
from tests.fuzz.running import run
from tests.fuzz.texts import PROPERTIES
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
