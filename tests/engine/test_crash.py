"""Several processes on one store, and processes that are killed: an ingest goes on where it stopped."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from epic_engine import FileStore
from epic_engine.storage import faults

from tests.damage import where
from tests.engine.crash import CHUNKS, chunks
from tests.engine.models import tiny
from tests.engine.test_store import entry

KILLS = 20
FORK = multiprocessing.get_context("fork")


def _write(path: Path, numbers: list[int]) -> None:
    store = FileStore(path)
    for number in numbers:
        store.put([entry(number)])
    store.close()


def test_processes_write_the_same_and_other_keys_at_once(tmp_path: Path) -> None:
    shares = [list(range(12)), list(range(6, 18)), list(range(12, 0, -1))]
    processes = [FORK.Process(target=_write, args=(tmp_path, share)) for share in shares]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [p.exitcode for p in processes] == [0, 0, 0]
    store = FileStore(tmp_path)
    assert store.verify().clean
    assert {i.key for i in store.entries()} == {entry(n)[0].key for n in range(18)}
    assert all(torch.equal(store.load(entry(n)[0].key), entry(n)[1]) for n in range(18))
    assert 1 <= len(list(tmp_path.glob("segments/*.seg"))) <= 3


def _hang_in_a_write(path: Path, point: str, pipe: Any) -> None:
    def hang(name: str) -> None:
        if name == point:
            pipe.send([str(file) for file in path.glob("segments/*.seg")])
            threading.Event().wait()

    store = FileStore(path)
    with faults.install(hang):
        store.put([entry(3)])


@pytest.mark.parametrize("point", ["segment.created", "segment.entered", "put.appended", "put.synced"])
def test_what_a_killed_writer_left_is_gone_on_with_and_a_living_ones_is_not(point: str, tmp_path: Path) -> None:
    here, there = FORK.Pipe()
    process = FORK.Process(target=_hang_in_a_write, args=(tmp_path, point, there))
    process.start()
    (half,) = map(Path, here.recv())
    beside = FileStore(tmp_path)
    beside.put([entry(4)])
    assert where(tmp_path)[entry(4)[0].key.hex].file != half
    beside.delete([entry(4)[0].key])
    beside.compact()
    assert half.exists()
    beside.close()
    process.kill()
    process.join()
    assert half.exists()
    left = half.stat().st_size
    store = FileStore(tmp_path)
    assert half.exists() == (point != "segment.created")  # that one is named nowhere, and nothing is in it
    assert store.verify().clean
    assert store.info(entry(3)[0].key) is None
    store.put([entry(5)])
    if point == "segment.entered":  # others hold nothing but what died
        assert where(tmp_path)[entry(5)[0].key.hex].start == left
    assert torch.equal(store.load(entry(5)[0].key), entry(5)[1])
    store.gc()
    assert len(list(tmp_path.glob("segments/*.seg"))) == 1
    assert store.verify().clean
    assert torch.equal(store.load(entry(5)[0].key), entry(5)[1])


@pytest.mark.slow
def test_twenty_kills_leave_the_store_as_one_quiet_run_does(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "model")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.engine.crash",
            str(tmp_path / "model"),
            str(tmp_path / "store"),
            str(KILLS),
        ],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    whole, *killed, last = (json.loads(line) for line in done.stdout.splitlines())
    total = sum(map(len, chunks()))
    assert (whole["exit"], whole["before"], whole["after"]) == (0, 0, total)
    assert len(killed) == KILLS
    assert all(run["killed"] for run in killed)
    assert last["exit"] == 0
    for earlier, run in zip(killed, [*killed[1:], last], strict=True):
        assert run["before"] == earlier["after"]  # nothing durable is lost
    for run in (*killed, last):
        if run["progress"]:
            assert run["progress"][0] == [0, total - run["before"]]  # and nothing durable is computed again
            # What was reported as done is durable.
            assert run["after"] >= run["before"] + run["progress"][-1][0]
    # The kills hit work: most ingests got some way, and none finished.
    assert sum(run["after"] > run["before"] for run in killed) >= KILLS // 3
    assert killed[-1]["after"] < total == last["after"]

    interrupted, quiet = FileStore(tmp_path / "store"), FileStore(tmp_path / "whole")
    report = interrupted.verify()
    assert report.clean, report
    assert report.checked == CHUNKS
    interrupted.gc()
    assert interrupted.gc().leases == 0  # those of the killed are gone
    assert interrupted.verify().clean
    for info in quiet.entries():
        assert torch.equal(interrupted.load(info.key), quiet.load(info.key))
