"""At every step between two durable states the process is killed or an error comes: the store stays whole.

One scenario passes every point: old format, puts into several segments, replacing, deleting, a damaged chunk,
compaction, collection, a rebuild and an export. What `put` returned for is there afterwards, exactly, unless it was
deleted.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from epic_engine import ChunkNotFoundError, FileStore, export_chunks
from epic_engine.storage import appender, faults, indices
from epic_engine.storage.rebuild import rebuild

from tests.damage import damage
from tests.engine.fault_hooks import at, throw
from tests.engine.format_1 import write_format_1
from tests.engine.test_store import entry

OLD = [entry(n, created=float(n)) for n in range(3)]
NEW = [entry(n, created=float(n)) for n in range(10, 18)]
SEGMENT_BYTES = 3 * 2368


class Told:
    """What the store has promised: keys that are there with these versions, keys that may be, keys that are gone.

    Written to a file before and after each step, so that the parent of a killed process can read it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def say(self, word: str, numbers: list[int]) -> None:
        with open(self.path, "a", encoding="ascii") as file:
            file.write("".join(f"{word} {number}\n" for number in numbers))

    def states(self) -> dict[int, set[str]]:
        """The versions that each chunk may have now: "0", "1" or "gone"."""
        found: dict[int, set[str]] = {}
        for line in self.path.read_text(encoding="ascii").splitlines():
            word, number = line.split()
            before = found.setdefault(int(number), {"gone"})
            wanted = word.rstrip("?")
            found[int(number)] = before | {wanted} if word.endswith("?") else {wanted}
        return found


def _version(number: int, version: int) -> torch.Tensor:
    return entry(number)[1] + version


def _put(store: FileStore, told: Told, numbers: list[int], version: int = 0) -> None:
    told.say(f"{version}?", numbers)
    store.put([(entry(n, created=float(n + 100 * version))[0], _version(n, version)) for n in numbers])
    told.say(str(version), numbers)


def _delete(store: FileStore, told: Told, numbers: list[int]) -> None:
    told.say("gone?", numbers)
    store.delete([entry(n)[0].key for n in numbers])
    told.say("gone", numbers)


def scenario(path: Path, told: Told) -> None:
    """Pass every point."""
    with mock.patch.object(indices, "MERGE_EVERY", 2):
        _scenario(path, told)


def _scenario(path: Path, told: Told) -> None:
    store = FileStore(path, segment_bytes=SEGMENT_BYTES)
    for name in ("0" * 32, "1" * 32):  # left by processes that were killed before they wrote anything
        (path / "segments" / f"{name}.seg").write_bytes(b"")
    _put(store, told, [10, 11])
    _put(store, told, [12, 13, 14, 15])
    _put(store, told, [10], 1)
    damage(path, entry(12)[0].key.hex)
    told.say("gone?", [12])
    with suppress(ChunkNotFoundError):
        store.load(entry(12)[0].key)
    _delete(store, told, [11, 13])
    soon = replace(entry(16)[0], expires=time.time() - 1)
    store.put([(soon, entry(16)[1])])
    store.compact(live_share=1.0)
    _put(store, told, [17])
    store.gc()
    store.compact(live_share=1.0)
    store.close()
    rebuild(path)
    store = FileStore(path, segment_bytes=SEGMENT_BYTES)
    _put(store, told, [11])
    export_chunks(store, path.with_suffix(".export"))
    store.close()


def _fresh(path: Path) -> Told:
    write_format_1(path, OLD)
    told = Told(path.with_suffix(".told"))
    told.say("0", [0, 1, 2])
    return told


def _check(path: Path, told: Told) -> None:
    store = FileStore(path, segment_bytes=SEGMENT_BYTES)
    report = store.verify()
    # The scenario damages a chunk itself; killed before it was read, that is found now.
    assert set(report.corrupt) <= {entry(12)[0].key.hex}, report
    assert not report.missing
    assert not report.orphans
    assert store.verify(quick=True).clean
    states = told.states()
    for number, allowed in states.items():
        key = entry(number)[0].key
        try:
            kv = store.load(key)
        except ChunkNotFoundError:
            assert "gone" in allowed, (number, allowed)
        else:
            assert any(torch.equal(kv, _version(number, int(v))) for v in allowed - {"gone"}), (number, allowed)
    assert {i.key for i in store.entries()} <= {entry(n)[0].key for n in states}
    # And it works: nothing is locked, nothing in the way.
    store.put([entry(40)])
    store.compact(live_share=1.0)
    store.gc()
    assert store.verify().clean
    assert torch.equal(store.load(entry(40)[0].key), entry(40)[1])
    with sqlite3.connect(path / "catalogue.sqlite") as db:
        live = db.execute("SELECT s.live, coalesce(sum(c.span), 0) FROM segments s LEFT JOIN chunks c "
                          "ON c.segment = s.id GROUP BY s.id").fetchall()  # fmt: skip
        tallies = db.execute("SELECT sum(chunks), sum(nbytes) FROM tallies").fetchone()
        assert all(a == b for a, b in live)
        assert tallies == db.execute("SELECT count(*), sum(span) FROM chunks").fetchone()
    db.close()
    store.close()


def _passes(tmp_path: Path) -> Counter[str]:
    path = tmp_path / "counted"
    told = _fresh(path)
    passed: Counter[str] = Counter()
    with faults.install(lambda name: passed.update([name])):
        scenario(path, told)
    _check(path, told)
    return passed


@pytest.fixture(scope="module")
def passes(tmp_path_factory: pytest.TempPathFactory) -> Counter[str]:
    """How often the scenario passes each point."""
    return _passes(tmp_path_factory.mktemp("passes"))


def test_the_scenario_passes_every_point(passes: Counter[str]) -> None:
    assert set(passes) == set(faults.POINTS)


class Broken(Exception):  # noqa: N818
    """What no code expects."""


ERRORS = [Broken("fault"), OSError(5, "Input/output error"), KeyboardInterrupt()]


@pytest.mark.parametrize("point", faults.POINTS)
def test_an_error_at_any_point(point: str, passes: Counter[str], tmp_path: Path) -> None:
    """The first, the last and one more time that a point is passed, with different errors."""
    for number, error in zip((0, passes[point] - 1, passes[point] // 2), ERRORS, strict=True):
        path = tmp_path / type(error).__name__
        told = _fresh(path)
        with faults.install(at(point, number, partial(throw, error))), suppress(Exception, KeyboardInterrupt):
            scenario(path, told)
        _check(path, told)
        shutil.rmtree(path)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("point", faults.POINTS)
def test_a_kill_at_any_point(point: str, passes: Counter[str], tmp_path: Path) -> None:
    times = passes[point]
    for number in sorted({*range(min(times, 3)), times // 2, times - 1}):
        path = tmp_path / str(number)
        told = _fresh(path)
        child = os.fork()
        if child == 0:
            try:
                with faults.install(at(point, number, lambda: os._exit(9))):
                    scenario(path, told)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        if not (path / "catalogue.sqlite").exists():
            rebuild(path)
        _check(path, told)
        shutil.rmtree(path)


@pytest.mark.parametrize("point", ["put.appending", "put.appended", "put.synced", "put.committing"])
def test_a_failed_put_leaves_the_rows_as_they_were(point: str, tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put(NEW[:2])
    with faults.install(at(point, 0, lambda: throw(Broken()))), pytest.raises(Broken):
        store.put([(NEW[0][0], NEW[0][1] + 1), NEW[2]])
    assert {i.key for i in store.entries()} == {i.key for i, _ in NEW[:2]}
    assert all(torch.equal(store.load(i.key), kv) for i, kv in NEW[:2])
    store.put(NEW)
    assert all(torch.equal(store.load(i.key), kv) for i, kv in NEW)
    assert store.verify().clean


def test_a_hook_is_gone_when_its_context_ends() -> None:
    seen: list[str] = []
    with faults.install(seen.append):
        with faults.install(lambda name: None):
            faults.point("put.synced")
        faults.point("put.committed")
    faults.point("put.synced")
    assert seen == ["put.committed"]


@pytest.mark.parametrize("times", [1, 3])
def test_somebody_who_tidies_up_has_a_new_segments_lock(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, names = appender.take, set()

    def busy(path: Path) -> object:
        names.add(path)
        return real(path) if len(names) > times else None

    monkeypatch.setattr(appender, "take", busy)
    store = FileStore(tmp_path)
    store.put(NEW)
    assert all(torch.equal(store.load(i.key), kv) for i, kv in NEW)
    assert len(names) == times + 1
    store.close()
    assert len(list(tmp_path.glob("segments/*.seg"))) == 1
