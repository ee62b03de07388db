"""From what clients saw to figures. No clocks and no engine here."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from epic_rag.benchmarks.serve_clients import Outcome

__all__ = [
    "QUANTILES",
    "closed_figures",
    "counts",
    "decode_rate",
    "load_figures",
    "median_ratio",
    "quantiles",
    "ratios_to",
]

QUANTILES = (50, 95, 99)


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """``p50``, ``p95`` and ``p99``, interpolated linearly; empty without values."""
    if not values:
        return {}
    return {f"p{q}": float(v) for q, v in zip(QUANTILES, np.percentile(values, QUANTILES), strict=True)}


def median_ratio(values: Sequence[float], bases: Sequence[float]) -> float | None:
    """Median of the ratios pair by pair, so that a machine that slows down meanwhile does not count; None without."""
    ratios = [value / base for value, base in zip(values, bases, strict=True) if base]
    return statistics.median(ratios) if ratios else None


def counts(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """How requests ended, and the first error."""
    found: dict[str, Any] = {
        state: sum(o.state == state for o in outcomes) for state in ("done", "refused", "failed", "cancelled")
    }
    error = next((o.error for o in outcomes if o.error), None)
    return found if error is None else {**found, "error": error}


def load_figures(outcomes: Sequence[Outcome], begin: float) -> dict[str, Any]:
    """Figures of requests that were sent at given times.

    Parameters
    ----------
    outcomes
        At least one, by the time when they were due.
    begin
        When the clock of the arrivals started.

    Returns
    -------
    dict
        ``offered_rps`` and ``reached_rps`` (requests a second, up to the last arrival and to the last token),
        ``output_tokens_s``, ``ttft_s`` (from when a request was due: queueing counts) and ``per_token_s`` as
        quantiles, ``prompt_tokens`` (mean), ``linked_share`` and ``reused_share`` of the prompts' tokens,
        ``peak_bytes`` (private and chunks' together, the most at any first token) and the counts. Figures without
        data are None or empty.
    """
    done = [o for o in outcomes if o.state == "done"]
    span = max((o.times[-1] for o in done), default=begin) - begin
    prompt = sum(o.prompt for o in done)
    held = [o.held_bytes for o in outcomes if o.held_bytes is not None]
    return {
        "offered_rps": len(outcomes) / (outcomes[-1].due - begin),
        "reached_rps": len(done) / span if span else 0.0,
        "output_tokens_s": sum(len(o.times) for o in done) / span if span else 0.0,
        "ttft_s": quantiles([o.ttft for o in done]),
        "per_token_s": quantiles([t for o in done if (t := o.per_token) is not None]),
        "prompt_tokens": prompt / len(done) if done else None,
        "linked_share": sum(o.linked for o in done) / prompt if prompt else None,
        "reused_share": sum(o.reused for o in done) / prompt if prompt else None,
        "peak_bytes": max(held, default=None),
        **counts(outcomes),
    }


def closed_figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Requests and tokens a second of clients that never pause, from the first request to the last token."""
    done = [o for o in outcomes if o.state == "done"]
    span = max(o.times[-1] for o in done) - min(o.due for o in done) if done else 0.0
    return {
        "rps": len(done) / span if span else 0.0,
        "output_tokens_s": sum(len(o.times) for o in done) / span if span else 0.0,
        **counts(outcomes),
    }


def decode_rate(outcomes: Sequence[Outcome]) -> tuple[float, bool]:
    """Tokens a second while requests decode, first tokens left out, and whether they decoded together.

    Counted from the moment at which the last of them has its first token up to the first one's end, when all are
    decoding. An engine that serves them one after another leaves no such time; then it is all tokens over all time
    in which any of them was decoding.
    """
    done = [o for o in outcomes if o.state == "done" and len(o.times) > 1]
    if not done:
        return 0.0, False
    start, stop = max(o.times[0] for o in done), min(o.times[-1] for o in done)
    inside = sum(start < t <= stop for o in done for t in o.times)
    # Two tokens each at least: a shorter time says more about where it was cut than about the speed.
    if inside >= 2 * len(done):
        return inside / (stop - start), True
    busy, until = 0.0, float("-inf")
    for o in sorted(done, key=lambda o: o.times[0]):
        busy += max(0.0, o.times[-1] - max(until, o.times[0]))
        until = max(until, o.times[-1])
    tokens = sum(len(o.times) - 1 for o in done)
    return (tokens / busy if busy else 0.0), False


def ratios_to(bases: Sequence[str], rounds: Mapping[str, Sequence[float]], policy: str) -> dict[str, float | None]:
    """``vs_NAME`` for each base that was measured: the median over rounds of a policy's figure over the base's."""
    return {f"vs_{base}": median_ratio(rounds[policy], rounds[base]) for base in bases if base in rounds}
