"""Faults around a store: disks that cannot be written, clocks that jump, models that are replaced."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from epic_engine import ChunkNotFoundError, FileStore, StoreError

from tests.damage import damage

from .chunks import entry, key_of
from .disk import compare, picture
from .judge import SEGMENT_BYTES
from .ledger import Ledger
from .mounts import read_only
from .trial import Trial, forked
from .work import Worker, run

__all__ = ["clock_jumps", "unwritable"]

_DAY = 86400.0
_NOBODY = 65534


def _digest(folder: Path) -> str:
    """Of every name and byte below a folder; SQLite's index of its log may change."""
    whole = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file() and not file.name.endswith("-shm"):
            whole.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes())
    return whole.hexdigest()


def unwritable(trial: Trial) -> None:
    """The disk becomes read-only: before the store is opened, or while it is open and at work."""
    path, ledger = trial.start("mixed", "plain", "packed")
    before = picture(path)
    if trial.turn % 3 == 2:
        _becomes_read_only(trial, path, ledger)
        return
    damaged = [] if trial.rng.random() < 0.5 else [trial.rng.choice(ledger.here())]
    if damaged:
        damage(path, *(key_of(number).hex for number in damaged))
    digest = _digest(path)
    # Whoever may write everything becomes nobody for that, who must be able to reach the folder.
    reachable = os.geteuid() != 0 or all(parent.stat().st_mode & 0o001 for parent in path.parents)
    forbid = None if trial.turn % 3 == 1 and reachable else read_only(path)
    trial.outcome.detail = f"{'mount' if forbid else 'permissions'}, damaged: {damaged}"
    if forbid is not None:
        forbid(True)
        trial.outcome.other += _read_all(path, ledger, damaged, drop=False)
        forbid(False)
    else:
        answer = trial.folder / "answer"
        answer.touch()
        answer.chmod(0o666)
        modes = _forbid_by_mode(path)
        child = forked(lambda: answer.write_text("\n".join(_read_all(path, ledger, damaged, drop=True))))
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            trial.outcome.other.append("reading failed")
        trial.outcome.other += answer.read_text().splitlines()
        for file, mode in modes.items():
            file.chmod(mode)
    if _digest(path) != digest:
        trial.outcome.other.append("something was written")
    trial.judge(path, ledger, damage=compare(before, path))


def _forbid_by_mode(path: Path) -> dict[Path, int]:
    files = [path, *path.rglob("*")]
    modes = {file: file.stat().st_mode for file in files}
    for file, mode in modes.items():
        file.chmod((mode | 0o444 | (0o111 if file.is_dir() else 0)) & ~0o222)
    return modes


def _read_all(path: Path, ledger: Ledger, damaged: list[int], *, drop: bool) -> list[str]:
    """What is wrong with a store that cannot be written."""
    if drop and os.geteuid() == 0:
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
    wrong = []
    store = FileStore(path, segment_bytes=SEGMENT_BYTES)
    if not store.read_only:
        wrong.append("it says that it can be written")
    report = store.verify()
    if set(report.corrupt) != {key_of(number).hex for number in damaged} or report.missing:
        wrong.append(f"read-only, it reports {report}")
    old = ledger.of_format_1()
    for number, versions in ledger.allowed().items():
        key = key_of(number)
        for _ in range(2):
            try:
                kv = store.load(key)
            except ChunkNotFoundError:
                if None not in versions and number not in damaged:
                    wrong.append(f"chunk {number} is a miss")
            else:
                tensors = [entry(number, v, old=number in old and v == 0)[1] for v in versions if v is not None]
                if not any(torch.equal(kv, tensor) for tensor in tensors if tensor.dtype == kv.dtype):
                    wrong.append(f"chunk {number} has other bytes")
    with suppress(StoreError):
        store.put([entry(990)])
        wrong.append("it was written")
    store.close()
    return wrong


def _becomes_read_only(trial: Trial, path: Path, ledger: Ledger) -> None:
    trial.outcome.detail = "remounted while it is open"
    forbid = read_only(path)
    if forbid is None:
        trial.outcome.detail = "it may not be remounted here"
    worker = Worker(path, ledger, trial.rng, range(400, 500))
    worker.put()
    # What is open for writing keeps a real mount busy, so the store's files are closed, and it is not.
    store = FileStore(path, segment_bytes=SEGMENT_BYTES)
    with suppress(OSError):
        worker.close()
        if forbid is not None:
            forbid(True)
    for step in ("put", "delete", "compact", "read", "put"):
        try:
            getattr(worker, step)()
        except StoreError:
            trial.outcome.reported = True
    for number in ledger.here():
        with suppress(StoreError):
            store.load(key_of(number))
    with suppress(StoreError):
        store.close()
    worker.close()
    if forbid is not None:
        forbid(False)
    trial.judge(path, ledger)


class _Clock:
    """``time.time`` with a difference that changes."""

    def __init__(self) -> None:
        self.ahead = 0.0
        self._time = time.time

    def __call__(self) -> float:
        return self._time() + self.ahead


def clock_jumps(trial: Trial) -> None:
    """The clock goes back and forth by up to a month while chunks expire, are leased, used and collected."""
    base, script = trial.rng.choice(list(trial.passes))
    path, ledger = trial.copy(trial.bases[base])
    clock, rng = _Clock(), trial.rng
    jumps = []

    def jump() -> None:
        clock.ahead = rng.choice([0.0, 1.0, -1.0]) * rng.choice([30.0, 3600.0, _DAY, 30 * _DAY])
        jumps.append(round(clock.ahead))

    with mock.patch.object(time, "time", clock):
        jump()
        run(path, ledger, script)
        jump()
        trial.outcome.other += _life_spans(path, rng.choice([5.0, 2000.0, 2 * _DAY]), clock, jump)
        trial.outcome.other += _leases(path, clock, jump)
    trial.outcome.detail = f"clock {jumps} seconds ahead, script {script}"
    trial.judge(path, ledger)


def _life_spans(path: Path, seconds: float, clock: Callable[[], float], jump: Callable[[], None]) -> list[str]:
    """A chunk that ends is a miss when its end has passed, and only then; what was collected stays away."""
    wrong = []
    with_end, without = entry(950), entry(951)
    end = clock() + seconds
    info = replace(with_end[0], expires=end)
    store = FileStore(path, segment_bytes=SEGMENT_BYTES)
    store.put([(info, with_end[1]), without])
    collected = False
    for number in range(6):
        if number:
            jump()
        over = clock() >= end
        found = store.info(info.key)
        if collected:
            if found is not None:
                wrong.append("a collected chunk is back")
        elif (found is None) != over:
            wrong.append(f"expires {end}, now {clock()}: {found}")
        if store.info(without[0].key) != without[0] or not torch.equal(store.load(without[0].key), without[1]):
            wrong.append("a chunk without an end is gone")
        if number % 2:
            store.gc()
            collected |= over
    store.delete([info.key, without[0].key])
    store.close()
    return wrong


def _leases(path: Path, clock: _Clock, jump: Callable[[], None]) -> list[str]:
    """Two owners: a lease is one's until its end, or until the clock goes back behind the moment it was taken."""
    wrong = []
    key = key_of(960)
    one, two = (FileStore(path, segment_bytes=SEGMENT_BYTES) for _ in range(2))
    for _ in range(4):
        if one.lease([key], 100.0) != {key}:
            wrong.append("a free lease was refused")
        if two.lease([key], 100.0):
            wrong.append("a lease was given twice")
        before = clock.ahead
        jump()
        granted = bool(two.lease([key], 100.0))
        moved = clock.ahead - before
        if granted != (moved >= 99.0 or moved < 0) and abs(moved) > 1.0:
            wrong.append(f"the clock moved by {moved}, granted: {granted}")
        one.release([key])
        two.release([key])
    one.close()
    two.close()
    return wrong
