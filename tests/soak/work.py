"""Stores to do harm to, and work that passes every point at which harm can be done."""

from __future__ import annotations

import random
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from epic_engine import ChunkNotFoundError, FileStore, StoreError, export_chunks
from epic_engine.storage import faults
from epic_engine.storage.rebuild import rebuild

from tests.damage import damage
from tests.engine.format_1 import write_format_1

from .chunks import dependents, entry, key_of
from .judge import SEGMENT_BYTES
from .ledger import Ledger

__all__ = ["SCRIPTS", "Base", "Worker", "bases", "passes", "run"]

_OLD = range(6)
_FIRST = range(6, 99)
_EXPIRED = range(800, 900)
SCRIPTS = 4


@dataclass(frozen=True)
class Base:
    """A prepared store, closed.

    Attributes
    ----------
    path, ledger
        Where it lies, and what it promised.
    """

    path: Path
    ledger: Ledger

    def copied(self, folder: Path) -> Base:
        """The same in another folder."""
        shutil.copytree(self.path, folder / "store")
        return Base(folder / "store", self.ledger.copied(folder / "ledger"))


class Worker:
    """Changes a store and says so to its ledger.

    Parameters
    ----------
    path, ledger
        The store and its ledger.
    rng
        Chooses.
    fresh
        Numbers of new chunks.
    """

    def __init__(self, path: Path, ledger: Ledger, rng: random.Random, fresh: range) -> None:
        self.path, self.ledger, self.rng = path, ledger, rng
        self._fresh = iter(fresh)
        self._store: FileStore | None = None

    @property
    def store(self) -> FileStore:
        """The store, opened when it is first needed."""
        if self._store is None:
            self._store = FileStore(self.path, segment_bytes=SEGMENT_BYTES)
        return self._store

    def close(self) -> None:
        """Close the store."""
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def _some(self, most: int) -> list[int]:
        here = self.ledger.here()
        return self.rng.sample(here, min(len(here), self.rng.randint(1, most)))

    def put(self) -> None:
        """Several new chunks."""
        numbers = [next(self._fresh) for _ in range(self.rng.randint(1, 7))]
        self.ledger.begin(dict.fromkeys(numbers, 0))
        self.store.put([entry(number) for number in numbers])
        self.ledger.done()

    def replace(self) -> None:
        """Other KV in place of known chunks'."""
        versions = self.ledger.ever()
        changes = {number: max(versions[number]) + 1 for number in self._some(3)}
        self.ledger.begin(changes)
        self.store.put([entry(number, version) for number, version in changes.items()])
        self.ledger.done()

    def delete(self) -> None:
        """Some chunks."""
        numbers = self._some(4)
        self.ledger.begin(dict.fromkeys(numbers))
        self.store.delete([key_of(number) for number in numbers])
        self.ledger.done()

    def erase(self) -> None:
        """A chunk with what was compiled behind it."""
        for number in self._some(1):
            info = entry(number)[0]
            known = self.ledger.allowed()
            self.ledger.begin(dict.fromkeys([number, *(n for n in dependents(number) if n in known)]))
            self.store.erase(info.namespace, [info.content])
            self.ledger.done()

    def set_aside(self) -> None:
        """A chunk is damaged, and found out."""
        self.close()  # what a store has checked it trusts
        for number in self._some(1):
            self.ledger.may_be_gone(number)
            with suppress(sqlite3.Error, KeyError):  # of a disk without room, or a catalogue of format 1
                damage(self.path, key_of(number).hex)
            with suppress(ChunkNotFoundError):
                self.store.load(key_of(number))

    def expire(self) -> None:
        """A chunk is over at once, and collected."""
        info, kv = entry(_EXPIRED[self.rng.randrange(len(_EXPIRED))])
        self.store.put([(replace(info, expires=time.time() - 1), kv)])
        self.store.gc()

    def compact(self) -> None:
        """Nothing dead is kept."""
        self.store.compact(live_share=self.rng.choice([0.7, 1.0, 1.0]))

    def collect(self) -> None:
        """What killed processes have left goes; so do old catalogues."""
        (self.store.path / "segments" / f"{self.rng.randrange(16):032x}.seg").touch()
        self.store.gc()

    def read(self) -> None:
        """Some chunks; their uses are counted."""
        for number in self._some(5):
            with suppress(ChunkNotFoundError):
                self.store.load(key_of(number))

    def lease(self) -> None:
        """Rights to compile, some given back."""
        keys = [key_of(number) for number in range(500, 505)]
        self.store.lease(keys, 30.0)
        self.store.release(keys[:2])

    def export(self) -> None:
        """Everything, to a folder beside the store; what is there of one that failed goes."""
        export_chunks(self.store, self.path.with_name("export"), file_bytes=20_000)
        shutil.rmtree(self.path.with_name("export"))

    def pin(self) -> None:
        """Some chunks."""
        self.store.pin([key_of(number) for number in self._some(3)])

    def reopen(self) -> None:
        """Close the store; the next step opens it."""
        (self.store.path / "segments" / f"{self.rng.randrange(16, 32):032x}.seg").touch()
        self.close()

    def rebuild(self) -> None:
        """A new catalogue. Were segments not rewritten first, deleted chunks would be back, and old files lost."""
        self.store.compact(live_share=1.0)
        self.close()
        rebuild(self.path)


_STEPS = ("put", "replace", "delete", "erase", "set_aside", "expire", "compact", "collect", "read", "lease", "pin",
          "export", "reopen")  # fmt: skip


def run(path: Path, ledger: Ledger, script: int, *, failing: Callable[[BaseException], None] | None = None) -> None:
    """Work that passes every point, for the most part in another order for each script.

    Parameters
    ----------
    path, ledger
        The store and its ledger.
    script
        Which order.
    failing
        Told of errors of the store, after which the work goes on; without, they end it.
    """
    rng = random.Random(script)
    worker = Worker(path, ledger, rng, range(100, 400))
    steps = [*_STEPS, "put", "put", "compact"]
    rng.shuffle(steps)
    for step in [*steps, "delete", "rebuild", "put", "set_aside", "put", "compact", "collect"]:
        try:
            getattr(worker, step)()
        except (StoreError, OSError) as error:
            if failing is None:
                raise
            failing(error)
    worker.close()


def bases(folder: Path) -> list[Base]:
    """The stores that trials start from: of format 1 and not yet opened, of format 2 with old files, and without."""
    made = []
    for number, name in enumerate(("format-1", "mixed", "plain", "packed")):
        path = folder / name
        ledger = Ledger(folder / f"{name}.ledger")
        if name in ("format-1", "mixed"):
            write_format_1(path, [entry(n, old=True) for n in _OLD])
            ledger.old(*_OLD)
        if name != "format-1":
            _fill(Worker(path, ledger, random.Random(number), _FIRST))
        made.append(Base(path, ledger))
    return made


def _fill(worker: Worker) -> None:
    for step in ("put", "put", "put", "replace", "delete", "put", "put", "erase", "put", "pin", "read", "put"):
        getattr(worker, step)()
    worker.store.gc()
    worker.close()


def passes(base: Base, folder: Path, script: int) -> Counter[str]:
    """How often the work passes each point, from this base."""
    copy = base.copied(folder)
    passed: Counter[str] = Counter()
    with faults.install(lambda name: passed.update([name])):
        run(copy.path, copy.ledger, script)
    shutil.rmtree(folder)
    return passed
