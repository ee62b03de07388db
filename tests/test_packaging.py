"""What a user of the installed package relies on: exports, typing marker, layers, examples that run."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["epic_engine", "epic_rag"])
def test_all_is_complete_and_typed(name: str) -> None:
    module = importlib.import_module(name)
    for exported in module.__all__:
        assert getattr(module, exported) is not None
    assert (Path(module.__file__).parent / "py.typed").is_file()
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = module.no_such_thing


def test_engine_imports_without_the_text_side() -> None:
    code = (
        "import sys\n"
        "for name in 'faiss sentence_transformers typer rich bs4 langchain_core llama_index triton'.split():\n"
        "    sys.modules[name] = None\n"
        "import epic_engine\n"
        "for name in epic_engine.__all__: getattr(epic_engine, name)\n"
        "assert 'epic_rag' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_engine_without_files_needs_torch_and_transformers_alone() -> None:
    """As on a machine that was lent to run `make gpu-check`."""
    code = (
        "import sys\n"
        "for name in 'xxhash platformdirs faiss gguf typer rich langchain_core llama_index triton'.split():\n"
        "    sys.modules[name] = None\n"
        "from tests.engine.models import tiny\n"
        "from epic_engine import Engine, SamplingParams\n"
        "with Engine(tiny('llama')) as engine:\n"
        "    key = engine.compile([5, 6, 7])\n"
        "    assert len(engine.generate([key, [8]], SamplingParams(2, ignore_eos=True)).token_ids) == 2\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.smollm2
def test_quickstart_runs_and_answers(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "quickstart.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ},
    )
    assert done.returncode == 0, done.stderr
    assert "Edda Thorne" in done.stdout
    assert "company.md" in done.stdout
    assert "reused" in done.stdout
