"""Injected faults of every kind, the first trials of the campaign; and the campaign sees what it is to see.

``make soak`` runs a thousand.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from epic_engine import ChunkKey, FileStore
from epic_engine.storage.store import VerifyReport

from tests.damage import damage
from tests.soak import faults
from tests.soak.chunks import entry, key_of
from tests.soak.disk import compare, picture
from tests.soak.judge import Judge
from tests.soak.kinds import KINDS, Kind
from tests.soak.ledger import Ledger
from tests.soak.outcome import Outcome
from tests.soak.work import Base, bases

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs fork and kill")
TRIALS = sum(kind.share for kind in KINDS) + 12


@pytest.mark.slow
def test_every_kind_of_fault(tmp_path: Path) -> None:
    found = tmp_path / "outcomes.json"
    command = [sys.executable, "-m", "tests.soak.faults", "--count", str(TRIALS), "--json", str(found), "--folder"]
    run = subprocess.run(
        [*command, str(tmp_path)], capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"}
    )
    assert run.returncode == 0, run.stdout + run.stderr
    outcomes = json.loads(found.read_text())
    assert len(outcomes) == TRIALS
    assert {outcome["kind"] for outcome in outcomes} == {kind.name for kind in KINDS}
    assert not any(Outcome.from_dict(outcome).violations for outcome in outcomes)
    assert sum(outcome["damaged"] > 0 for outcome in outcomes) > 5
    assert sum(outcome["reported"] for outcome in outcomes) > 10
    assert not list(tmp_path.glob("epic-rag-faults-*"))


# -- the judge -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return bases(tmp_path_factory.mktemp("bases"))[2]


@pytest.fixture
def prepared(base: Base, tmp_path: Path) -> tuple[Path, Ledger]:
    copied = base.copied(tmp_path)
    return copied.path, copied.ledger


def _judged(prepared: tuple[Path, Ledger], **options: Any) -> Outcome:
    return Judge(*prepared, Outcome(), **options).check()


@pytest.mark.parametrize("read_first", [False, True])
def test_a_whole_store_is_in_order(prepared: tuple[Path, Ledger], read_first: bool) -> None:
    assert _judged(prepared, read_first=read_first).violations == []


@pytest.mark.parametrize("read_first", [False, True])
def test_damage_is_reported_and_a_miss(prepared: tuple[Path, Ledger], read_first: bool) -> None:
    before = picture(prepared[0])
    damage(prepared[0], key_of(prepared[1].here()[3]).hex)
    outcome = _judged(prepared, read_first=read_first, damage=compare(before, prepared[0]))
    assert (outcome.violations, outcome.damaged, outcome.misses, outcome.reported) == ([], 1, 1, True)


@pytest.mark.parametrize("read_first", [False, True])
def test_damage_that_nobody_expects_is_seen(prepared: tuple[Path, Ledger], read_first: bool) -> None:
    damage(prepared[0], key_of(prepared[1].here()[3]).hex)
    outcome = _judged(prepared, read_first=read_first)
    assert outcome.lost_intact
    assert bool(outcome.false_alarms) != read_first


def _spoil(monkeypatch: pytest.MonkeyPatch, method: str, spoil: Callable[[Any], Any]) -> None:
    real = getattr(FileStore, method)
    monkeypatch.setattr(FileStore, method, lambda *given, **more: spoil(real(*given, **more)))


def test_other_bytes_are_a_wrong_hit(prepared: tuple[Path, Ledger], monkeypatch: pytest.MonkeyPatch) -> None:
    _spoil(monkeypatch, "load", lambda kv: kv + 1)
    assert len(_judged(prepared).wrong_hits) == len(prepared[1].here())


def test_other_words_are_a_wrong_hit(prepared: tuple[Path, Ledger]) -> None:
    number = prepared[1].here()[0]
    info, kv = entry(number)
    with closing(FileStore(prepared[0])) as store:
        store.put([(info.__class__(**{**info.__dict__, "namespace": "another"}), kv)])
    assert f"chunk {number} " in "".join(_judged(prepared).wrong_hits)


def test_a_deleted_chunk_that_is_back_is_a_wrong_hit(prepared: tuple[Path, Ledger]) -> None:
    prepared[1].begin({prepared[1].here()[0]: None})
    prepared[1].done()
    assert _judged(prepared).wrong_hits


def test_a_lost_chunk_is_seen(prepared: tuple[Path, Ledger]) -> None:
    number = prepared[1].here()[0]
    with closing(sqlite3.connect(prepared[0] / "catalogue.sqlite")) as db:
        db.execute("DELETE FROM chunks WHERE key = ?", (bytes.fromhex(key_of(number).hex),))
        db.commit()
    assert _judged(prepared).lost_intact == [f"chunk {number}"]


def test_a_check_that_says_nothing_is_seen(prepared: tuple[Path, Ledger], monkeypatch: pytest.MonkeyPatch) -> None:
    before = picture(prepared[0])
    number = prepared[1].here()[3]
    damage(prepared[0], key_of(number).hex)
    _spoil(monkeypatch, "verify", lambda report: VerifyReport())
    assert _judged(prepared, damage=compare(before, prepared[0])).unreported == [f"chunk {number}"]


def test_half_a_put_is_seen(prepared: tuple[Path, Ledger]) -> None:
    prepared[1].begin({500: 0, 501: 0})
    with closing(FileStore(prepared[0])) as store:
        store.put([entry(500)])
    assert "interrupted put" in "".join(_judged(prepared).other)


def test_a_store_that_cannot_be_used_is_seen(prepared: tuple[Path, Ledger], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    assert _judged(prepared).other


@pytest.fixture
def campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[faults.Campaign]:
    monkeypatch.setattr(faults, "bases", lambda folder: [])
    threads = torch.get_num_threads()
    yield faults.Campaign(tmp_path)
    torch.set_num_threads(threads)


def test_a_trial_that_ends_or_hangs_is_seen(campaign: faults.Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    def try_one(inflict: Callable[[Any], None]) -> str:
        monkeypatch.setattr(faults, "kind_of", lambda seed: (Kind("one", inflict), 0))
        return "".join(campaign.trial(0)["other"])

    assert "-15" in try_one(lambda trial: os.kill(os.getpid(), signal.SIGTERM))
    assert "no chunk key" in try_one(lambda trial: ChunkKey("x").hex)
    monkeypatch.setattr(faults, "MOST_SECONDS", 0.2)
    assert "more than" in try_one(lambda trial: signal.pause())
