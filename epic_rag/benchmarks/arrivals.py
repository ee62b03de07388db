"""When requests arrive and what they ask for: seeded, so that every policy is given the same."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from epic_engine.errors import ConfigError

__all__ = ["poisson_arrivals", "weighted_sample", "zipf_weights"]


def poisson_arrivals(rate: float, count: int, rng: random.Random) -> list[float]:
    """Arrival times of a Poisson process, in seconds from its start.

    Parameters
    ----------
    rate
        Mean arrivals a second.
    count
        How many.
    rng
        Source of the gaps, which are exponential with mean ``1 / rate``.

    Raises
    ------
    ConfigError
        If the rate is not above 0.
    """
    if not (rate > 0 and math.isfinite(rate)):
        raise ConfigError(f"a rate of {rate:g} requests a second never ends: give a number above 0.")
    arrivals: list[float] = []
    moment = 0.0
    for _ in range(count):
        moment += rng.expovariate(rate)
        arrivals.append(moment)
    return arrivals


def zipf_weights(count: int, exponent: float) -> list[float]:
    """Popularity by rank, ``1 / rank**exponent``, of ``count`` things, summing to 1; exponent 0 is uniform.

    Raises
    ------
    ConfigError
        If the exponent is negative.
    """
    if not (exponent >= 0 and math.isfinite(exponent)):
        raise ConfigError(f"exponent={exponent:g} would make rare chunks popular: give 0 (uniform) or more.")
    weights = [rank**-exponent for rank in range(1, count + 1)]
    total = sum(weights)
    return [weight / total for weight in weights]


def weighted_sample(weights: Sequence[float], k: int, rng: random.Random) -> list[int]:
    """``k`` different indices, each drawn with a chance in proportion to its weight among those left, in random order.

    One exponential variate an index, divided by its weight; the smallest k win (Efraimidis and Spirakis, Weighted
    random sampling with a reservoir, 2006, algorithm A, in logarithms).

    Raises
    ------
    ConfigError
        If there are fewer than ``k``.
    """
    if k > len(weights):
        raise ConfigError(f"{k} different chunks cannot be drawn from {len(weights)}: ask for fewer, or load more.")
    keys = [rng.expovariate(1.0) / weight for weight in weights]
    chosen = sorted(range(len(weights)), key=keys.__getitem__)[:k]
    # Popular ones win with small keys: unshuffled, they would stand first in every prompt.
    rng.shuffle(chosen)
    return chosen
