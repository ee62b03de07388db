"""Processes that are killed, calls that fail, disks that are full: faults in what a store is doing."""

from __future__ import annotations

import errno
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from epic_engine import FileStore
from epic_engine.storage import faults

from .chunks import entry, key_of
from .judge import SEGMENT_BYTES
from .ledger import Ledger
from .mounts import tmpfs
from .trial import Trial, forked, killed_at
from .work import Worker, run

__all__ = ["any_moment", "call_fails", "disk_full", "file_limit", "holder_killed", "kill", "point_fails", "two_writers"]

_ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT)
_MOST_SECONDS = 60


def _chosen(trial: Trial, points: tuple[str, ...]) -> tuple[str, int, int, int]:
    """A point, the base and the script whose work passes it, and which time."""
    point = points[trial.turn % len(points)]
    base, script = trial.rng.choice([where for where, counts in trial.passes.items() if counts[point]])
    return point, base, script, trial.rng.randrange(trial.passes[base, script][point])


def kill(trial: Trial) -> None:
    """``kill -9`` at every named point in turn."""
    point, base, script, number = _chosen(trial, faults.POINTS)
    path, ledger = trial.copy(trial.bases[base])
    trial.outcome.detail = f"killed at {point} the {number + 1}. time, script {script}"

    def work() -> None:
        with faults.install(killed_at(point, number)):
            run(path, ledger, script)

    if os.waitstatus_to_exitcode(os.waitpid(forked(work), 0)[1]) != -signal.SIGKILL:
        trial.outcome.other.append("it was not killed")
    _judge_killed(trial, path, ledger)


def any_moment(trial: Trial) -> None:
    """``kill -9`` after a random time, wherever that is."""
    base, script = trial.rng.choice(list(trial.passes))
    path, ledger = trial.copy(trial.bases[base])
    seconds = trial.rng.uniform(0, 0.12)
    trial.outcome.detail = f"killed after {seconds:.4f} s, script {script}"
    child = forked(partial(run, path, ledger, script))
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    _judge_killed(trial, path, ledger)


def _judge_killed(trial: Trial, path: Path, ledger: Ledger) -> None:
    if not (path / "catalogue.sqlite").exists():  # it was being made anew
        trial.outcome.other.append("there is no catalogue")
    trial.judge(path, ledger)


def point_fails(trial: Trial) -> None:
    """An error of the system at every named point in turn; the same store object works on."""
    point, base, script, number = _chosen(trial, faults.POINTS)
    code = trial.rng.choice(_ERRORS)
    path, ledger = trial.copy(trial.bases[base])
    trial.outcome.detail = f"{errno.errorcode[code]} at {point} the {number + 1}. time, script {script}"
    seen = [0]

    def hook(name: str) -> None:
        if name == point:
            seen[0] += 1
            if seen[0] == number + 1:
                raise OSError(code, os.strerror(code))

    with faults.install(hook):
        _run_with_one_failure(trial, path, ledger, script)


def call_fails(trial: Trial) -> None:
    """One call of the system fails, or writes less than it was given."""
    base, script = trial.rng.choice(list(trial.passes))
    path, ledger = trial.copy(trial.bases[base])
    name = trial.rng.choice(["writev", "short writev", "fdatasync", "fsync", "replace", "unlink"])
    code, number = trial.rng.choice(_ERRORS), trial.rng.randrange(40 if "v" in name else 10)
    trial.outcome.detail = f"{errno.errorcode[code]} from {name}, call {number + 1}, script {script}"
    real = getattr(os, name.split()[-1])
    calls = [0]

    def broken(*arguments: Any, **more: Any) -> Any:
        calls[0] += 1
        if calls[0] != number + 1:
            return real(*arguments, **more)
        if name == "short writev":
            descriptor, buffers = arguments
            whole = b"".join(buffers)
            os.write(descriptor, whole[: trial.rng.randrange(len(whole))])
        raise OSError(code, os.strerror(code))

    with mock.patch.object(os, name.split()[-1], broken):
        _run_with_one_failure(trial, path, ledger, script)


def _run_with_one_failure(trial: Trial, path: Path, ledger: Ledger, script: int) -> None:
    failed: list[BaseException] = []
    run(path, ledger, script, failing=failed.append)
    trial.outcome.reported = bool(failed)
    trial.outcome.other += [f"it failed again: {error!r}" for error in failed[1:]]
    trial.judge(path, ledger)


def disk_full(trial: Trial) -> None:
    """A small disk of its own runs full, and gets room again."""
    base, script = trial.rng.choice(list(trial.passes))
    room = trial.rng.randrange(0, 400 << 10)
    trial.outcome.detail = f"a disk with {room} free bytes, script {script}"
    used = sum(file.stat().st_size + 4096 for file in trial.bases[base].path.rglob("*"))
    disk = trial.folder / "disk"
    disk.mkdir()
    resize = tmpfs(disk, used + room)
    if resize is None:
        file_limit(trial)
        return
    copied = trial.bases[base].copied(disk)
    ledger = copied.ledger.copied(trial.folder / "ledger")  # which is not to run out of room itself
    _short_of_room(trial, copied.path, ledger, script, lambda: resize(64 << 20))


def file_limit(trial: Trial) -> None:
    """No file may grow beyond a limit, the catalogue's included."""
    base, script = trial.rng.choice(list(trial.passes))
    path, ledger = trial.copy(trial.bases[base])
    limit = trial.rng.randrange(4 << 10, 256 << 10)
    trial.outcome.detail = f"no file beyond {limit} bytes, script {script}"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    _short_of_room(trial, path, ledger, script, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard)))


def _short_of_room(trial: Trial, path: Path, ledger: Ledger, script: int, relieve: Callable[[], None]) -> None:
    failed: list[BaseException] = []
    try:
        run(path, ledger, script, failing=failed.append)
    finally:
        relieve()
    trial.outcome.reported = bool(failed)
    trial.judge(path, ledger)


# -- several processes -----------------------------------------------------------------------------------------

_HOLDING = (
    "segment.locked", "segment.created", "segment.entered", "put.appending", "put.appended", "put.synced",
    "put.committing", "put.committed", "delete.committing", "compact.appended", "compact.synced", "compact.committing",
    "compact.committed", "compact.retired", "compact.unlinked", "collect.unlinking", "collect.committing",
)  # fmt: skip


@contextmanager
def _held(work: Callable[[], object], point: str, number: int) -> Any:
    """A process that stands still at a point, and is killed in the end."""
    read, write = os.pipe()
    seen = [0]

    def hook(name: str) -> None:
        if name == point:
            seen[0] += 1
            if seen[0] == number + 1:
                os.write(write, b"here")
                signal.pause()

    def child() -> None:
        with faults.install(hook):
            work()

    started = forked(child)
    os.close(write)
    try:
        if not select.select([read], [], [], _MOST_SECONDS)[0] or os.read(read, 4) != b"here":
            raise AssertionError(f"{point} was not passed")
        yield started
    finally:
        os.close(read)
        os.kill(started, signal.SIGKILL)
        os.waitpid(started, 0)


def holder_killed(trial: Trial) -> None:
    """A process stands still with locks and leases in its hands while another works, and is killed."""
    point, base, script, number = _chosen(trial, _HOLDING)
    path, ledger = trial.copy(trial.bases[base])
    trial.outcome.detail = f"held at {point} the {number + 1}. time and killed, script {script}"
    mine = Ledger(trial.folder / "mine")
    leased = [key_of(new) for new in range(700, 703)]

    def work() -> None:
        store = FileStore(path, segment_bytes=SEGMENT_BYTES)
        store.lease(leased, 3600)
        run(path, ledger, script)

    with ExitStack() as stack:
        holder = stack.enter_context(_held(work, point, number))
        inside = point.endswith("committing")  # of a transaction, for whose end others wait
        if inside:
            stack.callback(os.waitpid, forked(partial(_kill_later, holder)), 0)
        store = FileStore(path, segment_bytes=SEGMENT_BYTES)
        worker = Worker(path, mine, trial.rng, range(600, 690))
        worker.put()
        worker.put()
        # A catalogue that the other has made anew knows no leases.
        if not inside and not (path / "catalogue.sqlite.old").exists() and store.lease(leased, 10):
            trial.outcome.other.append("a lease was given twice")
        for new in mine.here():
            if not torch.equal(store.load(key_of(new)), entry(new)[1]):
                trial.outcome.wrong_hits.append(f"chunk {new} beside another process")
        store.compact(live_share=1.0)
        worker.delete()
        worker.close()
    if store.lease(leased, 10) != set(leased):
        trial.outcome.other.append("a dead process keeps its lease")
    store.close()
    _append(mine, ledger)
    trial.judge(path, mine)


def _kill_later(process: int) -> None:
    time.sleep(0.05)
    os.kill(process, signal.SIGKILL)


def two_writers(trial: Trial) -> None:
    """Two processes change the store, and one of them is killed at some moment."""
    path, ledger = trial.start("mixed", "plain", "packed")
    numbers = ledger.here()
    ledgers = [Ledger(trial.folder / name) for name in ("one", "two")]
    seeds = [trial.rng.randrange(1 << 30) for _ in ledgers]

    def work(mine: Ledger, seed: int, first: int) -> None:
        # Each changes what it put itself; both move everything about.
        trial.rng.seed(seed)
        worker = Worker(path, mine, trial.rng, range(first, first + 90))
        worker.put()
        for _ in range(14):
            getattr(worker, trial.rng.choice(["put", "put", "replace", "delete", "compact", "collect", "read"]))()
        worker.close()

    children = [forked(partial(work, mine, seed, 100 * (i + 1)))
                for i, (mine, seed) in enumerate(zip(ledgers, seeds, strict=True))]  # fmt: skip
    seconds = trial.rng.uniform(0.01, 0.12)
    trial.outcome.detail = f"two writers beside {len(numbers)} chunks, one killed after {seconds:.4f} s"
    time.sleep(seconds)
    os.kill(children[0], signal.SIGKILL)
    os.waitpid(children[0], 0)
    if os.waitstatus_to_exitcode(os.waitpid(children[1], 0)[1]):
        trial.outcome.other.append("the other writer failed")
    for mine in ledgers[::-1]:  # what the killed one left unfinished comes last
        _append(ledger, mine)
    trial.judge(path, ledger)


def _append(ledger: Ledger, other: Ledger) -> None:
    with open(ledger.path, "a", encoding="ascii") as file:
        file.write(other.path.read_text(encoding="ascii"))
