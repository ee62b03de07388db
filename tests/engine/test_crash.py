"""An ingest that is killed again and again goes on where it stopped and ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from epic_engine import FileStore
from tests.engine.crash import CHUNKS, chunks
from tests.engine.models import tiny

KILLS = 20


@pytest.mark.slow
def test_twenty_kills_leave_the_store_as_one_quiet_run_does(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "model")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.crash", str(tmp_path / "model"), str(tmp_path / "store"), str(KILLS)],
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
    assert not list((tmp_path / "store" / "tmp").iterdir())
    for info in quiet.entries():
        assert torch.equal(interrupted.load(info.key), quiet.load(info.key))
