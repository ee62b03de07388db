import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from epic_rag import registry as registry_module
from epic_rag.errors import DocumentNotFoundError, RegistryError
from epic_rag.registry import ChunkRecord, DocumentRecord, Registry

ROOT = Path(__file__).parents[2]


def record(doc_id, keys, content="c0", at=1.5):
    document = DocumentRecord(doc_id, f"/{doc_id}", content, "s0", {"title": f"Ä {doc_id}"}, at)
    chunks = [
        ChunkRecord(f"{doc_id}#{i}", doc_id, i, f"text {i} of {doc_id}", (i, 2**31 - 1, 7), key)
        for i, key in enumerate(keys)
    ]
    rng = np.random.default_rng(sum(doc_id.encode()))
    return document, chunks, rng.standard_normal((len(keys), 4)).astype(np.float32)


@pytest.fixture
def registry(tmp_path):
    with Registry.open(tmp_path / "new" / "registry.sqlite") as registry:
        yield registry


# Documents and chunks


def test_everything_comes_back(registry, tmp_path):
    first, second = record("a", ["0a", "0b"]), record("b#1", ["0a"])
    assert registry.put_document(*first) == registry.put_document(*second) == []
    with Registry.open(tmp_path / "new" / "registry.sqlite") as again:
        assert again.documents() == [first[0], second[0]]
        assert again.get_document("b#1") == second[0]
        assert again.chunks("a") == first[1]
        assert again.chunk("b#1#0") == second[1][0]
        assert again.chunks_by_id(["b#1#0", "a#1", "b#1#0"]) == [second[1][0], first[1][1], second[1][0]]
        ids, matrix = again.embeddings()
        assert ids == ["a#0", "a#1", "b#1#0"]
        assert matrix.dtype == np.float32
        np.testing.assert_array_equal(matrix, np.concatenate([first[2], second[2]]))
        assert again.counts() == {"documents": 2, "chunks": 3, "tokens": 9}
        assert "a" in again
        assert "z" not in again


def test_empty_registry_and_empty_document(registry):
    ids, matrix = registry.embeddings()
    assert (ids, matrix.shape) == ([], (0, 0))
    assert registry.counts() == {"documents": 0, "chunks": 0, "tokens": 0}
    registry.put_document(*record("empty", []))
    assert registry.chunks("empty") == []
    assert registry.counts() == {"documents": 1, "chunks": 0, "tokens": 0}


def test_vectors_may_live_elsewhere(registry):
    document, chunks, _ = record("a", ["0a", "0b"])
    registry.put_document(document, chunks, np.empty((2, 0), np.float32))
    ids, matrix = registry.embeddings()
    assert (ids, matrix.shape) == (["a#0", "a#1"], (2, 0))


def test_many_ids_at_once(registry):
    registry.put_document(*record("a", ["0a"] * 1234))
    wanted = [f"a#{i}" for i in reversed(range(1234))]
    assert [chunk.chunk_id for chunk in registry.chunks_by_id(wanted)] == wanted
    assert [chunk.ordinal for chunk in registry.chunks("a")] == list(range(1234))


def test_is_current(registry):
    registry.put_document(*record("a", ["0a"]))
    assert registry.is_current("a", "c0", "s0")
    assert not registry.is_current("a", "c1", "s0")
    assert not registry.is_current("a", "c0", "s1")
    assert not registry.is_current("b", "c0", "s0")


def test_replacing_frees_what_nobody_uses(registry):
    registry.put_document(*record("a", ["0a", "0b", "0c", "0c"]))
    registry.put_document(*record("b", ["0b"]))
    assert registry.put_document(*record("a", ["0a", "0d"], content="c1")) == ["0c"]
    assert registry.all_keys() == {"0a", "0b", "0d"}
    assert registry.delete_document("a") == ["0a", "0d"]
    assert registry.delete_document("b") == ["0b"]
    assert registry.counts()["chunks"] == 0


def test_update_key(registry):
    registry.put_document(*record("a", ["0a", "0a", "0b"]))
    assert registry.update_key("0a", "0f") == 2
    assert registry.update_key("0a", "0f") == 0
    assert [chunk.key for chunk in registry.chunks("a")] == ["0f", "0f", "0b"]
    with pytest.raises(RegistryError, match="hexadecimal"):
        registry.update_key("0b", "KEY")


def test_many_at_once_are_as_one_by_one_in_one_change(registry):
    assert registry.put_documents([record("a", ["0a", "0b"]), record("b", ["0b", "0c"])]) == []
    before = registry.changes_token()
    # "0a" moves on to another document in the same change, so it is free at no time.
    assert registry.put_documents([record("a", ["0d"]), record("c", ["0a"]), record("b", ["0c"])]) == ["0b"]
    assert registry.changes_token() == before + 1
    assert [[c.key for c in registry.chunks(d)] for d in "abc"] == [["0d"], ["0c"], ["0a"]]
    document, chunks, vectors = record("e", ["0e"])
    with pytest.raises(RegistryError, match="dimensions"):
        registry.put_documents([record("a", ["0f"]), (document, chunks, vectors[:, :3].copy())])
    assert "e" not in registry
    assert registry.all_keys() == {"0a", "0c", "0d"}
    assert registry.delete_documents(["a", "unknown", "c", "a"]) == ["0a", "0d"]
    assert registry.changes_token() == before + 2
    assert [d.doc_id for d in registry.documents()] == ["b"]


def test_unknown_ids_name_close_ones(registry):
    registry.put_document(*record("/data/manual.md", ["0a"]))
    for call in (registry.delete_document, registry.get_document, registry.chunks):
        for typed in ("manual.md", "/data/manul.md"):
            with pytest.raises(DocumentNotFoundError, match=r"did you mean '/data/manual\.md'\?"):
                call(typed)
    with pytest.raises(KeyError, match=r"documents\(\)"):
        registry.delete_document("x")
    with pytest.raises(DocumentNotFoundError, match=r"'x#0'.*1 others"):
        registry.chunks_by_id(["/data/manual.md#0", "x#0", "x#1"])


def test_refused_puts_change_nothing(registry):
    registry.put_document(*record("a", ["0a", "0b"]))
    before = registry.changes_token()
    document, chunks, vectors = record("a", ["0c", "0d"])
    for bad_chunks, bad_vectors, message in [
        (chunks[::-1], vectors, "numbered from 0"),
        (record("b", ["0c", "0d"])[1], vectors, "its own chunks"),
        (chunks, vectors[:1], r"shape \(2, dim\)"),
        (chunks, vectors.astype(np.float64), "float32"),
        (chunks, vectors * np.nan, "NaN"),
        ([ChunkRecord("a#0", "a", 0, "t", (-1,), "0c"), chunks[1]], vectors, "token ids"),
    ]:
        with pytest.raises(RegistryError, match=message):
            registry.put_document(document, bad_chunks, bad_vectors)
    registry.put_document(*record("b", ["0a"]))
    with pytest.raises(RegistryError, match=r"3 dimensions.*4"):
        registry.put_document(document, chunks, vectors[:, :3].copy())
    assert registry.changes_token() == before + 1
    assert [chunk.key for chunk in registry.chunks("a")] == ["0a", "0b"]


def test_records_are_checked():
    with pytest.raises(RegistryError, match="'a#1'"):
        ChunkRecord("a#0", "a", 1, "t", (), "0a")
    with pytest.raises(RegistryError, match="hexadecimal"):
        ChunkRecord("a#0", "a", 0, "t", (), "../../etc")


class ReferenceCounts(RuleBasedStateMachine):
    """The registry beside the plainest model of it: a dict of lists of keys."""

    doc_ids = st.sampled_from(["a", "b", "c"])
    key_lists = st.lists(st.sampled_from(["0a", "0b", "0c", "0d"]), max_size=4)

    @initialize()
    def start(self):
        # One file a run would be slow to sync; memory has the same SQL.
        connection = sqlite3.connect(":memory:", isolation_level=None)
        connection.execute("PRAGMA foreign_keys = ON")
        for statement in registry_module._registry_schema._TABLES:
            connection.execute(statement)
        self.registry = Registry(connection, Path("memory"))
        self.model = {}

    def used(self):
        return {key for keys in self.model.values() for key in keys}

    @rule(doc_id=doc_ids, keys=key_lists)
    def put(self, doc_id, keys):
        before = self.used()
        self.model[doc_id] = keys
        assert self.registry.put_document(*record(doc_id, keys)) == sorted(before - self.used())

    @rule(doc_id=doc_ids)
    def delete(self, doc_id):
        if doc_id not in self.model:
            with pytest.raises(DocumentNotFoundError):
                self.registry.delete_document(doc_id)
            return
        before = self.used()
        del self.model[doc_id]
        assert self.registry.delete_document(doc_id) == sorted(before - self.used())

    @rule(old=st.sampled_from(["0a", "0b"]), new=st.sampled_from(["0c", "0e"]))
    def recompile(self, old, new):
        changed = sum(keys.count(old) for keys in self.model.values())
        self.model = {doc_id: [new if key == old else key for key in keys] for doc_id, keys in self.model.items()}
        assert self.registry.update_key(old, new) == changed

    @invariant()
    def agree(self):
        if not hasattr(self, "registry"):
            return
        assert self.registry.all_keys() == self.used()
        for key in ("0a", "0b", "0c", "0d", "0e"):
            count = sum(keys.count(key) for keys in self.model.values())
            assert self.registry.reference_count(key) == count
        for doc_id, keys in self.model.items():
            assert [chunk.key for chunk in self.registry.chunks(doc_id)] == keys
        assert self.registry.counts()["chunks"] == sum(map(len, self.model.values()))


ReferenceCounts.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestReferenceCounts = ReferenceCounts.TestCase


# Settings and the file


def test_settings_and_freezing(registry):
    assert registry.get_setting("model") is None
    registry.set_setting("model", "a")
    registry.set_setting("model", "b")
    assert registry.get_setting("model") == "b"
    registry.freeze_setting("model", "b")
    before = registry.changes_token()
    registry.freeze_setting("model", "b")
    assert registry.changes_token() == before
    for change in (registry.freeze_setting, registry.set_setting):
        with pytest.raises(RegistryError, match=r"model = 'b', not 'c'.*new directory"):
            change("model", "c")
    registry.set_setting("model", "b")
    registry.freeze_setting("fresh", "1")
    with pytest.raises(RegistryError, match="'1', not '2'"):
        registry.freeze_setting("fresh", "2")


def test_changes_token_sees_every_connection(registry, tmp_path):
    with Registry.open(tmp_path / "new" / "registry.sqlite") as other:
        tokens = [registry.changes_token()]
        for change in (
            lambda: registry.put_document(*record("a", ["0a"])),
            lambda: other.put_document(*record("b", ["0a"])),
            lambda: other.update_key("0a", "0b"),
            lambda: other.delete_document("a"),
            lambda: registry.set_setting("x", "y"),
        ):
            change()
            assert registry.changes_token() == other.changes_token()
            tokens.append(registry.changes_token())
        registry.documents()
        assert registry.changes_token() == tokens[-1]
        assert sorted(set(tokens)) == tokens


def test_other_files_are_refused_and_left_alone(tmp_path):
    text = tmp_path / "notes"
    text.write_text("not a database, but longer than the header of one " * 50)
    with pytest.raises(RegistryError, match="not an SQLite file"):
        Registry.open(text)
    foreign = tmp_path / "foreign.sqlite"
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE mine (x)")
    connection.close()
    before = foreign.read_bytes()
    with pytest.raises(RegistryError, match="another program"):
        Registry.open(foreign)
    assert foreign.read_bytes() == before
    with pytest.raises(RegistryError, match="permissions"):
        Registry.open(tmp_path)
    with pytest.raises(RegistryError, match="cannot be made"):
        Registry.open(text / "registry.sqlite")


def test_newer_format_is_refused(tmp_path):
    path = tmp_path / "registry.sqlite"
    Registry.open(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 2")
    connection.close()
    with pytest.raises(RegistryError, match=r"format 2.*upgrade"):
        Registry.open(path)


def test_durability_settings(registry):
    connection = registry._connection
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
    assert connection.execute("PRAGMA foreign_keys").fetchone() == (1,)
    assert connection.execute("PRAGMA busy_timeout").fetchone()[0] >= 10_000


def test_closed(registry):
    registry.close()
    registry.close()
    with pytest.raises(RegistryError, match=r"closed.*Registry\.open"):
        registry.documents()
    with pytest.raises(RegistryError, match="closed"):
        registry.put_document(*record("a", []))


# At once


def test_threads_share_one_registry(registry):
    failures = []

    def work(name):
        try:
            for i in range(15):
                registry.put_document(*record(f"{name}{i}", ["0a", "0b"]))
                assert len(registry.chunks(f"{name}{i}")) == 2
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert registry.counts() == {"documents": 45, "chunks": 90, "tokens": 270}


WRITER = textwrap.dedent(
    """
    import itertools, sys
    sys.path[:0] = [{root!r}, {root!r} + "/engine"]
    from tests.rag.test_registry import record
    from epic_rag.registry import Registry

    path, name, count = sys.argv[1:]
    with Registry.open(path) as registry:
        for i in range(int(count)) if int(count) else itertools.count():
            # The same ids again and again, so that most puts replace.
            registry.put_document(*record(f"{{name}}{{i % 7}}", [f"{{i:02x}}"] * 20, content=str(i)))
            print(i, flush=True)
    """
).format(root=str(ROOT))


def start_writer(path, name, count):
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), name, str(count)], stdout=subprocess.PIPE, text=True
    )


def check_whole(path):
    """Every document has all its chunks, of one generation."""
    with Registry.open(path) as registry:
        assert registry._connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert registry._connection.execute("PRAGMA foreign_key_check").fetchall() == []
        documents = registry.documents()
        for document in documents:
            keys = [chunk.key for chunk in registry.chunks(document.doc_id)]
            assert keys == [f"{int(document.content_hash):02x}"] * 20
        assert registry.counts()["chunks"] == 20 * len(documents)
        return {document.doc_id: int(document.content_hash) for document in documents}


def test_two_processes_create_and_write_one_registry(tmp_path):
    path = tmp_path / "registry.sqlite"
    writers = [start_writer(path, name, 60) for name in "ab"]
    for writer in writers:
        output, _ = writer.communicate(timeout=120)
        assert writer.returncode == 0
        assert output.split() == [str(i) for i in range(60)]
    found = check_whole(path)
    assert found == {f"{name}{i % 7}": i for name in "ab" for i in range(60)}
    with Registry.open(path) as registry:
        assert registry.changes_token() == 120


def test_killed_writer_leaves_whole_documents(tmp_path):
    path = tmp_path / "registry.sqlite"
    for attempt in range(3):
        writer = start_writer(path, "a", 0)
        reported = -1
        for line in writer.stdout:
            reported = int(line)
            if reported == 20 + attempt:
                break
        time.sleep(0.003 * attempt)
        os.kill(writer.pid, signal.SIGKILL)
        rest, _ = writer.communicate()
        reported = int(rest.split("\n")[-2]) if rest.count("\n") else reported
        found = check_whole(path)
        # What was reported as done is there; at most one more had been committed.
        assert max(found.values()) in (reported, reported + 1)


def test_pages_hold_every_document_once_with_what_it_holds(registry):
    sizes = {f"d{n:02}": n % 4 for n in range(23)}
    for name, count in sizes.items():
        registry.put_document(*record(name, ["aa"] * count))
    for limit in (1, 5, 22, 23, 100):
        seen, after = [], ""
        while page := registry.listed(after, limit):
            assert len(page) <= limit
            seen += page
            after = page[-1].document.doc_id
        assert [(one.document.doc_id, one.chunks) for one in seen] == list(sizes.items())
        for one in seen:
            assert one.document == registry.get_document(one.document.doc_id)
            assert one.tokens == sum(len(c.token_ids) for c in registry.chunks(one.document.doc_id))
            assert one == registry.listed_document(one.document.doc_id)
    assert registry.listed_document("d99") is None


def test_metadata_change_alone_and_are_searched_by_number(registry):
    for name in ("a", "b", "c", "d"):
        registry.put_document(*record(name, ["aa"]))
    before, chunks = registry.changes_token(), registry.all_chunks()
    registry.set_metadata({"a": {"ends": "5.5"}, "b": {"ends": "1e3"}, "c": {}, "none": {"ends": "1"}})
    assert registry.changes_token() == before + 1
    assert registry.all_chunks() == chunks
    assert registry.get_document("b").metadata == {"ends": "1e3"}
    for number, found in ((5.4, []), (5.5, ["a"]), (999.0, ["a"]), (1e4, ["a", "b"])):
        assert registry.ending_before("ends", number) == found
    assert registry.ending_before("other", 1e9) == []
    assert "none" not in registry
