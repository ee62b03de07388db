"""Whether a store tells the truth after a fault, has what it promised, and works.

The store is opened anew. Half of the trials check it first and then read every chunk, as an operator would; the others
read first, as an engine would that knows nothing of the fault.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from epic_engine import ChunkInfo, ChunkNotFoundError, FileStore, StoreError
from epic_engine.storage.rebuild import rebuild
from epic_engine.storage.store import VerifyReport
from torch import Tensor

from .chunks import NAMESPACES, content_of, entry, key_of, numbers_by_key
from .disk import Damage
from .ledger import Ledger
from .outcome import Outcome

__all__ = ["SEGMENT_BYTES", "Judge"]

SEGMENT_BYTES = 10_000
_NEW = 900  # a chunk that no trial has stored


@dataclass
class Judge:
    """Checks one store; fills in an outcome.

    Parameters
    ----------
    path, ledger
        The store, and what it promised.
    outcome
        Gets what is found.
    damage
        What the fault did to records; those keys, and no others, must be reported.
    perhaps
        Numbers of chunks that the trial's own work damaged, and may have set aside, moved or replaced since.
    catalogue
        The catalogue may be damaged: it may have to be repaired or made anew, and rows may be reported.
    read_first
        Read all chunks before the store is checked.
    """

    path: Path
    ledger: Ledger
    outcome: Outcome
    damage: Damage = field(default_factory=Damage)
    perhaps: set[int] = field(default_factory=set)
    catalogue: bool = False
    read_first: bool = False

    def __post_init__(self) -> None:
        self._names = numbers_by_key(list(self.ledger.ever()))
        self._old = self.ledger.of_format_1()
        self.report: VerifyReport | None = None

    def check(self) -> Outcome:
        """Everything."""
        store = self._opened()
        if store is None:
            return self.outcome
        lost = self._missing_in(store) if self.read_first else None
        report = self.report = self._verified(store)
        if report is None:
            store.close()
            self._rebuild()
            store = self._opened()
            if store is None:
                return self.outcome
        else:
            self._compare(report, store)
        again = self._missing_in(store)
        self.outcome.misses += len(again if lost is None else lost)
        if report is not None and not report.clean:
            with self._must("repair"):
                store.verify(repair=True)
            again = self._missing_in(store)
        if self._intact(again) and self.catalogue:
            store.close()
            self._rebuild()
            store = self._opened()
            if store is None:
                return self.outcome
            again = self._missing_in(store)
        self.outcome.lost_intact += [f"chunk {number}" for number in self._intact(again)]
        self._use(store, again)
        self.outcome.wrong_hits = list(dict.fromkeys(self.outcome.wrong_hits))
        return self.outcome

    # -- parts -------------------------------------------------------------------------------------------------

    def _entry(self, number: int, version: int) -> tuple[ChunkInfo, Tensor]:
        return entry(number, version, old=number in self._old and version == 0)

    def _must(self, what: str) -> _Must:
        return _Must(self.outcome, what)

    def _opened(self) -> FileStore | None:
        for attempt in range(2):
            try:
                return FileStore(self.path, segment_bytes=SEGMENT_BYTES)
            except StoreError as error:
                self.outcome.reported = True
                if attempt or not self.catalogue:
                    self.outcome.other.append(f"it does not open: {error}")
                    return None
                self._rebuild()
        return None

    def _rebuild(self) -> None:
        self.outcome.rebuilt = True
        rebuild(self.path)

    def _verified(self, store: FileStore) -> VerifyReport | None:
        try:
            report = store.verify()
        except StoreError as error:
            self.outcome.reported = True
            if not self.catalogue:
                self.outcome.other.append(f"it cannot be checked: {error}")
            return None
        self.outcome.reported |= not report.clean or bool(report.quarantined)
        return report

    def _compare(self, report: VerifyReport, store: FileStore) -> None:
        """Whether a report says what is so."""
        said = {*report.corrupt, *report.missing}
        perhaps = {key_of(number).hex for number in self.perhaps}
        self.outcome.damaged = max(self.outcome.damaged, len(self.damage.keys))
        aside = set(report.quarantined)
        if self.outcome.rebuilt or self.catalogue:  # rows are judged by who damaged them
            return
        unreported = self.damage.keys - said - aside
        if not self.read_first:
            unreported |= self.damage.missing - set(report.missing)
        self.outcome.unreported += [f"chunk {self._names.get(key, key)}" for key in sorted(unreported)]
        false = said - self.damage.keys - perhaps
        self.outcome.false_alarms += [f"chunk {self._names.get(key, key)}" for key in sorted(false)]
        if orphans := [name for name in report.orphans if not name.startswith("kv/")]:
            self.outcome.false_alarms.append(f"orphans {orphans}")

    def _allowed(self) -> dict[int, set[int | None]]:
        allowed = self.ledger.allowed()
        damaged = {self._names[key] for key in self.damage.keys if key in self._names} | self.perhaps
        ever = self.ledger.ever()
        for number, states in allowed.items():
            if number in damaged or (self.outcome.rebuilt and number in self._old):
                states.add(None)
            # A new catalogue knows what is in the segments, and not what was deleted or replaced there.
            if self.outcome.rebuilt and (None in states or number in damaged):
                states |= ever.get(number, set())
        return allowed

    def _missing_in(self, store: FileStore) -> list[int]:
        """Read everything; returns the chunks that are a miss and were promised or damaged."""
        missing, found = [], {}
        allowed = self._allowed()
        promised = {n: states for n, states in self.ledger.allowed().items() if None not in states}
        for number, states in allowed.items():
            version = self._version(store, number, {v for v in states if v is not None})
            if version is not None:
                found[number] = version
            elif number in promised:
                missing.append(number)
        self._all_or_none(found)
        self._look_around(store, allowed)
        return missing

    def _version(self, store: FileStore, number: int, versions: set[int]) -> int | None:
        """Which version of a chunk the store gives; None for a miss."""
        key = key_of(number)
        try:
            info, known = store.info(key), store.known([key])
            kv = store.load(key)
        except ChunkNotFoundError:
            return None
        except StoreError as error:
            self._said(f"chunk {number}: {error}")
            return None
        if info is None:  # a row that was mended when the chunk was loaded
            info = store.info(key)
        elif not known:
            self.outcome.other.append(f"chunk {number} has an entry and is not known")
        for version in versions:
            want, tensor = self._entry(number, version)
            if info == want and kv.dtype == tensor.dtype and torch.equal(kv, tensor):
                return version
        self.outcome.wrong_hits.append(f"chunk {number} is none of the versions {sorted(versions)}: {info}"[:160])
        return None

    def _said(self, text: str) -> None:
        self.outcome.reported = True
        if not self.catalogue:
            self.outcome.other.append(text)

    def _all_or_none(self, found: dict[int, int]) -> None:
        """An interrupted put has happened or not."""
        pending = {n: v for n, v in self.ledger.unfinished().items() if v is not None and n not in self.perhaps}
        there = {number for number, version in pending.items() if found.get(number) == version}
        if there and there != set(pending) and not self.outcome.rebuilt and not self.damage.keys:
            self.outcome.other.append(f"of an interrupted put of {sorted(pending)} there are {sorted(there)}")

    def _look_around(self, store: FileStore, allowed: dict[int, set[int | None]]) -> None:
        """Lists of chunks name nothing that was not put, and in its own words."""
        try:
            listed = list(store.entries())
            for number in allowed:
                info = entry(number)[0]
                listed += store.forms(info.namespace, info.fingerprint, content_of(number))
            for name in NAMESPACES:
                listed += store.forms(name, "a" * 64, content_of(0))
        except StoreError as error:
            self._said(f"entries: {error}")
            return
        for info in listed:
            if info == entry(_NEW)[0]:
                continue
            known = self._names.get(info.key.hex)
            versions = allowed.get(known, set()) if known is not None else set()
            wanted = [self._entry(known, v)[0] for v in versions if known is not None and v is not None]
            if info not in wanted:
                self.outcome.wrong_hits.append(f"chunk {known} in a list is none of {versions}: {info}"[:160])

    def _intact(self, missing: list[int]) -> list[int]:
        allowed = self._allowed()
        return [number for number in missing if None not in allowed[number]]

    def _use(self, store: FileStore, missing: list[int]) -> None:
        """What was lost is compiled anew; the store takes it, tidies up, and is clean."""
        with self._must("use"):
            if self.outcome.rebuilt:  # which leaves files of format 1 without a name
                store.verify(repair=True)
            versions = {number: max(self.ledger.ever()[number]) for number in missing}
            again = [self._entry(number, version) for number, version in versions.items()]
            store.put([*again, entry(_NEW), entry(_NEW + 1)])
            if not torch.equal(store.load(key_of(_NEW)), entry(_NEW)[1]):
                self.outcome.other.append("a new chunk does not come back")
            store.delete([key_of(_NEW + 1)])
            store.compact(live_share=1.0)
            store.gc()
            self._clean(store)
            store.close()
            with closing(FileStore(self.path, segment_bytes=SEGMENT_BYTES)) as store:
                for info, kv in [*again, entry(_NEW)]:
                    if store.info(info.key) != info or not torch.equal(store.load(info.key), kv):
                        self.outcome.other.append(f"{info.key} put again does not come back")
                left = [number for number in self._missing_in(store) if number not in versions]
                self.outcome.lost_intact += [f"chunk {n} after tidying up" for n in self._intact(left)]
                self._clean(store)
        self._sums()

    def _clean(self, store: FileStore) -> None:
        report = store.verify()
        if not report.clean:
            self.outcome.other.append(f"not clean in the end: {report}")

    def _sums(self) -> None:
        """What triggers keep agrees with the rows."""
        with closing(sqlite3.connect(self.path / "catalogue.sqlite")) as db, suppress(sqlite3.Error):
            rows = db.execute("SELECT count(*), coalesce(sum(span), 0) FROM chunks").fetchone()
            tallies = db.execute("SELECT coalesce(sum(chunks), 0), coalesce(sum(nbytes), 0) FROM tallies").fetchone()
            live = db.execute("SELECT coalesce(sum(live), 0) FROM segments").fetchone()
            if rows != tallies or live[0] != rows[1]:
                self.outcome.other.append(f"rows {rows}, tallies {tallies}, live {live}")


class _Must:
    """A block that must not raise."""

    def __init__(self, outcome: Outcome, what: str) -> None:
        self._outcome, self._what = outcome, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception):
            self._outcome.other.append(f"{self._what}: {type(error).__name__}: {error}")
            return True
        return False
