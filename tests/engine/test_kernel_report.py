"""Kernels compile for cards that are not here, and what they need is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from epic_engine.gpu import kernel_record
from epic_engine.gpu.cards import CARDS, Demand
from epic_engine.gpu.kernel_record import Build, Spills, complaints

DECODE = "segment 128 16x"


def report(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the report in a process of its own, where the kernels are compiled and not interpreted."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "epic_engine.gpu.kernel_report", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=kept | environment,
    )


def build(**changes: Any) -> Build:
    """A decode tile that is as it should be."""
    fields = {"name": "tile", "kernel": "segment", "arch": 90, "rows": 16, "registers": 128, "shared": 50_000}
    return Build(**fields | changes)


def test_report_of_configurations_that_are_compiled(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    files = [tmp_path / "report.json", tmp_path / "report.md"]
    done = report(
        *("--arch", "90", "--only", f"{DECODE}64 bf16 unrotated", f"{DECODE}64 bf16 int8", "merge 64 bf16 sinks"),
        *("--jobs", "1", "--json", str(files[0]), "--markdown", str(files[1])),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(files[0].read_text())
    assert found["complaints"] == []
    assert len(found["builds"]) == 3
    for made in found["builds"]:
        assert made["error"] == ""
        assert 16 < made["registers"] <= 255
        assert made["spilled"] == 0
        assert made["programs"] >= 2
        assert made["name"] in done.stdout
    tiles = [made for made in found["builds"] if made["kernel"] == "segment"]
    for made in tiles:
        assert (made["rows"], made["keys"]) == (16, 64)
        assert made["copies"]["16"] > 0
        # At least one stage of keys and one of values lies in shared memory.
        assert 2 * 64 * 128 <= made["shared"] <= CARDS[90].shared_most
    text = files[1].read_text()
    assert text.startswith("# ")
    assert text.count(f"| {DECODE}64 bf16 unrotated |") == 2


def test_report_refuses_the_interpreter() -> None:
    done = report(TRITON_INTERPRET="1")
    assert done.returncode == 2
    assert "TRITON_INTERPRET" in done.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spilled": 16}, "16 bytes of registers"),
        ({"shared": 227 * 1024 + 1, "rows": 64}, "shared memory"),
        ({"shared": 163 * 1024 + 1, "arch": 80, "rows": 64}, "shared memory"),
        ({"error": "no such instruction"}, "no such instruction"),
        ({"registers": 255, "warps": 8}, "1 programs a multiprocessor"),
    ],
)
def test_what_is_wrong_is_said(changes: dict[str, Any], message: str) -> None:
    assert complaints([build()]) == []
    (complaint,) = complaints([build(), build(**changes)])
    assert message in complaint


def test_spills_with_a_reason_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernel_record.JUSTIFIED_SPILLS, "tile", Spills(16, 2, "for a test"))
    assert complaints([build(spilled=16), build(name="tile masked", spilled=8, reloads=2)]) == []
    assert len(complaints([build(spilled=16, reloads=3)])) == 1
    assert len(complaints([build(spilled=24)])) == 1
    assert len(complaints([build(name="another tile", spilled=16)])) == 1


@pytest.mark.parametrize(
    ("arch", "registers", "shared", "warps", "programs", "limit"),
    [
        # Figures of NVIDIA's occupancy calculator: 128 registers are 512 threads of a file of 65,536.
        (80, 128, 0, 4, 4, "registers"),
        (90, 32, 0, 4, 16, "registers"),
        (90, 255, 0, 8, 1, "registers"),
        (90, 168, 0, 4, 3, "registers"),
        (80, 32, 81 * 1024, 4, 2, "shared memory"),
        (80, 32, 82 * 1024, 4, 1, "shared memory"),
        (90, 32, 113 * 1024, 4, 2, "shared memory"),
        (100, 16, 0, 1, 32, "threads"),
        (100, 16, 0, 8, 8, "threads"),
    ],
)
def test_programs_that_fit(arch: int, registers: int, shared: int, warps: int, programs: int, limit: str) -> None:
    fit = CARDS[arch].fit(registers, shared, warps)
    assert (fit.programs, fit.limit) == (programs, limit)


def test_tensor_memory_limits_programs() -> None:
    assert CARDS[100].fit(32, 0, 4, 256).programs == 2


def test_least_time_is_that_of_the_bound() -> None:
    card = CARDS[90]
    assert card.least_time(Demand(4.8e9, 4.8e9, 1e9)) == (pytest.approx(1e-3), "memory")
    assert card.least_time(Demand(1e6, 1e6, 989e9)) == (pytest.approx(1e-3), "compute")
    assert card.least_time(Demand(1e6, 1e6, 67e9, tensor=False)) == (pytest.approx(1e-3), "compute")
