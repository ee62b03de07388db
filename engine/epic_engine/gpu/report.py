"""What a run of the GPU check found, on disk after every measurement, and the time it may still take."""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

__all__ = ["Report"]

Result = TypeVar("Result")

_LONGEST_MESSAGE = 400


class Report:
    """Collects what the parts find.

    Parameters
    ----------
    environment
        Machine and versions.
    budget_seconds
        Steps that would not end within this time are skipped.
    path
        JSON file that is written anew after every step; None writes none.

    Attributes
    ----------
    checks
        Numeric comparisons: ``part``, ``name``, ``error``, ``limit``, ``passed``, and ``note`` where there is one.
    measurements
        Records by table.
    parts
        Seconds and state of each part.
    acceptance
        Figures against their targets; filled in at the end.
    """

    def __init__(self, environment: Mapping[str, Any], budget_seconds: float, path: Path | None = None) -> None:
        self.environment = dict(environment)
        self.budget_seconds = budget_seconds
        self.checks: list[dict[str, Any]] = []
        self.measurements: dict[str, list[dict[str, Any]]] = {}
        self.skipped: list[dict[str, str]] = []
        self.failures: list[dict[str, str]] = []
        self.parts: dict[str, dict[str, Any]] = {}
        self.acceptance: list[dict[str, Any]] = []
        self.finished = False
        self._path = path
        self._begin = time.perf_counter()
        self._part = ""

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._begin

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.budget_seconds - self.elapsed

    @property
    def passed(self) -> bool:
        """Whether no numeric check failed."""
        return all(check["passed"] for check in self.checks)

    def part(self, name: str, work: Callable[[], None]) -> None:
        """Run a part. Whatever goes wrong in it is recorded, and the others go on."""
        begin, self._part, whole = self.elapsed, name, f"all of {name}"
        failed, skipped = len(self.failures), len(self.skipped)
        self.parts[name] = {"state": "running", "seconds": 0.0}
        self.save()
        self.step(whole, 0.0, work)
        state = "done"
        if len(self.failures) > failed:
            state = "failed"
        elif len(self.skipped) > skipped:
            state = "skipped" if self.skipped[skipped]["step"] == whole else "incomplete"
        self.parts[name] = {"state": state, "seconds": round(self.elapsed - begin, 2)}
        self.save()

    def step(self, name: str, needs: float, work: Callable[[], Result], *, numeric: bool = False) -> Result | None:
        """Run a step if there is time for it.

        Parameters
        ----------
        name
            For the list of what was skipped or failed.
        needs
            Seconds that it will take at most, as far as one can know.
        work
            What to do.
        numeric
            An exception is a failed check.

        Returns
        -------
        object
            What ``work`` gave; None if it was skipped or failed.
        """
        left = self.left
        if left <= 0:
            self.skip(name, "the budget is used up")
            return None
        if needs > left:
            self.skip(name, f"it may take {needs:.0f} s, and {left:.0f} s of the budget are left")
            return None
        print(f"[{self.elapsed:6.1f} s] {self._part}: {name}", file=sys.stderr, flush=True)
        try:
            return work()
        except Exception as error:
            self.fail(name, error, numeric=numeric)
            return None
        finally:
            self.save()

    def skip(self, name: str, reason: str) -> None:
        """Record that a step did not run."""
        self.skipped.append({"part": self._part, "step": name, "reason": reason})
        self.save()

    def fail(self, name: str, error: BaseException, *, numeric: bool = False) -> None:
        """Record an exception by its traceback's last line, and free what its frames held."""
        lines = traceback.format_exception(error)
        last = lines[-1].strip().splitlines()[-1][:_LONGEST_MESSAGE]
        kind = type(error).__name__
        message = last if kind in last else f"{kind}: {last}"
        self.failures.append({"part": self._part, "step": name, "error": message})
        print(f"failed: {name}: {message}", file=sys.stderr, flush=True)
        if numeric:
            self.check(name, math.nan, 0.0, note=message)
        traceback.clear_frames(error.__traceback__)
        tidy()

    def check(self, name: str, error: float, limit: float, *, note: str = "") -> bool:
        """Record a numeric comparison; it passes if the error is a number and at most the limit."""
        passed = bool(error <= limit)
        entry: dict[str, Any] = {"part": self._part, "name": name, "error": error, "limit": limit, "passed": passed}
        if note:
            entry["note"] = note
        self.checks.append(entry)
        if not passed:
            print(f"WRONG: {name}: {error:.2e}, allowed {limit:.2e}", file=sys.stderr, flush=True)
        self.save()
        return passed

    def add(self, table: str, **record: Any) -> None:
        """Record a measurement."""
        self.measurements.setdefault(table, []).append(record)
        self.save()

    def find(self, table: str, **wanted: Any) -> dict[str, Any] | None:
        """The last measurement of a table with these values, or None."""
        found = [r for r in self.measurements.get(table, ()) if all(r.get(k) == v for k, v in wanted.items())]
        return found[-1] if found else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON; numbers that JSON does not know become None."""
        fields = {
            "environment": self.environment,
            "budget_seconds": self.budget_seconds,
            "elapsed_seconds": round(self.elapsed, 2),
            "finished": self.finished,
            "passed": self.passed,
            "parts": self.parts,
            "checks": self.checks,
            "measurements": self.measurements,
            "skipped": self.skipped,
            "failures": self.failures,
            "acceptance": self.acceptance,
        }
        found: dict[str, Any] = _finite(fields)
        return found

    def save(self) -> None:
        """Write what there is; a run that is cut off leaves the last whole file."""
        if self._path is None:
            return
        temporary = self._path.with_name(f"{self._path.name}.tmp")
        temporary.write_text(json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(temporary, self._path)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def tidy() -> None:
    """Give memory back that nobody holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
