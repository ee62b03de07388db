"""What a user of the installed integration relies on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import llama_index_epic
import pytest

ROOT = Path(__file__).parents[2]


def test_all_is_complete_and_typed() -> None:
    assert llama_index_epic.__all__ == sorted(llama_index_epic.__all__)
    for name in llama_index_epic.__all__:
        assert getattr(llama_index_epic, name).__module__.startswith("llama_index_epic.")
    assert (Path(llama_index_epic.__file__).parent / "py.typed").is_file()


@pytest.mark.smollm2
@pytest.mark.slow
def test_the_example_runs_and_answers(tmp_path: Path) -> None:
    pytest.importorskip("llama_index.vector_stores.faiss")
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "llama_index_rag.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ},
    )
    assert done.returncode == 0, done.stderr
    # Which of them a model of this size gets right depends on the processor's rounding.
    assert done.stdout.count("✓ ") >= 4
    assert done.stdout.count("(composed)") == done.stdout.count("✓ ") + done.stdout.count("✗ ") == 8
    times = [float(line.split(" s ")[0]) for line in done.stdout.splitlines() if " x  " in line]
    assert len(times) == 3 - ("pip install llama-index-llms-huggingface" in done.stdout)
