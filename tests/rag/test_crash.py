"""kill -9 during an ingest, twenty times: nothing durable is lost, the next run resumes, answers are equal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from epic_engine import SamplingParams

from tests.rag.crash import texts
from tests.rag.stack import open_rag

KILLS = 20
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
QUESTIONS = ["Where is the lamp in winter?", "bread oven noon", "Which crane lifts a tonne?"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_ingests_resume(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.rag.crash", str(tmp_path / "store"), str(KILLS), "1"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= KILLS // 2  # the kills came while the ingests ran
    with open_rag(tmp_path / "store", rows_per_step=64, selftest=False) as rag:
        before = rag.registry.counts()["documents"]
        report = rag.add(texts=texts())
        assert len(report.unchanged) == before  # what was finished costs nothing
        assert rag.registry.counts()["documents"] == len(texts())
        assert rag.engine.store.verify().clean
        held = {c.key.hex for c in rag.engine.store.entries()}
        assert held == rag.registry.all_keys()
        got = [rag.ask(q, sampling=GREEDY) for q in QUESTIONS]
    with open_rag(tmp_path / "quiet", rows_per_step=64, selftest=False) as rag:
        rag.add(texts=texts())
        want = [rag.ask(q, sampling=GREEDY) for q in QUESTIONS]
    assert [(a.text, [s.chunk_id for s in a.sources]) for a in got] == [
        (a.text, [s.chunk_id for s in a.sources]) for a in want
    ]
