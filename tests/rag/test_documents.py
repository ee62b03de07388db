import os
import zlib
from pathlib import Path

import pypdf
import pytest

from epic_rag import documents, errors
from epic_rag.documents import Document, content_hash, iter_documents, read_document
from epic_rag.errors import DocumentError


def make_pdf(pages: list[str], title: str = "") -> bytes:
    """Write a PDF by hand: one line of Helvetica a page."""
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Count %d /Kids [%s] >>"
        % (len(pages), b" ".join(b"%d 0 R" % (5 + 2 * i) for i in range(len(pages)))),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
        b"<< /Title (%s) >>" % title.encode("latin-1"),
    ]
    for i, page in enumerate(pages):
        stream = zlib.compress(b"BT /F1 12 Tf 72 720 Td (%s) Tj ET" % page.encode("cp1252")) if page else b""
        filtered = b" /Filter /FlateDecode" if page else b""
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R "
            b"/Resources << /Font << /F1 3 0 R >> >> >>" % (6 + 2 * i)
        )
        objects.append(b"<< /Length %d%s >>\nstream\n%s\nendstream" % (len(stream), filtered, stream))
    out, offsets = bytearray(b"%PDF-1.4\n"), []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    start = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    out += b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    out += b"trailer << /Size %d /Root 1 0 R /Info 4 0 R >>\nstartxref\n%d\n%%%%EOF" % (
        len(objects) + 1,
        start,
    )
    return bytes(out)


def write(folder: Path, name: str, data: str | bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


# Text


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.txt", "text"),
        ("a.rst", "text"),
        ("a.md", "markdown"),
        ("a.Markdown", "markdown"),
        ("a.py", "python"),
    ],
)
def test_text_formats(tmp_path, name, kind):
    document = read_document(write(tmp_path, name, "# Zürich\r\nline\rlast\n\0"))
    assert document.text == "# Zürich\nline\nlast\n"
    assert document.kind == kind
    assert document.doc_id == (tmp_path / name).as_posix()
    assert document.source == str(tmp_path / name)


def test_doc_id_is_absolute_and_can_be_overridden(tmp_path, monkeypatch):
    write(tmp_path, "a.txt", "x")
    monkeypatch.chdir(tmp_path)
    assert read_document("a.txt").doc_id == (tmp_path / "a.txt").as_posix()
    assert read_document("a.txt", doc_id="mine").doc_id == "mine"


def test_byte_order_mark_is_dropped(tmp_path):
    assert read_document(write(tmp_path, "a.txt", b"\xef\xbb\xbfabc")).text == "abc"


def test_empty_document(tmp_path):
    assert read_document(write(tmp_path, "a.txt", "")).text == ""


@pytest.mark.parametrize(("data", "offset"), [(b"caf\xe9!", 3), (b"\xef\xbb\xbfcaf\xe9!", 6)])
def test_undecodable_bytes_are_named_not_replaced(tmp_path, data, offset):
    with pytest.raises(DocumentError, match=rf"byte 0xe9 at offset {offset}.*iconv"):
        read_document(write(tmp_path, "a.txt", data))


def test_utf16_says_so(tmp_path):
    with pytest.raises(DocumentError, match="UTF-16"):
        read_document(write(tmp_path, "a.txt", "hello".encode("utf-16")))


def test_python_coding_comment(tmp_path):
    source = "# -*- coding: latin-1 -*-\nx = 'é'\n"
    assert read_document(write(tmp_path, "a.py", source.encode("latin-1"))).text == source
    with pytest.raises(DocumentError, match="coding comment"):
        read_document(write(tmp_path, "b.py", "# coding: klingon\n"))
    with pytest.raises(DocumentError, match="offset 5"):
        read_document(write(tmp_path, "c.py", b"x = '\xe9'\n"))


# HTML

PAGE = """<!doctype html><html><head><title> A  &amp; B </title>
<style>p { color: red }</style><script>alert("no")</script>
<body><!-- hidden --><h1>Head<b>ing</b></h1><p>First   para-
graph with <a href=x>a link</a>.</p><p>Second<br>line
<ul><li>one</li><li>two</li></ul>
<table><tr><td>a</td><td>b</td></tr><tr><td>c</td><td>d</td></tr></table>
<pre>def f():
    return 1</pre>end</body></html>"""


def test_html_keeps_block_structure(tmp_path):
    document = read_document(write(tmp_path, "a.html", PAGE))
    assert document.metadata == {"title": "A & B"}
    assert document.kind == "text"
    assert document.text == (
        "Heading\n\nFirst para- graph with a link.\n\nSecond\nline\n\none\ntwo\n\na\tb\nc\td\n\n"
        "def f():\n    return 1\n\nend"
    )


@pytest.mark.parametrize("declared", ["iso-8859-1", "windows-1252"])
def test_html_meta_charset(tmp_path, declared):
    page = f'<meta charset="{declared}"><p>caf\xe9 \u20ac</p>'.encode("cp1252")
    assert read_document(write(tmp_path, "a.htm", page)).text == "café €"


def test_html_meta_http_equiv(tmp_path):
    page = '<meta http-equiv="Content-Type" content="text/html; charset=koi8-r"><p>мир</p>'.encode("koi8-r")
    assert read_document(write(tmp_path, "a.html", page)).text == "мир"


def test_html_without_charset_must_be_utf8(tmp_path):
    assert read_document(write(tmp_path, "a.html", "<p>мир")).text == "мир"
    with pytest.raises(DocumentError, match="offset 3"):
        read_document(write(tmp_path, "b.html", b"<p>\xe9"))
    with pytest.raises(DocumentError, match="klingon"):
        read_document(write(tmp_path, "c.html", '<meta charset="klingon">'))
    with pytest.raises(DocumentError, match="as it declares"):
        read_document(write(tmp_path, "d.html", b'<meta charset="utf-8"><p>\xe9'))


def test_html_nested_beyond_the_recursion_limit(tmp_path):
    depth = 5000
    page = "<div>" * depth + "deep" + "</div>" * depth
    assert read_document(write(tmp_path, "a.html", page)).text == "deep"


# PDF


def test_pdf(tmp_path):
    document = read_document(write(tmp_path, "a.pdf", make_pdf(["First page", "", "Third café"], "The title")))
    assert document.text == "First page\n\nThird café"
    assert document.metadata == {"title": "The title", "pages_without_text": "2"}


def test_pdf_without_text_asks_for_ocr(tmp_path):
    with pytest.raises(DocumentError, match=r"a\.pdf.*OCR"):
        read_document(write(tmp_path, "a.pdf", make_pdf(["", ""])))


@pytest.mark.parametrize("password", ["", "secret"])
def test_encrypted_pdf(tmp_path, password):
    path = write(tmp_path, "a.pdf", make_pdf(["Page"]))
    writer = pypdf.PdfWriter(clone_from=path)
    writer.encrypt(user_password=password, owner_password="owner", algorithm="RC4-128")
    writer.write(path)
    if password:
        with pytest.raises(DocumentError, match="password"):
            read_document(path)
    else:
        assert read_document(path).text == "Page"


@pytest.mark.parametrize("data", [b"", b"not a pdf", make_pdf(["Page"])[:120]])
def test_broken_pdf(tmp_path, data):
    with pytest.raises(DocumentError, match=r"a\.pdf"):
        read_document(write(tmp_path, "a.pdf", data))


# Files and folders


def test_unusable_paths(tmp_path):
    with pytest.raises(DocumentError, match="does not exist"):
        read_document(tmp_path / "absent.txt")
    with pytest.raises(DocumentError, match=r"\.docx is not supported.*\.md"):
        read_document(write(tmp_path, "a.docx", "x"))
    with pytest.raises(DocumentError, match="without suffix"):
        read_document(write(tmp_path, "README", "x"))
    with pytest.raises(DocumentError, match="iter_documents"):
        read_document(tmp_path)
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DocumentError, match="regular file"):
        read_document(tmp_path / "pipe.txt")


@pytest.fixture
def tree(tmp_path):
    for name in ("b.txt", "a.md", "sub/c.py", "sub/d.bin", ".hidden.txt", ".git/e.txt", "z/f.rst"):
        write(tmp_path, name, name)
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    return tmp_path


def test_walk(tree):
    skipped = {}
    found = list(iter_documents(tree, on_skip=lambda path, reason: skipped.update({path.name: reason})))
    assert [d.text for d in found] == ["a.md", "b.txt", "sub/c.py", "z/f.rst"]
    assert skipped.keys() == {"d.bin", ".hidden.txt", ".git", "loop"}


def test_walk_without_recursion(tree):
    assert [d.text for d in iter_documents([tree], recursive=False)] == ["a.md", "b.txt"]


def test_named_files_are_read_once_and_must_be_supported(tree):
    texts = [d.text for d in iter_documents([tree / ".hidden.txt", tree / "sub", tree, tree / "b.txt"])]
    assert texts == [".hidden.txt", "sub/c.py", "a.md", "b.txt", "z/f.rst"]
    with pytest.raises(DocumentError, match=r"\.bin is not supported"):
        list(iter_documents([tree / "sub" / "d.bin"]))


def test_a_bad_file_in_a_folder_can_be_reported(tree):
    bad = write(tree, "aa.txt", b"\xff\xff")
    with pytest.raises(DocumentError, match=r"aa\.txt"):
        list(iter_documents(tree))
    errors_seen = []
    found = list(iter_documents(tree, on_error=lambda path, error: errors_seen.append((path, str(error)))))
    assert len(found) == 4
    assert [path for path, _ in errors_seen] == [bad]
    with pytest.raises(DocumentError):
        list(iter_documents([bad], on_error=lambda path, error: None))


# Document


def test_content_hash_covers_text_and_kind_only():
    document = Document("a", "text", metadata={"title": "x"})
    assert content_hash(document) == content_hash(Document("b", "text", "elsewhere"))
    others = [Document("a", "text "), Document("a", "text", kind="markdown"), Document("a", "")]
    assert len({content_hash(d) for d in [document, *others]}) == 4


def test_document_is_a_value():
    metadata = {"title": "x"}
    document = Document("a", "t", metadata=metadata)
    metadata["title"] = "y"
    assert document.metadata == {"title": "x"}
    assert hash(document) == hash(Document("a", "t", metadata={"title": "x"}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"doc_id": ""}, "non-empty"),
        ({"text": b"bytes"}, "bytes"),
        ({"text": "a\ud800"}, "character 1"),
        ({"doc_id": "\udcff.txt"}, "rename"),
        ({"kind": "docx"}, "markdown"),
        ({"metadata": {"page": 3}}, "page"),
    ],
)
def test_document_refuses(arguments, message):
    with pytest.raises(DocumentError, match=message):
        Document(**{"doc_id": "a", "text": "t", **arguments})


@pytest.mark.parametrize("module", [documents, errors])
def test_all_is_complete(module):
    public = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    }
    assert public <= set(module.__all__)
