"""From results of examples to figures with intervals, per arm (policy, context, stored KV), over all and by group."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from epic_rag.evaluation.intervals import Interval, bootstrap_mean, wilson
from epic_rag.evaluation.records import ArmResult, ExampleResult, compiled_label

__all__ = ["RIGHT", "ArmSummary", "Summary", "summarise"]

RIGHT = 0.5
"""An answer of at least this score counts as right; exact match and `contains` know 0 and 1 alone."""

# Examples of equal value here are not independent: variations of one, and questions about the same documents.
_CLUSTERS = ("base", "records")
_MOST_VALUES = 12
_GROUP_RESAMPLES = 500


@dataclass(frozen=True)
class ArmSummary:
    """One policy with one kind of compiled chunks over a set of examples; intervals are at 95 %.

    Attributes
    ----------
    policy, context, kv_dtype, examples
        What, and over how many examples.
    score, kl, agreement, first_token, nll, kv_kl, kv_agreement
        Means of the fields of :class:`~epic_rag.evaluation.records.ArmResult`.
    score_change, nll_change
        Paired differences, this minus full.
    kept, right
        Of the ``right`` examples that full answers rightly, the share that this does (Wilson's interval).
    rows, rows_share, recomputed
        Mean rows computed, their mean share of the prompt, and mean linked tokens computed anew.
    ttft_s, speedup
        Median TTFT, and median of full's TTFT over this one's, example by example.
    consistency
        Where examples are variations of a base: mean share of the commonest answer among them, else None.
    """

    policy: str
    context: str
    examples: int
    score: Interval
    score_change: Interval
    kl: Interval
    agreement: Interval
    first_token: Interval
    nll: Interval
    nll_change: Interval
    kept: Interval
    right: int
    rows: float
    rows_share: float
    recomputed: float
    ttft_s: float
    speedup: float
    consistency: float | None
    kv_dtype: str
    kv_kl: Interval
    kv_agreement: Interval

    @property
    def compiled(self) -> str:
        """How its chunks were compiled and kept; empty where it uses none."""
        return compiled_label(self.context, self.kv_dtype)

    @property
    def label(self) -> str:
        """For legends and tables."""
        return f"{self.policy} · {self.compiled}" if self.compiled else self.policy


@dataclass(frozen=True)
class Summary:
    """All figures of a run.

    Attributes
    ----------
    examples, skipped
        Measured, and left out because they did not fit the model.
    arms
        ``full`` first.
    groups
        Per dimension and value, the same figures over that group's examples.
    """

    examples: int
    skipped: int
    arms: tuple[ArmSummary, ...]
    groups: dict[str, dict[str, tuple[ArmSummary, ...]]]

    @property
    def rounded(self) -> tuple[ArmSummary, ...]:
        """Arms that were compared with the same chunks as the model computes them."""
        return tuple(arm for arm in self.arms if not math.isnan(arm.kv_kl.mean))

    def as_dict(self) -> dict[str, Any]:
        """For JSON: figures that do not exist are None."""
        cleaned: dict[str, Any] = _without_nan(asdict(self))
        return cleaned


def summarise(results: Sequence[ExampleResult], *, seed: int = 0) -> Summary:
    """Summarise results that share their arms.

    Parameters
    ----------
    results
        Skipped ones are counted and left out.
    seed
        Of the bootstrap.
    """
    measured = [r for r in results if r.arms]
    by_value: dict[str, dict[str, list[ExampleResult]]] = defaultdict(lambda: defaultdict(list))
    for result in measured:
        for dimension, value in result.group.items():
            by_value[dimension][value].append(result)
    groups = {
        dimension: {
            value: _arms(values[value], seed, _GROUP_RESAMPLES) for value in sorted(values, key=_numbers_as_such)
        }
        for dimension, values in by_value.items()
        if dimension not in _CLUSTERS and 1 < len(values) <= _MOST_VALUES
    }
    return Summary(len(measured), len(results) - len(measured), _arms(measured, seed, 2000), groups)


def _numbers_as_such(value: str) -> tuple[float, str]:
    try:
        return float(value), value
    except ValueError:
        return math.inf, value


def _arms(results: Sequence[ExampleResult], seed: int, resamples: int) -> tuple[ArmSummary, ...]:
    if not results:
        return ()
    columns = list(zip(*(r.arms for r in results), strict=True))
    clusters = [next((f"{c} {r.group[c]}" for c in _CLUSTERS if c in r.group), r.digest) for r in results]
    return tuple(_summary(columns[0], column, results, clusters, seed, resamples) for column in columns)


def _summary(
    full: Sequence[ArmResult],
    arm: Sequence[ArmResult],
    results: Sequence[ExampleResult],
    clusters: Sequence[str],
    seed: int,
    resamples: int,
) -> ArmSummary:
    def values(name: str, column: Sequence[ArmResult] = arm) -> np.ndarray[Any, Any]:
        found = [getattr(r, name) for r in column]
        return np.array([math.nan if v is None else v for v in found], dtype=np.float64)

    def interval(data: np.ndarray[Any, Any]) -> Interval:
        return bootstrap_mean(data, clusters=clusters, resamples=resamples, seed=seed)

    right = values("score", full) >= RIGHT
    ttft, rows = values("ttft_s"), values("rows")
    return ArmSummary(
        policy=arm[0].policy,
        context=arm[0].context,
        examples=len(arm),
        score=interval(values("score")),
        score_change=interval(values("score") - values("score", full)),
        kl=interval(values("kl")),
        agreement=interval(values("agreement")),
        first_token=interval(values("first_token")),
        nll=interval(values("nll")),
        nll_change=interval(values("nll") - values("nll", full)),
        kept=wilson(int((values("score")[right] >= RIGHT).sum()), int(right.sum())),
        right=int(right.sum()),
        rows=float(rows.mean()),
        rows_share=float((rows / values("prompt")).mean()),
        recomputed=float(values("recomputed").mean()),
        ttft_s=float(np.median(ttft)),
        speedup=float(np.median(values("ttft_s", full) / ttft)),
        consistency=_consistency(arm, results),
        kv_dtype=arm[0].kv_dtype,
        kv_kl=interval(values("kv_kl")),
        kv_agreement=interval(values("kv_agreement")),
    )


def _consistency(arm: Sequence[ArmResult], results: Sequence[ExampleResult]) -> float | None:
    answers: dict[str, list[str]] = defaultdict(list)
    for one, result in zip(arm, results, strict=True):
        if "base" in result.group:
            answers[result.group["base"]].append(one.answer)
    shares = [Counter(a).most_common(1)[0][1] / len(a) for a in answers.values() if len(a) > 1]
    return statistics.mean(shares) if shares else None


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nan(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
