"""``bench store``: its figures against plain SQLite, the file system and a log written by hand."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import statistics
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from epic_engine import FileStore
from epic_engine.errors import ConfigError, StoreError

from epic_rag.benchmarks.store import StoreSettings, bench_store
from epic_rag.benchmarks.store_fill import TinyChunks, fill, ingest_figures
from epic_rag.benchmarks.store_lookups import in_a_process, look_up
from epic_rag.benchmarks.store_plot import draw_store
from epic_rag.benchmarks.store_tables import store_tables
from tests.rag.conftest import Run

KINDS = ["known", "known, absent", "info", "forms", "load, first", "load, again"]


def settings(**changes: Any) -> StoreSettings:
    small: dict[str, Any] = {"chunks": 300, "batch": 30, "lookups": 40, "loads": 3, "shape": (3, 2, 2, 16, 8)}
    return StoreSettings(**{**small, "rounds": 3, **changes})


def rows(directory: Path, text: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(directory / "catalogue.sqlite")) as db:
        return db.execute(text).fetchall()


def puts(directory: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / "puts.jsonl").read_text().splitlines()]


# -- chunks ------------------------------------------------------------------------------------------------------


def test_chunks_are_many_different_ones_of_several_tenants(tmp_path: Path) -> None:
    store, chunks = tmp_path / "store", TinyChunks(3)
    fill(store, tmp_path / "puts.jsonl", chunks, 200, 64)
    assert rows(store, "SELECT count(*), count(DISTINCT key), count(DISTINCT content) FROM chunks") == [(200,) * 3]
    assert rows(store, "SELECT count(*) FROM namespaces") == [(8,)]
    assert rows(store, "SELECT count(*) FROM fingerprints") == [(3,)]
    assert rows(store, "SELECT count(*) FROM recent_dependencies") == [(50,)]
    for raw, digest in rows(store, "SELECT token_ids, content FROM chunks"):
        assert hashlib.sha256(raw).digest() == digest
        assert len(struct.unpack("<4i", raw)) == 4
    # What another chunk depends on is there.
    missing = "SELECT count(*) FROM recent_dependencies WHERE content NOT IN (SELECT content FROM chunks)"
    assert rows(store, missing) == [(0,)]
    assert len({bytes(chunks.kv(n).view(torch.uint8).numpy()) for n in range(50)}) == 50
    assert chunks.info(7, 5.0) == TinyChunks(3).info(7, 5.0) != TinyChunks(4).info(7, 5.0)


def test_rates_are_those_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "puts.jsonl"
    entries = [(0, 60, 2.0, 1.0), (60, 60, 1.0, 0.5), (120, 40, 1.0, 0.25), (160, 60, 6.0, 3.0), (220, 10, 1.0, 1.0)]
    names = ("first", "count", "seconds", "cpu_s")
    lines = [json.dumps(dict(zip(names, entry, strict=True))) for entry in entries]
    log.write_text("\n".join(lines) + '\n{"first": 230, "cou')  # killed while it wrote
    figures = ingest_figures(log, 100)
    assert figures["spans"] == [
        {"first": 0, "chunks": 120, "rate": 40.0, "cpu_s": 1.5 / 120},
        {"first": 100, "chunks": 100, "rate": 100 / 7, "cpu_s": 3.25 / 100},
        {"first": 200, "chunks": 10, "rate": 10.0, "cpu_s": 0.1},
    ]
    assert figures["first"] == 40
    assert figures["last"] == pytest.approx(100 / 7)  # the third has hardly begun
    assert figures["ratio"] == pytest.approx(100 / 7 / 40)
    assert figures["cpu_ratio"] == pytest.approx((1.5 / 120) / (3.25 / 100))
    assert ingest_figures(tmp_path / "absent", 100) == {"spans": []}


def test_a_run_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    def stop(part: str, done: int, total: int) -> None:
        if (part, done) == ("puts", 120):
            raise KeyboardInterrupt

    chosen = settings(parts=("chunks",))
    first = bench_store(tmp_path, chosen, progress=stop)
    assert first["interrupted"]
    assert "open" not in first
    assert sum(span["chunks"] for span in first["ingest"]["spans"]) == 120
    assert rows(tmp_path / "chunks", "SELECT count(*) FROM chunks") == [(120,)]
    seen: list[tuple[str, int, int]] = []
    second = bench_store(tmp_path, chosen, progress=lambda *step: seen.append(step))
    assert not second["interrupted"]
    assert seen[0] == ("puts", 120, 300)
    assert seen[-1] == ("look-ups", 1, 1)
    assert [put["first"] for put in puts(tmp_path)] == list(range(0, 300, 30))
    assert rows(tmp_path / "chunks", "SELECT count(*) FROM chunks") == [(300,)]
    assert second["open"]["verified"] == 300


def test_other_stores_are_not_mixed_up(tmp_path: Path) -> None:
    fill(tmp_path / "store", tmp_path / "log", TinyChunks(0), 20, 10)
    for chunks, count in ((TinyChunks(1), 30), (TinyChunks(0), 10)):
        with pytest.raises(ConfigError, match="holds 20 chunks"):
            fill(tmp_path / "store", tmp_path / "log", chunks, count, 10)
    assert rows(tmp_path / "store", "SELECT count(*) FROM chunks") == [(20,)]
    assert len((tmp_path / "log").read_text().splitlines()) == 2


# -- figures -----------------------------------------------------------------------------------------------------


def test_figures_are_those_of_the_files(tmp_path: Path) -> None:
    saved: list[str] = []
    result = bench_store(tmp_path, settings(), save=lambda found: saved.append(json.dumps(found)))
    store = tmp_path / "chunks"
    assert len(saved) == 3
    assert json.loads(saved[-1]) == json.loads(json.dumps(result))
    files = {path.relative_to(store).as_posix(): path.stat().st_size for path in store.rglob("*") if path.is_file()}
    # Uses were written since, in place.
    assert result["disk"]["catalogue"] == pytest.approx(files["catalogue.sqlite"], rel=0.1)
    assert result["disk"]["segments"] == sum(size for name, size in files.items() if name.endswith(".seg"))
    spans = result["ingest"]["spans"]
    assert [(span["first"], span["chunks"]) for span in spans] == [(n, 30) for n in range(0, 300, 30)]
    assert [span["rate"] for span in spans] == pytest.approx([30 / put["seconds"] for put in puts(tmp_path)])
    opened = result["open"]
    assert list(opened["lookups"]) == KINDS
    for figures in opened["lookups"].values():
        assert 0 < figures["p50"] <= figures["p99"] <= figures["max"]
        assert figures["sorted"] == sorted(figures["sorted"])
        assert len(figures["sorted"]) == 40
        assert figures["sorted"][-1] == figures["max"]
    assert (opened["verified"], opened["clean"]) == (300, True)
    assert rows(store, "SELECT sum(uses - 1) FROM ranks") == [(80,)]  # 40 chunks were loaded twice
    memory = opened["memory"]
    assert not memory or 0 < memory["base_anonymous"] <= memory["peak_anonymous"] <= memory["peak"]
    loads = result["loads"]
    assert loads["nbytes"] == 3 * 2 * (3 * 2 * 2 * 16 * 8)
    assert "again + copy" not in loads["cold"]
    for temperature in ("warm", "cold"):
        ways = loads[temperature]
        best = max(ways[way]["rate"] for way in ("dd", "mmap copy") if way in ways)
        for figures in ways.values():
            assert len(figures["rates"]) == 3
            assert figures["rate"] == statistics.median(figures["rates"])
            assert figures["share"] == figures["rate"] / best
    assert [table.title is not None for table in store_tables(result)] == [True] * 4


def test_look_ups_notice_what_is_missing(tmp_path: Path) -> None:
    store, chunks = tmp_path / "store", TinyChunks(0)
    fill(store, tmp_path / "log", chunks, 20, 10)
    assert look_up(store, 20, 0, 20)["clean"]
    with closing(FileStore(store)) as opened:
        opened.delete([chunks.info(4).key])
    with pytest.raises(StoreError, match=chunks.info(4).key.hex):
        look_up(store, 20, 0, 20)
    with pytest.raises(StoreError, match=r"(?s)could not be measured.*StoreError.*was changed since"):
        in_a_process(store, 20, 0, 20)


def test_settings_refuse_what_cannot_be_measured() -> None:
    for wrong, message in (({"parts": ("puts",)}, "chunks, loads"), ({"parts": ()}, "chunks"), ({"rounds": 0}, "1 or")):
        with pytest.raises(ConfigError, match=message):
            settings(**wrong)


# -- the command -------------------------------------------------------------------------------------------------


def test_the_command_writes_json_and_a_picture(run: Run, tmp_path: Path) -> None:
    out, png, kept = tmp_path / "out" / "store.json", tmp_path / "store.png", tmp_path / "kept"
    arguments = ("--part", "chunks", "--chunks", "40", "--batch", "8", "--lookups", "10", "--dir", str(kept))
    code, printed, error = run("bench", "store", *arguments, "--json", str(out), "--plot", str(png))
    assert (code, error) == (0, error)
    result = json.loads(out.read_text())
    assert result["command"].startswith("epic-rag bench store")
    assert result["settings"]["chunks"] == rows(kept / "chunks", "SELECT count(*) FROM chunks")[0][0] == 40
    assert "loads" not in result
    assert png.read_bytes().startswith(b"\x89PNG")
    for word in ("chunks a second", "load, first", "verify --quick", "last to first"):
        assert word in printed
    assert run("bench", "store", "--part", "speed")[0] == 1


def test_nothing_measured_draws_nothing() -> None:
    assert draw_store({"settings": {}, "ingest": {"spans": []}}) is None
    assert store_tables({"settings": {}}) == []
