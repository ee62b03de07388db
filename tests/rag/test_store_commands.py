"""``epic-rag store``: what it prints, its exit codes, what it leaves; counted with plain SQLite and ``os.stat``."""

from __future__ import annotations

import io
import json
import os
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from epic_engine import ChunkInfo, ChunkKey, FileStore
from epic_engine.chunks import content_digest
from safetensors import safe_open

from epic_rag import store_commands
from epic_rag.engines import acquire
from epic_rag.texts import TextItem
from tests.damage import damage, where
from tests.engine.format_1 import write_format_1
from tests.rag.conftest import Run
from tests.rag.stack import TEXTS, model, open_rag, tokenizer

TENANT = "tenant/a"
SHARED = "The lighthouse was lit in 1871 and has never been dark since."


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents and texts of two namespaces over one chunk store; the tenant's chunks are kept as int8."""
    path = tmp_path_factory.mktemp("stores") / "both"
    with open_rag(path) as rag:
        rag.add(texts=TEXTS)
    for namespace, kv_dtype in ((TENANT, "int8"), ("b", "auto")):
        with acquire(
            model(), tokenizer=tokenizer(), store=path, namespace=namespace, kv_dtype=kv_dtype, selftest=False
        ) as lease:
            items = [TextItem("1", SHARED, "book"), TextItem("2", f"In {namespace} it rains.", "book")]
            lease.texts("isolated").add(items)
    return path


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A directory with nothing but ``chunks/``."""
    with closing(FileStore(tmp_path / "bare" / "chunks")) as chunks:
        chunks.put(some_chunks(6))
    return tmp_path / "bare"


def some_chunks(count: int, namespace: str = "default") -> list[tuple[ChunkInfo, torch.Tensor]]:
    torch.manual_seed(5)
    found = []
    for n in range(count):
        ids = (n, n + 1, 7)
        key = ChunkKey.of("f", namespace, "isolated", ids)
        info = ChunkInfo(key, namespace, "f", content_digest(ids), "isolated", ids, (), 0, 100.0 + n)
        kv = torch.randn(2, 2, 1, 3, 4)
        found.append((replace(info, nbytes=kv.nbytes), kv))
    return found


def rows(file: Path, text: str, *values: Any) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(file)) as db:
        return db.execute(text, values).fetchall()


def catalogue(store: Path, text: str, *values: Any) -> list[tuple[Any, ...]]:
    return rows(store / "chunks" / "catalogue.sqlite", text, *values)


def chunk_rows(store: Path) -> list[dict[str, Any]]:
    names = ("key", "namespace", "fingerprint", "context", "encoding", "tokens", "nbytes", "span", "created", "content")
    found = catalogue(
        store,
        "SELECT hex(c.key), n.name, f.name, x.name, c.encoding, c.token_ids, c.nbytes, c.span, c.created, c.content "
        "FROM chunks c, namespaces n, fingerprints f, contexts x "
        "WHERE n.id = c.namespace AND f.id = c.fingerprint AND x.id = c.context",
    )
    made = [dict(zip(names, row, strict=True)) for row in found]
    return [{**row, "key": row["key"].lower(), "tokens": len(row["tokens"]) // 4} for row in made]


def segment_bytes(store: Path) -> int:
    return sum(file.stat().st_size for file in (store / "chunks" / "segments").glob("*.seg"))


def texts_of(store: Path, name: str) -> bytes:
    return b"".join(file.read_bytes() for file in (store / "texts" / name).iterdir())


def printed(result: tuple[int, str, str], code: int = 0) -> Any:
    assert result[0] == code, result
    return json.loads(result[1])


# -- looking -----------------------------------------------------------------------------------------------------


def test_stats_count_what_sqlite_counts(run: Run, store: Path) -> None:
    run("store", "quota", "5MB", "--namespace", "b", "--store", str(store))
    facts = printed(run("store", "stats", "--store", str(store), "--json"))
    held = chunk_rows(store)
    assert facts["documents"] == len(TEXTS) + 4
    registries = [store / "registry.sqlite", *(store / "texts").glob("*/texts.sqlite")]
    counts = [rows(file, "SELECT count(*), sum(length(token_ids)) / 4 FROM chunks")[0] for file in registries]
    assert (facts["chunks"], facts["tokens"]) == tuple(map(sum, zip(*counts, strict=True)))
    assert facts["compiled_chunks"] == len(held)
    assert facts["compiled_tokens"] == sum(r["tokens"] for r in held)
    assert facts["kv_bytes"] == sum(r["nbytes"] for r in held)
    assert facts["stored_bytes"] == sum(r["span"] for r in held)
    assert facts["models"] == 2  # int8 chunks are those of another model
    assert facts["budget_bytes"] is None
    walked = [Path(folder) / name for folder, _, names in os.walk(store / "chunks") for name in names]
    assert abs(facts["disk_bytes"] - sum(f.stat().st_size for f in walked)) < 1 << 20  # SQLite's log comes and goes
    assert facts["disk_bytes"] > segment_bytes(store)

    groups: dict[tuple[str, ...], Counter[str]] = {}
    for row in held:
        kind = tuple(row[name] for name in ("namespace", "fingerprint", "context", "encoding"))
        groups.setdefault(kind, Counter()).update(
            chunks=1, tokens=row["tokens"], kv_bytes=row["nbytes"], stored_bytes=row["span"]
        )
    assert {kind[3] for kind in groups} == {"raw", "int8"}
    got = {
        (g["namespace"], g["fingerprint"], g["context"], g["encoding"]): {
            name: g[name] for name in ("chunks", "tokens", "kv_bytes", "stored_bytes")
        }
        for g in facts["groups"]
    }
    assert got == {kind: dict(count) for kind, count in groups.items()}
    spaces = {n["namespace"]: n for n in facts["namespaces"]}
    assert {name: n["chunks"] for name, n in spaces.items()} == Counter(r["namespace"] for r in held)
    assert spaces["b"]["quota_bytes"] == 5_000_000
    assert spaces[TENANT]["quota_bytes"] is None

    shown = run("store", "stats", "--store", str(store))[1]
    for word in (TENANT, "int8", "4.8 MiB", "budget", "default"):
        assert word in shown


def test_ls_names_documents_and_texts(run: Run, store: Path) -> None:
    listed = printed(run("store", "ls", "--store", str(store), "--json"))
    assert {(d["namespace"], d["doc_id"]) for d in listed} == {
        *(("default", name) for name in TEXTS),
        *((space, name) for space in (TENANT, "b") for name in ("1", "2")),
    }
    sizes = dict(rows(store / "registry.sqlite", "SELECT doc_id, count(*) FROM chunks GROUP BY doc_id"))
    assert {d["doc_id"]: d["chunks"] for d in listed if d["namespace"] == "default"} == sizes
    assert {d["source"] for d in listed if d["namespace"] == "b"} == {"book"}

    listed = printed(run("store", "ls", "--store", str(store), "--namespace", TENANT, "--json"))
    assert [(d["namespace"], d["doc_id"]) for d in listed] == [(TENANT, "1"), (TENANT, "2")]
    code, out, error = run("store", "ls", "--store", str(store), "--limit", "3", "--json")
    assert (code, len(json.loads(out))) == (0, 3)
    assert "first 3" in error
    assert "first" not in run("store", "ls", "--store", str(store), "--limit", str(len(TEXTS) + 4))[2]


def test_ls_shows_names_as_they_are(run: Run, tmp_path: Path) -> None:
    names = ["[bold]a[/bold]", "b[/nothing]"]
    with open_rag(tmp_path / "s") as rag:
        rag.add(texts=dict.fromkeys(names, "The oven was built by Olaf."))
    shown = run("store", "ls", "--store", str(tmp_path / "s"))[1]
    assert all(name in shown for name in names)


def test_ls_chunks_are_those_of_the_catalogue(run: Run, store: Path) -> None:
    listed = printed(run("store", "ls", "--chunks", "--store", str(store), "--json"))
    held = sorted(chunk_rows(store), key=lambda r: (r["created"], r["key"]))
    assert [c["key"] for c in listed] == [r["key"] for r in held]
    assert [(c["tokens"], c["encoding"], c["kv_bytes"]) for c in listed] == [
        (r["tokens"], r["encoding"], r["nbytes"]) for r in held
    ]
    mine = printed(run("store", "ls", "--chunks", "--store", str(store), "--namespace", TENANT, "--json"))
    assert [c["key"] for c in mine] == [r["key"] for r in held if r["namespace"] == TENANT]
    assert held[0]["key"][:12] in run("store", "ls", "--chunks", "--store", str(store), "--limit", "1")[1]


def test_a_directory_of_chunks_alone_is_a_store(run: Run, bare: Path) -> None:
    for path in (bare, bare / "chunks"):
        assert printed(run("store", "ls", "--store", str(path), "--json")) == []
        assert len(printed(run("store", "ls", "--chunks", "--store", str(path), "--json"))) == 6
        assert printed(run("store", "stats", "--store", str(path), "--json"))["compiled_chunks"] == 6
        assert printed(run("store", "verify", "--store", str(path), "--json"))["checked"] == 6
        code, _, error = run("store", "pin", "--doc", "x", "--store", str(path))
        assert code == 1
        assert "store ls" in error


def test_looking_changes_nothing(run: Run, store: Path, tmp_path: Path) -> None:
    # Who opens a store for writing removes a segment like this.
    begun = store / "chunks" / "segments" / f"{'0' * 32}.seg"
    begun.write_bytes(b"EPICSEG2" + bytes(56))

    def state() -> dict[str, bytes]:
        files = [f for f in store.rglob("*") if f.is_file() and ".sqlite" not in f.name and f.suffix != ".lock"]
        return {f.relative_to(store).as_posix(): f.read_bytes() for f in files}

    before, held = state(), chunk_rows(store)
    for command in (("ls",), ("ls", "--chunks"), ("stats",), ("export", str(tmp_path / "out"))):
        assert run("store", *command, "--store", str(store))[0] == 0
    for options in ((), ("--quick",)):
        facts = printed(run("store", "verify", *options, "--store", str(store), "--json"), code=1)
        assert facts["orphans"] == [begun.relative_to(store / "chunks").as_posix()]
    assert state() == before
    assert chunk_rows(store) == held


# -- checking ----------------------------------------------------------------------------------------------------


def test_verify_tells_damage_from_what_is_only_not_compiled(run: Run, store: Path) -> None:
    place = ("--store", str(store), "--json")
    victim = rows(store / "registry.sqlite", "SELECT key FROM chunks WHERE doc_id = 'ferry'")[0][0]
    damage(store / "chunks", victim)
    quick = printed(run("store", "verify", "--quick", *place))
    assert (quick["clean"], quick["corrupt"]) == (True, [])
    found = printed(run("store", "verify", *place), code=1)
    assert (found["corrupt"], found["not_compiled"], found["clean"]) == ([victim], [], False)
    code, out, _ = run("store", "verify", "--store", str(store))
    assert code == 1
    assert victim in out
    assert catalogue(store, "SELECT count(*) FROM quarantine") == [(0,)]  # it was only looked at
    found = printed(run("store", "verify", "--repair", *place))
    assert (found["repaired"], found["not_compiled"]) == (True, [victim])
    assert catalogue(store, "SELECT lower(hex(key)) FROM quarantine") == [(victim,)]
    assert printed(run("store", "verify", *place))["not_compiled"] == [victim]


# -- what goes ---------------------------------------------------------------------------------------------------


def test_rm_forgets_a_text_in_its_own_namespace(run: Run, store: Path) -> None:
    shared = next(r["content"] for r in chunk_rows(store) if r["namespace"] == TENANT)
    assert Counter(r["namespace"] for r in chunk_rows(store) if r["content"] == shared) == {TENANT: 1, "b": 1}
    assert printed(run("store", "rm", "1", "--namespace", TENANT, "--store", str(store), "--json")) == [
        {"doc_id": "1", "freed_chunks": 1}
    ]
    assert [r["namespace"] for r in chunk_rows(store) if r["content"] == shared] == ["b"]
    texts = {p.parent.name: rows(p, "SELECT doc_id FROM documents") for p in (store / "texts").glob("*/texts.sqlite")}
    assert texts == {"tenant%2Fa": [("2",)], "b": [("1",), ("2",)]}
    # A group's name stands for its texts.
    assert len(printed(run("store", "rm", "book", "--namespace", "b", "--store", str(store), "--json"))) == 2
    assert not [r for r in chunk_rows(store) if r["namespace"] == "b"]


def test_erase_leaves_nothing_of_a_namespace(run: Run, store: Path) -> None:
    mine = [r["key"] for r in chunk_rows(store) if r["namespace"] == TENANT]
    others = {r["key"] for r in chunk_rows(store) if r["namespace"] != TENANT}
    payloads = []
    for key, lies in where(store / "chunks").items():
        if key in mine:
            payloads.append(lies.file.read_bytes()[lies.offset : lies.offset + lies.stored])
    before = segment_bytes(store)
    assert SHARED.encode() in texts_of(store, "tenant%2Fa")
    facts = printed(run("store", "erase", "--namespace", TENANT, "--yes", "--store", str(store), "--json"))
    assert (facts["documents"], facts["chunks"]) == (2, len(mine))
    assert facts["freed_bytes"] > 0
    assert segment_bytes(store) < before
    whole = b"".join(f.read_bytes() for f in (store / "chunks" / "segments").glob("*.seg"))
    assert payloads
    assert not any(payload in whole for payload in payloads)
    assert {r["key"] for r in chunk_rows(store)} == others
    assert SHARED.encode() not in texts_of(store, "tenant%2Fa")
    assert SHARED.encode() in texts_of(store, "b")
    assert run("store", "verify", "--store", str(store))[0] == 0


def test_what_cannot_be_undone_is_asked_about(run: Run, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = chunk_rows(store)
    for command in (("erase", "--namespace", TENANT), ("rebuild",)):
        monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
        code, out, error = run("store", *command, "--store", str(store), "--json")
        assert (code, out) == (1, "")
        assert "nothing was changed" in error
    assert chunk_rows(store) == before


def test_gc_and_compact_give_bytes_back(run: Run, bare: Path) -> None:
    with closing(sqlite3.connect(bare / "chunks" / "catalogue.sqlite")) as db:
        db.execute("UPDATE chunks SET expires = 1 WHERE created < 103")
        db.commit()
    assert printed(run("store", "stats", "--store", str(bare), "--json"))["expired_chunks"] == 3
    assert printed(run("store", "gc", "--store", str(bare), "--json"))["expired"] == 3
    left = {r["key"] for r in chunk_rows(bare)}
    assert len(left) == 3
    before = segment_bytes(bare)
    assert printed(run("store", "compact", "--live-share", "0", "--store", str(bare), "--json")) == {"freed_bytes": 0}
    freed = printed(run("store", "compact", "--live-share", "1", "--store", str(bare), "--json"))["freed_bytes"]
    assert freed > 0
    assert segment_bytes(bare) < before
    assert {r["key"] for r in chunk_rows(bare)} == left
    assert run("store", "verify", "--store", str(bare))[0] == 0


def test_a_stopped_compaction_loses_nothing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(FileStore(tmp_path / "s" / "chunks", segment_bytes=1000)) as chunks:
        made = some_chunks(12)
        for one in made:
            chunks.put([one])
        chunks.delete([info.key for info, _ in made[::3]])
    left = {info.key.hex for n, (info, _) in enumerate(made) if n % 3}
    stop = iter([False, True])

    @contextmanager
    def impatient(what: str) -> Iterator[Any]:
        def report(done: int, total: int) -> None:
            if next(stop, False):
                raise KeyboardInterrupt

        yield report

    monkeypatch.setattr(store_commands, "stage_progress", impatient)
    code, out, error = run("store", "compact", "--live-share", "1", "--store", str(tmp_path / "s"), "--json")
    assert (code, out) == (130, "")
    assert "kept" in error
    assert {r["key"] for r in chunk_rows(tmp_path / "s")} == left
    before = segment_bytes(tmp_path / "s")
    assert printed(run("store", "compact", "--live-share", "1", "--store", str(tmp_path / "s"), "--json"))
    assert segment_bytes(tmp_path / "s") < before
    assert printed(run("store", "verify", "--store", str(tmp_path / "s"), "--json"))["checked"] == len(left)


# -- what stays --------------------------------------------------------------------------------------------------


def test_limits_are_written_and_taken_away(run: Run, store: Path) -> None:
    place = ("--store", str(store), "--json")
    quota = "SELECT quota FROM namespaces WHERE name = 'b'"
    assert printed(run("store", "quota", "1.5GiB", "--namespace", "b", *place))["quota_bytes"] == 3 << 29
    assert catalogue(store, quota) == [(3 << 29,)]
    assert printed(run("store", "quota", "none", "--namespace", "b", *place))["quota_bytes"] is None
    assert catalogue(store, quota) == [(None,)]
    budget = "SELECT value FROM settings WHERE name = 'max_bytes'"
    assert printed(run("store", "budget", "500MB", *place)) == {"budget_bytes": 500_000_000}
    assert catalogue(store, budget) == [(500_000_000,)]
    assert printed(run("store", "stats", *place))["budget_bytes"] == 500_000_000
    assert printed(run("store", "budget", "none", *place)) == {"budget_bytes": None}
    assert catalogue(store, budget) == []
    for wrong in ("much", "0", "0.5", "-3", "3 parsecs"):
        code, out, error = run("store", "budget", *place, "--", wrong)
        assert (code, out) == (1, "")
        assert "8GiB" in error


def test_pins_cover_what_was_compiled_of_a_document(run: Run, store: Path) -> None:
    place = ("--store", str(store), "--json")
    pinned = "SELECT lower(hex(c.key)) FROM chunks c JOIN ranks r ON r.chunk = c.id WHERE r.pinned"
    ferry = set(rows(store / "registry.sqlite", "SELECT key FROM chunks WHERE doc_id = 'ferry'"))
    with closing(FileStore(store / "chunks")) as chunks:  # another model's form of one of its chunks
        info = chunks.info(ChunkKey(min(ferry)[0]))
        assert info is not None
        other = replace(info, key=ChunkKey.of("g", "default", "isolated", info.token_ids), fingerprint="g")
        chunks.put([(other, chunks.load(info.key))])
    ferry.add((other.key.hex,))
    assert printed(run("store", "pin", "--doc", "ferry", *place))["chunks"] == len(ferry)
    assert set(catalogue(store, pinned)) == ferry
    facts = printed(run("store", "stats", *place))
    assert facts["pinned_chunks"] == len(ferry)
    assert facts["pinned_bytes"] == sum(r["span"] for r in chunk_rows(store) if (r["key"],) in ferry)
    assert printed(run("store", "pin", "--doc", "1", "--namespace", TENANT, *place))["chunks"] == 1
    assert len(catalogue(store, pinned)) == len(ferry) + 1
    assert printed(run("store", "unpin", "--doc", "ferry", *place))["chunks"] == len(ferry)
    assert len(catalogue(store, pinned)) == 1
    code, _, error = run("store", "pin", "--doc", "fery", *place)
    assert code == 1
    assert "did you mean 'ferry'" in error


# -- mending -----------------------------------------------------------------------------------------------------


def test_migrate_says_from_what_to_what(run: Run, tmp_path: Path) -> None:
    made = some_chunks(3)
    write_format_1(tmp_path / "old" / "chunks", made)
    place = ("--store", str(tmp_path / "old"))
    version = "PRAGMA user_version"
    for command in ("stats", "verify"):
        code, out, error = run("store", command, *place)
        assert (code, out) == (1, "")
        assert "store migrate" in error
    foretold = printed(run("store", "migrate", "--dry-run", *place, "--json"))
    assert (foretold["from"], foretold["chunks"], foretold["dry_run"]) == (1, 3, True)
    assert catalogue(tmp_path / "old", version) == [(1,)]
    next((tmp_path / "old" / "chunks" / "kv").glob("*/*.safetensors")).write_bytes(b"short")
    facts = printed(run("store", "migrate", *place, "--json"))
    assert facts == {**foretold, "unreadable_chunks": 1, "dry_run": False}
    assert catalogue(tmp_path / "old", version) == [(facts["to"],)] != [(1,)]
    assert len(chunk_rows(tmp_path / "old")) == 2
    assert "up to date" in run("store", "migrate", *place)[1]

    with closing(sqlite3.connect(tmp_path / "old" / "chunks" / "catalogue.sqlite")) as db:
        db.execute("PRAGMA user_version=9")
    for command in (("stats",), ("migrate",), ("migrate", "--dry-run")):
        code, out, error = run("store", *command, *place)
        assert (code, out) == (1, "")
        assert "upgrade" in error


def test_rebuild_brings_chunks_back(run: Run, bare: Path) -> None:
    place = ("--store", str(bare))
    held = {r["key"] for r in chunk_rows(bare)}
    file = bare / "chunks" / "catalogue.sqlite"
    for harm in (file.unlink, lambda: file.write_bytes(b"no database at all" * 400)):
        for ending in ("-wal", "-shm"):
            file.with_name(file.name + ending).unlink(missing_ok=True)
        harm()
        for command in (("stats",), ("gc",), ("verify", "--repair"), ("migrate",)):
            code, out, error = run("store", *command, *place)
            assert (code, out) == (1, "")
            assert "store rebuild" in error
            assert "Traceback" not in error
        assert printed(run("store", "rebuild", "--yes", *place, "--json")) == {"chunks": len(held)}
        assert {r["key"] for r in chunk_rows(bare)} == held
        assert run("store", "verify", *place)[0] == 0


def test_no_store_is_made_by_looking_for_one(run: Run, tmp_path: Path) -> None:
    commands = [
        ("ls",), ("stats",), ("verify",), ("gc",), ("compact",), ("migrate",), ("rebuild", "--yes"), ("budget", "none"),
        ("quota", "none", "--namespace", "x"), ("erase", "--namespace", "x", "--yes"), ("pin", "--doc", "x"),
        ("rm", "x"), ("export", str(tmp_path / "out")), ("publish", (tmp_path / "out").as_uri()),
    ]  # fmt: skip
    (tmp_path / "empty").mkdir()
    for place in ("absent", "empty"):
        for command in commands:
            code, out, error = run("store", *command, "--store", str(tmp_path / place))
            assert (code, out) == (2, ""), command
            assert "no store" in error.replace("│", "").replace("\n", " ")
    assert [p.name for p in tmp_path.iterdir()] == ["empty"]
    assert not any((tmp_path / "empty").iterdir())


# -- in and out --------------------------------------------------------------------------------------------------


def payloads(chunks: Path) -> dict[str, bytes]:
    return {key: lies.file.read_bytes()[lies.offset : lies.offset + lies.stored] for key, lies in where(chunks).items()}


def exported(folder: Path) -> set[str]:
    """Keys in an export, as any reader of safetensors finds them."""
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "np") as tensors:
            names |= {key.split("/")[0].split(".")[0] for key in tensors.keys()}  # noqa: SIM118
    return names


def test_what_is_exported_is_imported(run: Run, store: Path, tmp_path: Path) -> None:
    facts = printed(run("store", "export", str(tmp_path / "all"), "--store", str(store), "--json"))
    held = {r["key"] for r in chunk_rows(store)}
    assert (facts["chunks"], facts["missing"]) == (len(held), [])
    files = sorted((tmp_path / "all").glob("*.safetensors"))
    assert [file.name for file in files] == facts["files"]
    assert sum(file.stat().st_size for file in files) == facts["nbytes"]

    new = tmp_path / "new"
    facts = printed(run("store", "import", str(tmp_path / "all"), "--store", str(new), "--json"))
    assert (facts["chunks"], facts["known"], facts["skipped"], facts["problems"]) == (len(held), 0, 0, [])
    assert payloads(new / "chunks") == payloads(store / "chunks")
    again = printed(run("store", "import", str(tmp_path / "all"), "--store", str(new), "--json"))
    assert (again["chunks"], again["known"]) == (0, len(held))

    mine = {r["key"] for r in chunk_rows(store) if r["namespace"] == TENANT}
    other = tmp_path / "other"
    facts = printed(
        run("store", "import", str(tmp_path / "all"), "--namespace", TENANT, "--store", str(other), "--json")
    )
    assert (facts["chunks"], facts["skipped"]) == (len(mine), len(held) - len(mine))
    assert where(other / "chunks").keys() == mine

    with open(files[0], "r+b") as file:
        file.truncate(files[0].stat().st_size // 2)
    code, out, _ = run("store", "import", str(tmp_path / "all"), "--store", str(tmp_path / "third"))
    assert code == 1
    assert files[0].name in out


def test_export_takes_a_document_or_a_namespace(run: Run, store: Path, tmp_path: Path) -> None:
    ferry = {key for (key,) in rows(store / "registry.sqlite", "SELECT key FROM chunks WHERE doc_id = 'ferry'")}
    for name, options, wanted in (
        ("doc", ("--doc", "ferry"), ferry),
        ("space", ("--namespace", TENANT), {r["key"] for r in chunk_rows(store) if r["namespace"] == TENANT}),
    ):
        facts = printed(run("store", "export", str(tmp_path / name), *options, "--store", str(store), "--json"))
        assert facts["chunks"] == len(wanted)
        run("store", "import", str(tmp_path / name), "--store", str(tmp_path / f"{name} store"))
        assert where(tmp_path / f"{name} store" / "chunks").keys() == wanted
    damage(store / "chunks", *ferry)
    code, out, _ = run("store", "export", str(tmp_path / "bad"), "--doc", "ferry", "--store", str(store), "--json")
    assert code == 1
    assert set(json.loads(out)["missing"]) == ferry


def test_publish_puts_chunks_where_others_read_them(run: Run, store: Path, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    url = (tmp_path / "bucket").as_uri()
    held = chunk_rows(store)
    facts = printed(run("store", "publish", url, "--namespace", TENANT, "--store", str(store), "--json"))
    assert (facts["chunks"], facts["damaged"]) == (sum(r["namespace"] == TENANT for r in held), [])
    corpus = tmp_path / "bucket" / "corpus" / "current.json"
    assert not corpus.exists()  # documents go with everything only
    assert (
        printed(run("store", "publish", url, "--store", str(store), "--json"))["chunks"] == len(held) - facts["chunks"]
    )
    assert {"registry.sqlite", "texts/b/texts.sqlite"} <= json.loads(corpus.read_text())["files"].keys()
    there = b"".join(f.read_bytes() for f in (tmp_path / "bucket").rglob("*") if f.is_file())
    assert all(payload in there for payload in payloads(store / "chunks").values())
    assert printed(run("store", "publish", url, "--store", str(store), "--json"))["chunks"] == 0


# -- what chunks are kept as -------------------------------------------------------------------------------------


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "ferry.md").write_text("# Ferry\n\nThe ferry leaves at noon and at dusk.\n")
    return tmp_path / "docs"


def test_a_store_keeps_its_kv_dtype(run: Run, docs: Path, tmp_path: Path) -> None:
    store = tmp_path / "s"
    place = ("--store", str(store))
    # Nothing is compiled yet, so nothing holds.
    (tmp_path / "none").mkdir()
    assert run("ingest", str(tmp_path / "none"), *place, "--kv-dtype", "fp8")[0] == 0
    assert run("ingest", str(docs), *place, "--kv-dtype", "int8", "--context", "isolated")[0] == 0
    held = chunk_rows(store)
    assert held
    assert {r["encoding"] for r in held} == {"int8"}

    asking = ("ask", "When does the ferry leave?", *place, "--max-tokens", "2", "--context", "isolated")
    assert printed(run(*asking, "--json"))["tokens"]["reused"] > 0
    assert printed(run(*asking, "--kv-dtype", "int8", "--json"))["tokens"]["reused"] > 0
    (docs / "crane.txt").write_text("The crane lifts four tonnes.")
    assert run("ingest", str(docs), *place, "--context", "isolated")[0] == 0
    after = chunk_rows(store)
    assert {r["encoding"] for r in after} == {"int8"}
    assert {r["fingerprint"] for r in after} == {r["fingerprint"] for r in held}

    for command in (asking, ("ingest", str(docs), *place)):
        code, _, error = run(*command, "--kv-dtype", "bf16")
        assert code == 1
        assert "'int8'" in error
        assert "new directory" in error
    assert len(chunk_rows(store)) == len(after)
    assert run(*asking, "--kv-dtype", "int7")[0] == 1


def test_a_store_without_kv_dtype_is_not_compiled_anew(run: Run, docs: Path, tmp_path: Path) -> None:
    place = ("--store", str(tmp_path / "s"))
    assert run("ingest", str(docs), *place, "--context", "isolated")[0] == 0
    before = chunk_rows(tmp_path / "s")
    assert {r["encoding"] for r in before} == {"raw"}
    code, _, error = run("ask", "When?", *place, "--kv-dtype", "int8")
    assert code == 1
    assert "'auto'" in error
    assert chunk_rows(tmp_path / "s") == before


def test_ingest_compresses_and_sets_a_budget(run: Run, docs: Path, tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    place = ("--store", str(tmp_path / "s"))
    assert run("ingest", str(docs), *place, "--compression", "zstd", "--max-bytes", "64MiB")[0] == 0
    assert {r["encoding"] for r in chunk_rows(tmp_path / "s")} == {"raw+zstd"}
    assert catalogue(tmp_path / "s", "SELECT value FROM settings WHERE name = 'max_bytes'") == [(64 << 20,)]
    for wrong in (("--compression", "lz4"), ("--max-bytes", "lots")):
        code, _, error = run("ingest", str(docs), *place, *wrong)
        assert code == 1
        assert "zstd" in error or "8GiB" in error
