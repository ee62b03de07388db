"""The catalogue's log: commits that were lost to damage are told from a commit that was interrupted."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import struct
from contextlib import closing
from pathlib import Path

import pytest
import torch
from epic_engine import FileStore, StoreError
from epic_engine.storage.log_check import lost_commits
from epic_engine.storage.rebuild import rebuild

from tests.damage import flip
from tests.engine.test_store import entry

ROWS = 40


def _log(path: Path, page: int) -> bytes:
    """A log of one transaction a row, of a process that was killed."""
    child = os.fork()
    if child == 0:
        db = sqlite3.connect(path / "x.sqlite", isolation_level=None)
        db.execute(f"PRAGMA page_size={page}")
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("CREATE TABLE t (n, b)")
        for number in range(ROWS):
            db.execute("INSERT INTO t VALUES (?, ?)", (number, random.Random(number).randbytes(2 * page)))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    return (path / "x.sqlite-wal").read_bytes()


def _rows(path: Path, log: bytes) -> int:
    """How many rows SQLite finds with a log."""
    with_log = path / "copy"
    shutil.rmtree(with_log, ignore_errors=True)
    with_log.mkdir()
    shutil.copyfile(path / "x.sqlite", with_log / "x.sqlite")
    (with_log / "x.sqlite-wal").write_bytes(log)
    with closing(sqlite3.connect(with_log / "x.sqlite")) as db:
        if not db.execute("SELECT 1 FROM sqlite_master").fetchall():
            return 0
        return int(db.execute("SELECT count(*) FROM t").fetchone()[0])


@pytest.fixture(scope="module", params=[512, 1024, 4096, 65536])
def killed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("log")
    return path, _log(path, request.param)


def _found(path: Path, log: bytes) -> bool:
    (path / "tried").write_bytes(log)
    return lost_commits(path / "tried")


def test_a_killed_process_leaves_no_damage(killed: tuple[Path, bytes]) -> None:
    path, log = killed
    assert _rows(path, log) == ROWS
    assert not _found(path, log)
    rng = random.Random(1)
    for _ in range(20):
        cut = rng.randrange(len(log))
        assert not _found(path, log[:cut]), cut
        assert not _found(path, log[:cut] + bytes(rng.randrange(9000))), cut
    assert not lost_commits(path / "absent")


def test_damage_is_found_where_sqlite_loses_more_than_the_last_transaction(killed: tuple[Path, bytes]) -> None:
    path, log = killed
    rng = random.Random(2)
    frame = struct.unpack_from(">I", log, 8)[0] + 24
    seen = set()
    for number in range(60):
        at = rng.randrange(32) if number < 8 else 32 + rng.randrange((len(log) - 32) // frame) * frame
        at += rng.choice([rng.randrange(24), rng.randrange(frame)]) if number >= 8 else 0
        changed = bytearray(log)
        changed[at] ^= 1 << rng.randrange(8)
        lost = ROWS - _rows(path, bytes(changed))
        seen.add(min(lost, 2))
        if lost != 1:  # the last one may have been interrupted
            assert _found(path, bytes(changed)) == (lost > 1), (at, lost)
    assert 2 in seen
    # The frame that ends the last transaction but one, and what makes it a frame of this log.
    ends = [at for at in range(32, len(log), frame) if log[at + 4 : at + 8] != bytes(4)]
    changed = bytearray(log)
    changed[ends[-2] + 10] ^= 1
    assert _rows(path, bytes(changed)) == ROWS - 2
    assert _found(path, bytes(changed))


def test_a_log_begun_anew_has_old_frames_behind_it(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "x.sqlite", isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("CREATE TABLE t (n, b)")
        for number in range(ROWS):
            db.execute("INSERT INTO t VALUES (?, ?)", (number, bytes(5000)))
            if number % 9 == 8:
                db.execute("PRAGMA wal_checkpoint(RESTART)")
            assert not lost_commits(tmp_path / "x.sqlite-wal")
        # A transaction that spilled into the log and was undone leaves frames, too.
        db.execute("PRAGMA cache_size=5")
        db.execute("BEGIN")
        for number in range(ROWS):
            db.execute("INSERT INTO t VALUES (?, ?)", (number, bytes(5000)))
        db.execute("ROLLBACK")
        db.execute("INSERT INTO t VALUES (1, 2)")
        assert not lost_commits(tmp_path / "x.sqlite-wal")


def test_a_store_with_a_damaged_log_is_made_anew(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        store = FileStore(tmp_path)
        for number in range(6):
            store.put([entry(number)])
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    log = tmp_path / "catalogue.sqlite-wal"
    flip(log, log.stat().st_size // 2)
    for read_only in (False, True):
        with pytest.raises(StoreError, match=r"log.*damaged.*rebuild"):
            FileStore(tmp_path, read_only=read_only)
    assert rebuild(tmp_path) == 6
    with closing(FileStore(tmp_path)) as store:
        assert store.verify().clean
        assert all(torch.equal(store.load(entry(n)[0].key), entry(n)[1]) for n in range(6))
