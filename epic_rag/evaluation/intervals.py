"""Confidence intervals: how far could a figure be off because of which examples were drawn?"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["Interval", "bootstrap_difference", "bootstrap_mean", "wilson"]

_NORMAL_975 = 1.959963984540054
# Resamples drawn at a time; bounds memory to a few MiB whatever the number of examples.
_BLOCK_CELLS = 1 << 20


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % confidence interval; all NaN where there was nothing to estimate."""

    mean: float
    low: float
    high: float


def bootstrap_mean(
    values: ArrayLike,
    *,
    clusters: Sequence[Hashable] | None = None,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap of a mean (Efron and Tibshirani 1993, chapter 13).

    Parameters
    ----------
    values
        One value an example, ``(n,)``; NaN is left out.
    clusters
        Examples of equal cluster are drawn together, for they are variations of one; None: each by itself.
    resamples
        Number of resamples.
    seed
        Of the draws: same seed, same interval.
    """
    data = np.asarray(values, dtype=np.float64)
    keep = ~np.isnan(data)
    labels = range(len(data)) if clusters is None else clusters
    numbers: dict[Hashable, int] = {}
    index = np.array([numbers.setdefault(c, len(numbers)) for c, k in zip(labels, keep, strict=True) if k], int)
    data = data[keep]
    if not len(data):
        return Interval(math.nan, math.nan, math.nan)
    sums, counts = np.bincount(index, weights=data), np.bincount(index)
    rng = np.random.default_rng(seed)
    block = max(1, _BLOCK_CELLS // len(sums))
    means = []
    for start in range(0, resamples, block):
        draw = rng.integers(0, len(sums), (min(block, resamples - start), len(sums)))
        means.append(sums[draw].sum(axis=1) / counts[draw].sum(axis=1))
    low, high = np.percentile(np.concatenate(means), (2.5, 97.5))
    return Interval(float(data.mean()), float(low), float(high))


def bootstrap_difference(
    first: ArrayLike,
    second: ArrayLike,
    *,
    clusters: Sequence[Hashable] | None = None,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Paired bootstrap of ``mean(first − second)``: both values of an example are drawn together."""
    difference = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    return bootstrap_mean(difference, clusters=clusters, resamples=resamples, seed=seed)


def wilson(successes: int, trials: int) -> Interval:
    """Share of successes with Wilson's score interval (Wilson 1927); honest at 0 and at all of few trials."""
    if not trials:
        return Interval(math.nan, math.nan, math.nan)
    share, z2 = successes / trials, _NORMAL_975**2
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = _NORMAL_975 / (1 + z2 / trials) * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials**2))
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half))
