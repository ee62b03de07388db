"""One machine ingests, another answers: documents and chunks published together."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import xxhash
import zstandard
from epic_engine import ConfigError, FileStore, SamplingParams, StoreError
from epic_engine.compiler import Compiler

from epic_rag import EpicRAG
from epic_rag.engines import acquire
from epic_rag.errors import RagError, RegistryError
from epic_rag.publishing import fetch_documents, publish_corpus
from epic_rag.texts import TextItem
from tests.engine.faulty_files import FaultyFileSystem
from tests.rag.stack import TEXTS, model, open_rag, tokenizer

URL = "faulty://bucket/town"
ROOT = "/bucket/town"
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
QUESTION = "How much does rye bread cost at the bakery?"


@pytest.fixture(autouse=True)
def _empty() -> None:
    FaultyFileSystem.reset()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of chunks compiled at once."""
    found: list[int] = []
    original = Compiler.compile

    def counting(this: Compiler, chunks: Any, *rest: Any) -> Any:
        found.append(len(chunks))
        return original(this, chunks, *rest)

    monkeypatch.setattr(Compiler, "compile", counting)
    return found


def all_texts(rag: EpicRAG) -> dict[str, list[str]]:
    return {d.doc_id: [c.text for c in rag.registry.chunks(d.doc_id)] for d in rag.registry.documents()}


def current() -> dict[str, Any]:
    return json.loads(FaultyFileSystem.files()[f"{ROOT}/corpus/current.json"])


def test_another_machine_answers_the_same_and_compiles_nothing(tmp_path: Path, compiled: list[int]) -> None:
    with open_rag(tmp_path / "here") as rag:
        rag.add(texts=TEXTS)
        wanted = rag.ask(QUESTION, policy="legolink:3", sampling=GREEDY)
        keys = rag.registry.all_keys()
        assert publish_corpus(tmp_path / "here", URL).chunks == len(keys) + 1  # and the prompt's head
    compiled.clear()
    with open_rag(tmp_path / "there", remote=URL) as rag:
        found = rag.ask(QUESTION, policy="legolink:3", sampling=GREEDY)
        assert rag.registry.all_keys() == keys
    assert (found.text, found.sources, found.stats.reuse) == (wanted.text, wanted.sources, "composed")
    assert compiled == []


def test_later_openings_follow_the_publisher(tmp_path: Path, compiled: list[int]) -> None:
    with open_rag(tmp_path / "here") as rag:
        rag.add(texts=TEXTS)
        publish_corpus(tmp_path / "here", URL)
        open_rag(tmp_path / "there", remote=URL).close()
        rag.add(texts={"bakery": "The bakery was closed for good.", "mill": "The mill grinds rye on Mondays."})
        rag.delete("ferry")
        wanted = rag.ask("Who grinds rye?", policy="naive", sampling=GREEDY).text
        objects = set(FaultyFileSystem.files())
        publish_corpus(tmp_path / "here", URL)
        texts = all_texts(rag)
    assert objects - set(FaultyFileSystem.files()) == set()  # whoever fetches the ones before still can
    compiled.clear()
    with open_rag(tmp_path / "there", remote=URL) as rag:
        assert all_texts(rag) == texts
        assert rag.ask("Who grinds rye?", policy="naive", sampling=GREEDY).text == wanted
    assert compiled == []
    before = FaultyFileSystem.files()
    assert not fetch_documents(tmp_path / "there", URL)
    publish_corpus(tmp_path / "here", URL)
    assert {n: d for n, d in FaultyFileSystem.files().items() if n in before} == before


def test_changes_made_here_are_not_overwritten(tmp_path: Path) -> None:
    with open_rag(tmp_path / "here") as rag:
        rag.add(texts={"ferry": TEXTS["ferry"]})
        publish_corpus(tmp_path / "here", URL)
    with open_rag(tmp_path / "there", remote=URL) as rag:
        rag.add(texts={"own": "A note that was only made here."})
    with open_rag(tmp_path / "there", remote=URL) as rag:  # nothing newer: nothing in the way
        assert {d.doc_id for d in rag.registry.documents()} == {"ferry", "own"}
    with open_rag(tmp_path / "here") as rag:
        rag.add(texts={"bakery": TEXTS["bakery"]})
    publish_corpus(tmp_path / "here", URL)
    with pytest.raises(RagError, match="were changed here"):
        open_rag(tmp_path / "there", remote=URL)
    with open_rag(tmp_path / "there") as rag:
        assert {d.doc_id for d in rag.registry.documents()} == {"ferry", "own"}
    with open_rag(tmp_path / "mine") as rag:
        rag.add(texts={"own": "A note that was only made here."})
    with pytest.raises(RagError, match="were changed here"):
        open_rag(tmp_path / "mine", remote=URL)


def test_a_document_deleted_here_stays_deleted(tmp_path: Path) -> None:
    with open_rag(tmp_path / "here") as rag:
        rag.add(texts=TEXTS)
        publish_corpus(tmp_path / "here", URL)
    with open_rag(tmp_path / "there", remote=URL) as rag:
        keys = {r.key for r in rag.registry.chunks("ferry")} - {r.key for r in rag.registry.chunks("library")}
        rag.delete("ferry")
        assert not keys & {info.key.hex for info in rag.engine.store.entries()}
    with open_rag(tmp_path / "there", remote=URL) as rag:
        assert "ferry" not in {d.doc_id for d in rag.registry.documents()}
        assert not keys & {info.key.hex for info in rag.engine.store.entries()}


def test_without_the_network_the_last_documents_answer(tmp_path: Path) -> None:
    with open_rag(tmp_path / "here") as rag:
        rag.add(texts=TEXTS)
        publish_corpus(tmp_path / "here", URL)
    with open_rag(tmp_path / "there", remote=URL) as rag:
        wanted = rag.ask(QUESTION, policy="legolink:3", sampling=GREEDY).text
    FaultyFileSystem.down = True
    with open_rag(tmp_path / "there", remote=URL) as rag:
        assert rag.ask(QUESTION, policy="legolink:3", sampling=GREEDY).text == wanted
        assert rag.ask("When does the ferry leave?", sampling=GREEDY).text  # compiled here
    with pytest.raises(RagError, match="cannot be read"):
        open_rag(tmp_path / "new", remote=URL)


def test_chunks_that_are_not_published_are_compiled(tmp_path: Path, compiled: list[int]) -> None:
    with open_rag(tmp_path / "here") as rag:
        rag.add(texts=TEXTS)
        wanted = rag.ask(QUESTION, policy="legolink:3", sampling=GREEDY).text
        publish_corpus(tmp_path / "here", URL)
    for name in [name for name in FaultyFileSystem.store if name.endswith(".seg")]:
        del FaultyFileSystem.store[name]
    compiled.clear()
    with open_rag(tmp_path / "there", remote=URL) as rag:
        assert rag.ask(QUESTION, policy="legolink:3", sampling=GREEDY).text == wanted
    assert sum(compiled) > 0


def test_models_of_frameworks_share_what_was_published(tmp_path: Path, compiled: list[int]) -> None:
    options: dict[str, Any] = {"tokenizer": tokenizer(), "selftest": False}
    with acquire(model(), store=tmp_path / "here", namespace="a/b", **options) as lease:
        lease.texts("isolated").add([TextItem("a", "The crane lifts four tonnes.")])
        key = lease.texts("isolated").key_of("a")
    publish_corpus(tmp_path / "here", URL)
    compiled.clear()
    there = {"store": tmp_path / "there", "namespace": "a/b", "remote": URL, **options}
    with acquire(model(), **there, remote_options={}) as lease, acquire(model(), **there) as same:
        assert same.engine is lease.engine
        assert lease.texts("isolated").ids() == ["a"]
        assert lease.engine.generate([key, [5, 6]], GREEDY).token_ids
    assert compiled == []
    with pytest.raises(ConfigError, match="needs store"):
        acquire(model(), remote=URL, **options)


@pytest.mark.parametrize("torn", [False, True])
def test_killed_at_any_change_the_documents_before_stay(tmp_path: Path, torn: bool) -> None:
    with open_rag(tmp_path / "here") as rag:
        rag.add(texts={"ferry": TEXTS["ferry"]})
        publish_corpus(tmp_path / "here", URL)
        rag.add(texts={"bakery": TEXTS["bakery"]})
    start = FaultyFileSystem.files()
    FaultyFileSystem.torn = torn
    states = []
    for step in range(1, 50):
        FaultyFileSystem.store.clear()
        for name, data in start.items():
            FaultyFileSystem.replace(name, data)
        FaultyFileSystem.writes, FaultyFileSystem.fail_at = 0, step
        try:
            publish_corpus(tmp_path / "here", URL)
        except StoreError:
            killed = True
        else:
            killed = False
        FaultyFileSystem.fail_at = None
        if not killed:
            break
        folder = tmp_path / f"there-{step}"
        fetch_documents(folder, URL)
        with closing(sqlite3.connect(folder / "registry.sqlite")) as db:
            states.append([row[0] for row in db.execute("SELECT doc_id FROM documents ORDER BY doc_id")])
    assert step > 4
    assert all(state in (["ferry"], ["bakery", "ferry"]) for state in states)
    assert states[0] == ["ferry"]


def forge(change: str, tmp_path: Path) -> None:
    """Publish a changed registry, its digest and sizes in order."""
    fields = current()
    packed = fields["files"]["registry.sqlite"]
    file = tmp_path / "forged.sqlite"
    file.write_bytes(zstandard.ZstdDecompressor().decompress(FaultyFileSystem.files()[f"{ROOT}/{packed['name']}"]))
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.executescript(change)
    data = zstandard.ZstdCompressor().compress(file.read_bytes())
    packed |= {"nbytes": len(data), "digest": xxhash.xxh3_128_hexdigest(data), "unpacked": file.stat().st_size}
    FaultyFileSystem.replace(f"{ROOT}/{packed['name']}", data)
    FaultyFileSystem.replace(f"{ROOT}/corpus/current.json", json.dumps(fields).encode())


def test_forged_documents_are_refused(tmp_path: Path) -> None:
    with open_rag(tmp_path / "here") as rag:
        rag.add(texts={"ferry": TEXTS["ferry"]})
        publish_corpus(tmp_path / "here", URL)
    good = FaultyFileSystem.files()
    changes = [
        "CREATE TRIGGER t AFTER UPDATE ON state BEGIN DELETE FROM documents; END",
        "CREATE VIEW v AS SELECT 1",
        "CREATE TABLE more (x)",
        "PRAGMA application_id = 5",
        "PRAGMA user_version = 99",
        "DROP TABLE chunks",
    ]
    for change in changes:
        forge(change, tmp_path)
        with pytest.raises(RagError, match="cannot be used"):
            fetch_documents(tmp_path / "there", URL)
        FaultyFileSystem.replace(f"{ROOT}/corpus/current.json", good[f"{ROOT}/corpus/current.json"])
        for name, data in good.items():
            FaultyFileSystem.replace(name, data)
    fields = current()
    packed = fields["files"]["registry.sqlite"]
    forged: list[dict[str, Any]] = [
        {"files": {name: packed}}
        for name in ("../registry.sqlite", "texts/../texts.sqlite", "texts/a/b/texts.sqlite", "/etc/x", "texts/a\0/x")
    ]
    forged += [{"files": {"registry.sqlite": packed | c}} for c in ({"name": "../x.sqlite"}, {"nbytes": -1}, {"x": 1})]
    forged += [{"files": []}, {"version": 9}, {"format": "x"}]
    for change in forged:
        FaultyFileSystem.replace(f"{ROOT}/corpus/current.json", json.dumps(fields | change).encode())
        with pytest.raises(RagError, match="cannot be"):
            fetch_documents(tmp_path / "there", URL)
    made = {path.name for path in (tmp_path / "there").rglob("*") if path.is_file()}
    assert {name.partition("-")[0] for name in made} <= {"registry.sqlite"}
    for name, data in good.items():
        FaultyFileSystem.replace(name, data)
    assert fetch_documents(tmp_path / "there", URL)


def test_another_embedders_documents_are_refused(tmp_path: Path) -> None:
    with open_rag(tmp_path / "here") as rag:
        rag.add(texts={"ferry": TEXTS["ferry"]})
        publish_corpus(tmp_path / "here", URL)

    class Other:
        name, dim = "another", 64

    with pytest.raises(RegistryError, match="embedder"):
        open_rag(tmp_path / "there", remote=URL, embedder=Other())


def test_what_cannot_be_published_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no chunks"):
        publish_corpus(tmp_path, URL)
    FileStore(tmp_path / "chunks").close()
    FaultyFileSystem.replace(f"{ROOT}/corpus/current.json", b"{}")
    with pytest.raises(StoreError, match="cannot be used"):
        publish_corpus(tmp_path, URL)
