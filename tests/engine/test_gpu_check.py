"""The check for whoever gets a GPU works here, on toys in Triton's interpreter."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from epic_engine.gpu import numerics
from epic_engine.gpu.check import PARTS, main
from epic_engine.gpu.kernel_cases import CASES
from epic_engine.gpu.reference import merged
from epic_engine.gpu.report import Report
from epic_engine.gpu.shapes import REAL, TINY
from epic_engine.gpu.tables import accept, markdown

_TIMEOUT = 550


def _run(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, JSON and Markdown of a run of its own process."""
    report, tables = folder / "check.json", folder / "check.md"
    command = [sys.executable, "-m", "epic_engine.gpu.check", "--json", str(report), "--markdown", str(tables)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*command, *arguments], env=environment, timeout=_TIMEOUT, check=False, capture_output=True)
    print(done.stdout.decode(), done.stderr.decode())
    return done.returncode, json.loads(report.read_text(encoding="utf-8")), tables.read_text(encoding="utf-8")


@pytest.mark.slow
def test_everything_runs_on_toys(tmp_path: Path) -> None:
    status, report, text = _run(tmp_path, "--tiny")
    assert report["failures"] == []
    assert report["skipped"] == []
    assert {name: part["state"] for name, part in report["parts"].items()} == dict.fromkeys(PARTS, "done")
    wrong = [check for check in report["checks"] if not check["passed"]]
    assert wrong == []
    assert status == 0
    assert report["finished"]
    assert report["passed"]
    names = " ".join(check["name"] for check in report["checks"])
    for kind in ("masks", "window", "softcap", "key side", "int8", "fp8", "bf16", "fp16", "fp32", "sinks", "write"):
        assert kind in names
    for kind in ("greedy tokens", "linked logits", "scattered, decoding together", "gate", "error as a multiple"):
        assert kind in names

    found = report["measurements"]
    cells = {(r["requests"], r["context"], r["shared"]) for r in found["decode"]}
    assert cells == {(r, c, s) for r in TINY.requests for c in TINY.contexts for s in (False, True)}
    assert len(found["link"]) == 4
    assert len(found["write"]) == 1
    policies = ("full", "prefix", "naive", "legolink:16")
    prompts = {(r["model"], r["context"], r["policy"]) for r in found["ttft"]}
    assert prompts == {(m.name, c, p) for m in TINY.models for c in TINY.prompts for p in policies}
    rounds = {(r["model"], r["requests"]) for r in found["generation"]}
    assert rounds == {(m.name, n) for m in TINY.models for n in TINY.decode_requests}
    for record in found["decode"] + found["link"] + found["write"]:
        assert record["microseconds"] > 0
        assert record["timer"] == "wall"
    # One head of 16 numbers of 2 bytes: a key and a value for each of 2 x 96 chunk tokens, and of two own ones.
    few = next(r for r in found["decode"] if (r["requests"], r["context"], r["shared"]) == (2, 96, False))
    assert few["bytes"] > (2 * 96 + 2) * 2 * 16 * 2

    assert [a["verdict"] for a in report["acceptance"]] == ["not measured"] * 4
    assert all(a["value"] > 0 for a in report["acceptance"])
    assert "mean nothing" in text
    assert "FAIL" not in text
    for key in ("card", "driver", "torch", "triton", "transformers", "date"):
        assert str(report["environment"][key]) in text


def test_a_run_cut_short_says_what_it_left_out(tmp_path: Path) -> None:
    _, report, text = _run(tmp_path, "--tiny", "--budget-seconds", "1")
    assert report["finished"]
    assert report["elapsed_seconds"] < 60
    assert list(report["parts"]) == list(PARTS)
    states = [report["parts"][part]["state"] for part in PARTS]
    assert states == ["incomplete", "skipped", "skipped", "skipped", "skipped"]
    reasons = {entry["step"]: entry["reason"] for entry in report["skipped"]}
    for part in PARTS[1:]:
        assert "budget" in reasons[f"all of {part}"]
        assert f"all of {part}" in text
    assert report["measurements"] == {}
    assert [a["verdict"] for a in report["acceptance"]] == ["not measured"] * 4


def test_what_goes_wrong_is_recorded_and_the_rest_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report = Report({"date": "today"}, 1000.0, path)

    def broken() -> None:
        raise torch.OutOfMemoryError("first line\nnothing is left")

    def numerics() -> None:
        report.check("good", 1e-6, 1e-5)
        report.step("a kernel", 0.0, broken, numeric=True)
        report.check("good as well", 0.0, 1e-5)

    def part() -> None:
        report.add("decode", requests=1)
        on_disk = json.loads(path.read_text(encoding="utf-8"))  # each measurement is there at once
        assert on_disk["measurements"]["decode"] == [{"requests": 1}]
        assert not on_disk["finished"]
        report.step("what does not fit", 1e9, broken)
        broken()

    report.part("numerics", numerics)
    report.part("attention", part)
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [check["passed"] for check in found["checks"]] == [True, False, True]
    assert found["checks"][1]["error"] is None  # not a number is no JSON
    assert not found["passed"]
    assert [entry["step"] for entry in found["failures"]] == ["a kernel", "all of attention"]
    assert all("nothing is left" in entry["error"] for entry in found["failures"])
    assert all("OutOfMemoryError" in entry["error"] for entry in found["failures"])
    assert [entry["step"] for entry in found["skipped"]] == ["what does not fit"]
    assert {name: entry["state"] for name, entry in found["parts"].items()} == dict.fromkeys(
        ("numerics", "attention"), "failed"
    )
    assert not report.check("not a number", math.nan, 1.0)


def _measured(share: float, link: float, first: float, shared: float) -> Report:
    names = ("date", "card", "driver", "cuda", "torch", "triton", "transformers", "python")
    report = Report({**dict.fromkeys(names, "some"), "tiny": False}, 1000.0)
    report.add("decode", requests=8, context=32768, shared=False, of_copy=share, microseconds=1.0)
    report.add("decode", requests=64, context=32768, shared=False, of_copy=0.9, microseconds=1000.0)
    report.add("decode", requests=64, context=32768, shared=True, of_copy=0.1, microseconds=1000.0 / shared)
    report.add("link", kernel="torch's flash attention, rows behind all keys", flops_per_second=6e14)
    report.add("link", kernel="rows among the chunks", flops_per_second=6e14 * link)
    report.add("ttft", model="8B", context=32768, policy="full", seconds=2.0)
    report.add("ttft", model="8B", context=32768, policy="legolink:16", seconds=2.0 / first)
    accept(report, REAL)
    return report


def test_figures_are_held_against_their_targets() -> None:
    good = _measured(0.71, 0.61, 8.1, 4.1)
    assert [a["verdict"] for a in good.acceptance] == ["pass"] * 4
    assert [a["value"] for a in good.acceptance] == pytest.approx([0.71, 0.61, 8.1, 4.1])
    bad = _measured(0.69, 0.59, 7.9, 3.9)
    assert [a["verdict"] for a in bad.acceptance] == ["FAIL"] * 4
    assert markdown(bad).count("FAIL") == 4
    nothing = Report({}, 1.0)
    accept(nothing, REAL)
    assert [(a["value"], a["verdict"]) for a in nothing.acceptance] == [(None, "not measured")] * 4


def test_it_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert main([]) == 2
    assert "no GPU" in capsys.readouterr().err
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main([]) == 2
    assert "--tiny" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--parts", "numbers"])


def test_the_reference_merges_as_one_softmax() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 40, generator=generator, dtype=torch.float64)
    values = torch.randn(3, 40, 8, generator=generator, dtype=torch.float64)
    sinks = torch.randn(3, generator=generator, dtype=torch.float64)
    whole = torch.softmax(torch.cat([scores, sinks[:, None]], 1), 1)[:, None, :40] @ values
    cuts = [slice(0, 7), slice(7, 8), slice(8, 40)]
    outs = [(torch.softmax(scores[:, c], 1)[:, None] @ values[:, c])[:, 0] for c in cuts]
    got = merged(outs, [torch.logsumexp(scores[:, c], 1) for c in cuts], sinks)
    assert (got - whole[:, 0]).abs().max() < 1e-12


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    case = next(c for c in CASES if c.dtype == torch.float32 and c.readers <= 4)
    right = numerics.segment_attention

    def slightly_wrong(*arguments: Any, scale: float, **options: Any) -> None:
        right(*arguments, scale=scale * 1.001, **options)

    for attention, passes in ((right, True), (slightly_wrong, False)):
        monkeypatch.setattr(numerics, "segment_attention", attention)
        assert (numerics.segment_error(case, device, 0) <= case.tolerance) == passes


@pytest.mark.gpu
def test_numerics_on_the_card(tmp_path: Path) -> None:
    path = tmp_path / "numerics.json"
    assert main(["--parts", "numerics", "--json", str(path)]) == 0
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["failures"] == []
    assert len(report["checks"]) > 40
