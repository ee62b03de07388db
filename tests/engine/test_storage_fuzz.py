"""Hostile files: the same few examples of every property each time, and attacks by hand."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from epic_engine import FileStore, ModelLoadError, StoreError
from epic_engine.model.loader import load_model
from epic_engine.storage import leases
from epic_engine.storage.payload import decode, encode

from tests.engine.models import tiny
from tests.engine.test_store import entry
from tests.engine.tokenizers_for_tests import TOKENIZERS
from tests.fuzz import exchange, models, storage
from tests.fuzz.bounds import bounded
from tests.fuzz.running import run

EXAMPLES = {
    "hostile_records": 12,
    "forged_rows": 12,
    "damaged_format_1": 15,
    "hostile_gguf": 25,
    "damaged_folder": 12,
    "damaged_remote": 15,
}


@pytest.mark.parametrize("name", storage.PROPERTIES)
def test_the_store(name: str) -> None:
    run(storage.PROPERTIES[name], EXAMPLES.get(name, 40))


@pytest.mark.parametrize("name", exchange.PROPERTIES)
def test_chunks_from_elsewhere(name: str) -> None:
    run(exchange.PROPERTIES[name], EXAMPLES.get(name, 40))


@pytest.mark.parametrize("name", models.PROPERTIES)
def test_models(name: str) -> None:
    run(models.PROPERTIES[name], EXAMPLES[name])


def _made(path: Path, *statements: str) -> None:
    """A store into whose catalogue somebody has written."""
    with closing(FileStore(path)) as store:
        store.put([entry(1), entry(2)])
    with closing(sqlite3.connect(path / "catalogue.sqlite", isolation_level=None)) as db:
        for statement in statements:
            db.execute(statement)


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    "statements",
    [
        ("CREATE TRIGGER own AFTER INSERT ON chunks BEGIN DELETE FROM chunks; END",),
        ("DROP TRIGGER chunks_leave", "CREATE TRIGGER chunks_leave AFTER DELETE ON chunks BEGIN SELECT 1; END"),
        (
            "DROP TABLE settings",
            "CREATE VIEW settings AS WITH RECURSIVE n(value) AS (SELECT 1 UNION ALL SELECT value + 1 FROM n) "
            "SELECT value AS name, value FROM n",
        ),
    ],
)
def test_nothing_in_a_catalogue_is_run(tmp_path: Path, statements: tuple[str, ...], read_only: bool) -> None:
    _made(tmp_path, *statements)
    with pytest.raises(StoreError, match=r"holds the (trigger|view) .*rebuild"):
        FileStore(tmp_path, read_only=read_only)


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("gone", [0, 1])
@pytest.mark.parametrize("up", [False, True])
def test_no_file_outside_is_read_or_removed(tmp_path: Path, kind: int, gone: int, up: bool) -> None:
    """A store that somebody else has made cannot name files of this machine."""
    store, ending = tmp_path / "store", "" if kind else ".seg"
    victim = tmp_path / f"victim{ending}"
    name = "../../victim" if up else str(tmp_path / "victim")
    _made(store, f"UPDATE segments SET name = '{name}', kind = {kind}, gone = {gone}")
    (segment,) = store.glob("segments/*.seg")
    victim.write_bytes(segment.read_bytes())  # which would be read as if it were the store's
    before = victim.read_bytes()
    with closing(FileStore(store)) as opened:
        for number in (1, 2):
            with pytest.raises(KeyError):
                opened.load(entry(number)[0].key)
        opened.put([entry(3)])
        opened.gc()
        opened.compact(live_share=1.0)
        opened.verify(repair=True)
        assert torch.equal(opened.load(entry(3)[0].key), entry(3)[1])
    assert victim.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"store", victim.name}


def test_no_file_outside_is_taken_for_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some versions of filelock empty what they lock."""
    store, victim, key = tmp_path / "store", tmp_path / "poetry.lock", entry(9)[0].key
    asked: list[Path] = []
    monkeypatch.setattr(leases, "abandoned", lambda path: bool(asked.append(path)))
    victim.write_text("what a project needs")
    row = f"x'{key.hex}', '../../poetry', 1e10, {2**33}"
    _made(store, f"INSERT INTO leases VALUES ({row})")
    with closing(FileStore(store)) as opened:
        assert opened.lease([key], 60) == {key}
        opened.gc()
    assert victim.read_text() == "what a project needs"
    assert asked == []


@pytest.mark.parametrize("encoding", ["int8", "fp8", "int8+zstd"])
def test_wide_heads_are_refused(encoding: str) -> None:
    """The matrix that keys are turned by would have 40 GB for a payload of 200 kB."""
    kv = torch.zeros(1, 2, 1, 1, 100_000)
    with pytest.raises(ValueError, match="at most 1024"):
        encode(kv, encoding)
    with pytest.raises(ValueError, match="at most 1024"):
        decode(torch.zeros(200_004, dtype=torch.uint8), encoding, kv.shape, kv.dtype)


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    zstandard = pytest.importorskip("zstandard")
    packer = zstandard.ZstdCompressor().compressobj(size=1 << 29)
    frame = b"".join([*(packer.compress(bytes(1 << 20)) for _ in range(512)), packer.flush()])
    assert len(frame) < 100_000
    raw = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
    with bounded(memory=1 << 28), pytest.raises(ValueError, match="holds 536870912 bytes, 256 are expected"):
        decode(raw, "raw+zstd", (1, 2, 1, 4, 8), torch.float32)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other permissions")
@pytest.mark.parametrize("mask", [0o077, 0o027, 0o022])
def test_files_are_as_private_as_the_process_wants(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        with closing(FileStore(tmp_path / "store")) as store:
            store.put([entry(1)])
            store.lease([entry(2)[0].key], 60)
            made = [tmp_path / "store", *(tmp_path / "store").rglob("*")]
            assert len(made) > 6
            assert not [path for path in made if path.stat().st_mode & mask]
    finally:
        os.umask(before)


def _saved(path: Path) -> Path:
    tiny("llama").save_pretrained(path)
    TOKENIZERS["byte-level"].save_pretrained(path)
    return path


def test_weights_that_are_not_there_are_not_made_up(tmp_path: Path) -> None:
    weights = _saved(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b"layers.0.self_attn.q_proj", b"layers.0.self_attn.q_prox", 1))
    with pytest.raises(
        ModelLoadError, match=r"lacks 1 of the model's weights, such as model\.layers\.0\.self_attn\.q_pro"
    ):
        load_model(tmp_path, device="cpu")


def test_layers_without_weights_are_not_made(tmp_path: Path) -> None:
    config = _saved(tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 10**7}))
    with bounded(), pytest.raises(ModelLoadError, match="10000000 layers"):
        load_model(tmp_path, device="cpu")
