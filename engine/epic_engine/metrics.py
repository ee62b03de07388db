"""What an engine counts and times while it serves: counters, histograms, windows for quantiles, gauges.

Everything is kept in plain Python under one lock, so that any thread may record. :mod:`epic_engine.prometheus`
exports the same numbers to Prometheus; nothing here needs it.
"""

from __future__ import annotations

import re
import threading
from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

from .errors import ConfigError

if TYPE_CHECKING:
    from .request import FinishReason, RequestStats

__all__ = [
    "HistogramSnapshot",
    "Metrics",
    "MetricsSnapshot",
    "quantile",
]

FailureKind = Literal["timeout", "failed", "rejected"]
GaugeSection = Literal["queue", "memory"]

_FINISH_REASONS = ("stop", "length", "cancelled", "timeout")
_FAILURE_KINDS = ("timeout", "failed", "rejected")
_REUSE_KINDS = ("exact", "composed", "none")
_TOKENS = ("prompt", "continued", "linked", "recomputed", "reused", "rows", "generated")
_ROWS = ("link", "decode", "other")

# Log-spaced, the same in every version: dashboards add buckets up over engines and over time.
_SECONDS = tuple(float(f"{digit}e{power}") for power in range(-4, 3) for digit in (1, 2, 5))
_ROWS_PER_STEP = tuple(float(1 << power) for power in range(15))
_REQUESTS_PER_STEP = tuple(float(1 << power) for power in range(11))

_WINDOW = 1024
_QUANTILES = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
# A policy's string may carry a number that differs from request to request; counters must not grow with it.
_MAX_POLICIES = 64
_OTHER_POLICY = "other"
_GAUGE_NAME = re.compile(r"[a-z][a-z0-9_]*")


def quantile(ordered: Sequence[float], fraction: float) -> float:
    """Quantile of sorted values, with linear interpolation between the two nearest.

    Parameters
    ----------
    ordered
        Values in ascending order; at least one.
    fraction
        In [0, 1]; 0.5 is the median.

    Source: Hyndman & Fan 1996, "Sample Quantiles in Statistical Packages", definition 7.
    """
    place = (len(ordered) - 1) * fraction
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True)
class HistogramSnapshot:
    """A histogram at one moment.

    Attributes
    ----------
    bounds
        Upper ends of the buckets, ascending; a value equal to a bound belongs to that bound's bucket.
    counts
        Observations of each bucket (not cumulative); one more than ``bounds``, for values above the last.
    total
        Sum of all observations.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """Mean of all observations; None without any."""
        return self.total / self.count if self.count else None

    @property
    def cumulative(self) -> tuple[int, ...]:
        """Observations at or below each bound; the last entry is :attr:`count`."""
        return tuple(accumulate(self.counts))


@dataclass(frozen=True)
class MetricsSnapshot:
    """All that was recorded up to one moment; the parts agree with each other.

    Attributes
    ----------
    submitted
        Requests submitted.
    outcomes
        Requests ended, by ``stop``, ``length``, ``cancelled``, ``timeout``, ``failed``, ``rejected``.
    reuse
        Linked requests ended, by reuse kind.
    policies
        Linked requests ended, by link policy.
    tokens
        Sums of the counts of :class:`~epic_engine.request.RequestStats`.
    preemptions
        Requests whose KV was given up to make room.
    rows
        Rows of all steps: ``link``, ``decode``, ``other``.
    histograms
        By name: ``ttft``, ``per_token``, ``queue_wait``, ``link``, ``step`` in seconds; ``rows_per_step``,
        ``requests_per_step``.
    windows
        The latest observations of ``ttft``, ``per_token`` and ``queue_wait``, in no particular order.
    """

    submitted: int
    outcomes: dict[str, int]
    reuse: dict[str, int]
    policies: dict[str, int]
    tokens: dict[str, int]
    preemptions: int
    rows: dict[str, int]
    histograms: dict[str, HistogramSnapshot]
    windows: dict[str, Sequence[float]]

    @property
    def active(self) -> int:
        """Requests that were submitted and have not ended."""
        return self.submitted - sum(self.outcomes.values())


class _Histogram:
    """Counts by bucket; the caller holds the lock."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._total)


class _Window:
    """The latest observations, in a ring; the caller holds the lock."""

    def __init__(self) -> None:
        self._values = array("d", bytes(8 * _WINDOW))
        self._seen = 0

    def observe(self, value: float) -> None:
        self._values[self._seen % _WINDOW] = value
        self._seen += 1

    def snapshot(self) -> Sequence[float]:
        return self._values[: min(self._seen, _WINDOW)]


class Metrics:
    """Counters, histograms and quantiles of one engine.

    Any thread may call any method. Recording takes a lock and a few additions. Call :meth:`request_submitted`
    once for every request, and exactly one of :meth:`request_finished` and :meth:`request_failed` when it ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._submitted = 0
        self._outcomes = dict.fromkeys((*_FINISH_REASONS, *_FAILURE_KINDS), 0)
        self._reuse = dict.fromkeys(_REUSE_KINDS, 0)
        self._policies: dict[str, int] = {}
        self._tokens = dict.fromkeys(_TOKENS, 0)
        self._preemptions = 0
        self._rows = dict.fromkeys(_ROWS, 0)
        self._histograms = {name: _Histogram(_SECONDS) for name in ("ttft", "per_token", "queue_wait", "link", "step")}
        self._histograms["rows_per_step"] = _Histogram(_ROWS_PER_STEP)
        self._histograms["requests_per_step"] = _Histogram(_REQUESTS_PER_STEP)
        self._windows = {name: _Window() for name in ("ttft", "per_token", "queue_wait")}
        self._gauges: dict[str, dict[str, Callable[[], Any]]] = {"queue": {}, "memory": {}}

    def request_submitted(self) -> None:
        """A request arrived; rejected ones count too."""
        with self._lock:
            self._submitted += 1

    def request_finished(self, stats: RequestStats, reason: FinishReason, queued_seconds: float | None) -> None:
        """A request ended with what there is of its answer.

        Tokens are added up, and times are observed where there are any: TTFT once a token came, time per token
        from the second one on. Reuse and policy count only if the request was linked (``stats.prompt`` above 0).

        Parameters
        ----------
        stats
            Its counts and times; read, not kept.
        reason
            ``stop``, ``length``, ``cancelled`` or ``timeout``.
        queued_seconds
            From submission to the first work on it; None if it never left the queue.

        Raises
        ------
        ConfigError
            If ``reason`` or ``stats.reuse`` is none of those that are counted; nothing is recorded then.
        """
        _check("reason", reason, _FINISH_REASONS)
        _check("stats.reuse", stats.reuse, _REUSE_KINDS)
        times, tokens = stats.times, self._tokens
        with self._lock:
            self._outcomes[reason] += 1
            if stats.prompt:
                self._reuse[stats.reuse] += 1
                known = stats.policy in self._policies or len(self._policies) < _MAX_POLICIES
                policy = stats.policy if known else _OTHER_POLICY
                self._policies[policy] = self._policies.get(policy, 0) + 1
            tokens["prompt"] += stats.prompt
            tokens["continued"] += stats.continued
            tokens["linked"] += stats.linked
            tokens["recomputed"] += stats.recomputed
            tokens["reused"] += stats.reused
            tokens["rows"] += stats.rows
            tokens["generated"] += stats.generated
            if times.link > 0:
                self._observe("link", times.link)
            if times.first_token > 0:
                self._observe("ttft", times.first_token)
            if stats.generated > 1:
                self._observe("per_token", times.per_token)
            if queued_seconds is not None:
                self._observe("queue_wait", queued_seconds)

    def request_failed(self, kind: FailureKind, queued_seconds: float | None = None) -> None:
        """A request ended without an answer.

        Parameters
        ----------
        kind
            ``rejected`` (never accepted), ``timeout`` (waited too long) or ``failed`` (an error while it was served).
        queued_seconds
            From submission to the first work on it; None if it never left the queue.

        Raises
        ------
        ConfigError
            If ``kind`` is none of these.
        """
        _check("kind", kind, _FAILURE_KINDS)
        with self._lock:
            self._outcomes[kind] += 1
            if queued_seconds is not None:
                self._observe("queue_wait", queued_seconds)

    def step(self, seconds: float, link_rows: int, decode_rows: int, requests: int, other_rows: int = 0) -> None:
        """One forward pass of the model.

        Parameters
        ----------
        seconds
            How long it took.
        link_rows, decode_rows, other_rows
            Rows (tokens) run through the model to link prompts, to generate, and for anything else, such as the
            first passes of selective policies.
        requests
            Requests that had rows in it.
        """
        with self._lock:
            self._rows["link"] += link_rows
            self._rows["decode"] += decode_rows
            self._rows["other"] += other_rows
            self._observe("step", seconds)
            self._observe("rows_per_step", link_rows + decode_rows + other_rows)
            self._observe("requests_per_step", requests)

    def preempted(self) -> None:
        """A running request gave its KV up to make room for others."""
        with self._lock:
            self._preemptions += 1

    def register_gauge(self, section: GaugeSection, name: str, read: Callable[[], Any]) -> None:
        """Report a number that its owner knows; it is read whenever somebody asks.

        Parameters
        ----------
        section
            ``queue`` (requests by state) or ``memory`` (pages, bytes and the like).
        name
            Lower-case letters, digits and ``_``: ``waiting``, ``running``, ``linking``; ``pages``, ``bytes``.
        read
            Returns a number, or a dict of them, nested if need be. It may take locks of its own: none is held here
            when it is called. It is kept as long as this object, with all that it refers to.

        Raises
        ------
        ConfigError
            If the name cannot be used or is taken.
        """
        _check("section", section, tuple(self._gauges))
        if not _GAUGE_NAME.fullmatch(name):
            raise ConfigError(
                f"gauge name {name!r} cannot be used: use lower-case letters, digits and '_', as in 'pages'."
            )
        with self._lock:
            if name in self._gauges[section]:
                raise ConfigError(f"the gauge {section}.{name} is registered already: pick another name.")
            self._gauges[section][name] = read

    def gauges(self) -> dict[str, dict[str, Any]]:
        """What the registered gauges say now: ``{"queue": {name: value}, "memory": {name: value}}``."""
        with self._lock:
            readers = {section: dict(named) for section, named in self._gauges.items()}
        # Without the lock: an owner that records while it holds its own would wait for us, and we for it.
        return {section: {name: _plain(read()) for name, read in named.items()} for section, named in readers.items()}

    def snapshot(self) -> MetricsSnapshot:
        """A copy of all that was recorded, taken at one moment."""
        with self._lock:
            return MetricsSnapshot(
                submitted=self._submitted,
                outcomes=dict(self._outcomes),
                reuse=dict(self._reuse),
                policies=dict(self._policies),
                tokens=dict(self._tokens),
                preemptions=self._preemptions,
                rows=dict(self._rows),
                histograms={name: histogram.snapshot() for name, histogram in self._histograms.items()},
                windows={name: window.snapshot() for name, window in self._windows.items()},
            )

    def stats(self) -> dict[str, Any]:
        """Everything in one nested dict that ``json.dumps`` takes.

        Counts and means cover the engine's whole life; quantiles are exact over the latest 1,024 observations.
        Quantiles and means are None as long as nothing was observed.

        Returns
        -------
        dict
            ``requests``
                ``submitted``; ``active`` (submitted and not ended); ``outcomes``: ended requests by ``stop``,
                ``length``, ``cancelled``, ``timeout``, ``failed``, ``rejected``; ``reuse``: ended requests that were
                linked, by ``exact``, ``composed``, ``none``; ``policies``: the same by policy (the 65th and later
                policies count as ``other``).
            ``tokens``
                Sums over ended requests: ``prompt``; ``continued`` (of these, shared with the request continued);
                ``linked`` (of the others, covered by compiled chunks); ``recomputed`` (of the linked); ``reused``
                (``linked - recomputed``); ``rows`` (run through the model to link); ``generated``.
            ``latency``
                Seconds. ``ttft`` (from the call to the first token), ``per_token`` (a request's mean after the
                first token, once a request) and ``queue_wait`` (from submission to the first work): each ``p50``,
                ``p95``, ``p99``, ``count``, ``mean``. ``link`` (computing the chosen rows): ``count``, ``mean``.
            ``steps``
                ``count``; ``preemptions``; ``rows``: rows of all steps by ``link``, ``decode``, ``other``; means of
                ``seconds_per_step``, ``rows_per_step``, ``requests_per_step``.
            ``queue``, ``memory``
                The gauges that were registered, by name.
        """
        now, gauges = self.snapshot(), self.gauges()
        latency: dict[str, dict[str, Any]] = {}
        for name in ("ttft", "per_token", "queue_wait", "link"):
            ordered = sorted(now.windows.get(name, ()))
            latency[name] = {
                **{
                    label: quantile(ordered, at) if ordered else None for label, at in _QUANTILES if name in now.windows
                },
                "count": now.histograms[name].count,
                "mean": now.histograms[name].mean,
            }
        return {
            "requests": {
                "submitted": now.submitted,
                "active": now.active,
                "outcomes": now.outcomes,
                "reuse": now.reuse,
                "policies": now.policies,
            },
            "tokens": now.tokens,
            "latency": latency,
            "steps": {
                "count": now.histograms["step"].count,
                "preemptions": now.preemptions,
                "rows": now.rows,
                "seconds_per_step": now.histograms["step"].mean,
                "rows_per_step": now.histograms["rows_per_step"].mean,
                "requests_per_step": now.histograms["requests_per_step"].mean,
            },
            **gauges,
        }

    def _observe(self, name: str, value: float) -> None:
        """Add to the histogram, and to the window if there is one; the caller holds the lock."""
        self._histograms[name].observe(value)
        if name in self._windows:
            self._windows[name].observe(value)


def _check(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{what}={value!r} is not counted: use one of {', '.join(known)}.")


def _plain(value: Any) -> Any:
    """Mappings as new dicts with string keys, so that nobody's live state leaves through a gauge."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return value
