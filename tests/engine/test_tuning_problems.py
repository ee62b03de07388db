"""The problems that tiles are measured on: no right tile changes their numbers, a wrong one does."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from epic_engine.attention.kernels.configs import default_config
from epic_engine.attention.kernels.tuned import candidates
from epic_engine.gpu import tune, tune_problems
from epic_engine.gpu.shapes import ModelShape

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MODEL = ModelShape("toy", 256, 1, 16, 1, 16, 64, 99)


def oracle(problem: tune_problems.TileProblem) -> Tensor:
    """``(rows, heads, dim)`` in float64: every row over all keys before it, by one softmax."""
    q = problem._q.double().cpu()
    heads, _, dim = q.shape
    half = dim // 2
    pairs = torch.complex(q[..., :half], q[..., half:])
    found, row = [], 0
    for item in problem._batch:
        for number, position in enumerate(item.positions):
            scores, values = [torch.zeros(heads, number + 1)], [torch.zeros(number + 1, dim)]  # of its own: zeros
            for run in item.runs:
                if position < run.after:
                    continue
                kv = run.kv[0, :, 0, run.start : run.stop].double().cpu()
                angles = (position - run.offset) * torch.arange(1, half + 1).double() * (math.pi / 2)
                turned = pairs[:, row] * torch.polar(torch.ones_like(angles), angles)
                scores.append(torch.view_as_real(turned).flatten(1) @ kv[0].T * math.log(2.0))
                values.append(kv[1])
            found.append(torch.softmax(torch.cat(scores, 1).double(), 1) @ torch.cat(values).double())
            row += 1
    return torch.stack(found)


def merged(problem: tune_problems.TileProblem, out: Tensor, lse: Tensor) -> Tensor:
    host, out, lse = problem._tables.host, out.double().cpu(), lse.double().cpu()
    found = []
    for start, stop in zip(host["row_starts"][:-1], host["row_starts"][1:], strict=True):
        parts = torch.from_numpy(host["row_partials"][start:stop]).long()
        found.append((torch.softmax(lse[parts], 0)[..., None] * out[parts]).sum(0))
    return torch.stack(found)


# The interpreter cuts bfloat16 off instead of rounding it, so that only a card can compute these problems in it.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_no_tile_changes_the_numbers_of_the_problems(dtype: torch.dtype) -> None:
    for default in {default_config(16, 16, n, dtype): None for n in (1, 2, 4, 8)}:
        problems = tune_problems.tile_problems(default, MODEL, dtype, DEVICE, tune_problems.TINY)
        assert [problem.name for problem in problems] == ["decode", "link"]
        for problem in problems:
            wanted = problem.numbers(default)
            want = oracle(problem)
            assert (merged(problem, *wanted) - want).abs().max() < 1e-5 * want.abs().max()
            for keys in {tile.block_n for tile in candidates(default)} - {default.block_n}:
                assert tune._difference(problem.numbers(replace(default, block_n=keys)), wanted) < 3e-6


def test_a_wrong_tile_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    default = default_config(16, 16, 1, torch.float32)
    wrong = candidates(default)[1]
    right = tune_problems.segment_attention

    def slightly_wrong(*arguments: Any, scale: float, **options: Any) -> None:
        right(*arguments, scale=scale * (1.001 if arguments[2].config == wrong else 1.0), **options)

    monkeypatch.setattr(tune_problems, "segment_attention", slightly_wrong)
    monkeypatch.setattr(tune_problems.TileProblem, "seconds", lambda _, config: 0.5 if config == wrong else 1.0)
    problems = tune_problems.tile_problems(default, MODEL, torch.float32, DEVICE, tune_problems.TINY)
    lines: list[str] = []
    assert tune.choose(default, problems, 1, lines.append) == (default, 1.0)
    assert sum("discarded" in line for line in lines) == 1


@pytest.mark.slow
def test_the_whole_command_runs_on_toys(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "epic_engine.gpu.tune", "--tiny", "--model-shape", "4,1,256"]
    changes = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "EPIC_RAG_CACHE": str(tmp_path)}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **changes}
    done = subprocess.run(command, env=environment, timeout=300, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("of the default tile's time") == 3
    assert "discarded" not in done.stderr
    assert "does not run" not in done.stderr
    (path,) = (tmp_path / "kernels").iterdir()
    assert [(t["rows"], t["element"]) for t in json.loads(path.read_text())["tiles"]] == [(16, 4)]
