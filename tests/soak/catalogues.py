"""Bits that flip in the catalogue: in the pages of a closed one, and in the log of one whose process was killed.

What a flip has done is found out with plain SQLite, on a copy.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

from tests.damage import flip

from .chunks import NAMESPACES, key_of
from .ledger import Ledger
from .trial import Trial, forked
from .work import Worker

__all__ = ["flipped_catalogue", "flipped_log"]

_ROWS = (
    "SELECT hex(c.key), c.*, n.name, f.name, x.name, s.name, s.kind, r.chunk, "
    "(SELECT count(*) FROM dependencies d WHERE d.chunk = c.id), "
    "(SELECT count(*) FROM recent_dependencies d WHERE d.chunk = c.id), "
    "(SELECT max(chunk) FROM (SELECT chunk FROM recent_keys WHERE head = substr(c.key, 1, 16) UNION ALL "
    "SELECT chunk FROM keys WHERE head = substr(c.key, 1, 16))), "
    "(SELECT count(*) FROM (SELECT * FROM recent_contents UNION ALL SELECT * FROM contents) e "
    "WHERE e.chunk = c.id AND e.namespace = c.namespace AND e.head = substr(c.content, 1, 8)) FROM chunks c "
    "LEFT JOIN namespaces n ON n.id = c.namespace LEFT JOIN fingerprints f ON f.id = c.fingerprint "
    "LEFT JOIN contexts x ON x.id = c.context LEFT JOIN segments s ON s.id = c.segment "
    "LEFT JOIN ranks r ON r.chunk = c.id ORDER BY c.id"
)
_LOG_HEADER, _FRAME_HEADER = 32, 24

Rows = dict[str, tuple[object, ...]]


def _rows(store: Path, scratch: Path) -> Rows | None:
    """What the catalogue says about chunks; None if SQLite finds its file damaged."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    for ending in ("", "-wal"):
        file = store / f"catalogue.sqlite{ending}"
        if file.exists():
            shutil.copyfile(file, scratch / file.name)
    try:
        with closing(sqlite3.connect(scratch / "catalogue.sqlite")) as db:
            db.text_factory = bytes
            if db.execute("PRAGMA integrity_check").fetchall() != [(b"ok",)]:
                return None
            return {row[0].decode().lower(): row[1:] for row in db.execute(_ROWS)}
    except (sqlite3.Error, UnicodeDecodeError):  # the message of an error can hold what is damaged
        return None


def _differ(before: Rows, after: Rows) -> set[str]:
    return {key for key in {*before, *after} if before.get(key) != after.get(key)}


def _target(rng: random.Random, raw: bytes, files: list[str]) -> tuple[int, str]:
    """A byte of the file: anywhere, or where it is likely to matter."""
    what = rng.choice(["anywhere", "anywhere", "row", "row", "name", "file", "header", "schema"])
    wanted: list[bytes] = []
    if what == "row":
        wanted = [bytes.fromhex(key_of(number).hex) for number in range(100)]
    elif what == "name":
        wanted = [name.encode() for name in NAMESPACES] + [b"f" * 64, b"sink:2"]
    elif what == "file":
        wanted = [name.encode() for name in files]
    elif what == "schema":
        wanted = [b"CREATE TABLE", b"CREATE TRIGGER", b"CREATE INDEX", b"UPDATE segments"]
    places = []
    for text in wanted:
        at = raw.find(text)
        while at >= 0:
            places.append((at, at + len(text)))
            at = raw.find(text, at + 1)
    begin, end = (0, 100) if what == "header" else rng.choice(places) if places else (0, len(raw))
    around = {"row": (100, 200), "schema": (100, 200), "file": (8, 8)}.get(what, (0, 0))
    begin, end = max(begin - around[0], 0), min(end + around[1], len(raw))
    return rng.randrange(begin, end), what


def flipped_catalogue(trial: Trial) -> None:
    """A bit of the file of a store that was closed."""
    path, ledger = trial.start("mixed", "plain", "packed")
    file = path / "catalogue.sqlite"
    before = _rows(path, trial.folder / "look")
    assert before is not None
    at, what = _target(trial.rng, file.read_bytes(), [segment.stem for segment in (path / "segments").glob("*.seg")])
    bit = trial.rng.randrange(8)
    flip(file, at, bit)
    after = _rows(path, trial.folder / "look")
    trial.outcome.detail = f"bit {bit} of byte {at} of the catalogue ({what}), " + (
        "its file is damaged" if after is None else f"{len(_differ(before, after))} rows differ"
    )
    _judge(trial, path, ledger, before, after)


def _judge(trial: Trial, path: Path, ledger: Ledger, before: Rows, after: Rows | None) -> None:
    judge = trial.judge(path, ledger, catalogue=True)
    outcome, report = trial.outcome, judge.report
    differ = None if after is None else _differ(before, after)
    outcome.damaged = len(differ or ())
    # A row that is mended when its chunk is read needs no report.
    if not judge.read_first and not outcome.reported and differ != set():
        outcome.unreported.append("damage of the catalogue" if differ is None else f"rows of {sorted(differ)}")
    if report is not None and differ is not None and not judge.read_first:
        false = {*report.corrupt, *report.missing} - differ
        outcome.false_alarms += [f"row of {key}" for key in sorted(false)]


def _commits(log: bytes) -> tuple[int, list[int]]:
    """Bytes of a frame, and the numbers of the frames that end a transaction."""
    size = int.from_bytes(log[8:12], "big") + _FRAME_HEADER
    frames = range((len(log) - _LOG_HEADER) // size)
    starts = [_LOG_HEADER + size * number for number in frames]
    current = [n for n in frames if log[starts[n] + 8 : starts[n] + 16] == log[16:24]]
    return size, [n for n in current if log[starts[n] + 4 : starts[n] + 8] != bytes(4)]


def flipped_log(trial: Trial) -> None:
    """A bit of the log that a killed process has left beside the catalogue."""
    path, ledger = trial.start("mixed", "plain", "packed")

    def work() -> None:
        worker = Worker(path, ledger, trial.rng, range(100, 400))
        for step in ("put", *trial.rng.choices(["put", "replace", "delete", "pin", "lease", "put"], k=5)):
            getattr(worker, step)()
        os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(forked(work), 0)
    before = _rows(path, trial.folder / "look")
    assert before is not None
    file = path / "catalogue.sqlite-wal"
    log = file.read_bytes()
    size, commits = _commits(log)
    if trial.rng.random() < 0.15:
        at = trial.rng.randrange(_LOG_HEADER)
    else:
        number = trial.rng.randrange(commits[-1] + 1)
        within = trial.rng.choice([_FRAME_HEADER, size])
        at = _LOG_HEADER + number * size + trial.rng.randrange(within)
    bit = trial.rng.randrange(8)
    flip(file, at, bit)
    last = at >= _LOG_HEADER + (commits[-2] + 1) * size
    if last:  # nobody can tell it from a transaction during which the process was killed
        ledger.last_may_be_undone()
    after = _rows(path, trial.folder / "look")
    trial.outcome.detail = f"bit {bit} of byte {at} of the log, {'in' if last else 'before'} the last transaction"
    if last and after is not None:
        before = after
    _judge(trial, path, ledger, before, after)
