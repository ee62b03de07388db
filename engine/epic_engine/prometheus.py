"""Engines' metrics for Prometheus; needs the ``metrics`` extra.

One collector serves all engines of a process, told apart by labels::

    collector = EngineCollector(first.metrics, engine="first")
    collector.add(second.metrics, engine="second")
    collector.register()

Everything is read from :class:`~epic_engine.metrics.Metrics` when Prometheus asks. Times are in seconds.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .errors import ConfigError
from .metrics import HistogramSnapshot, Metrics

try:
    from prometheus_client import REGISTRY, CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
except ImportError as error:
    raise ImportError(
        f"metrics for Prometheus need prometheus-client ({error}): pip install 'epic-rag[metrics]', or read "
        "Metrics.stats() instead.",
        name="prometheus_client",
    ) from error

__all__ = ["EngineCollector"]

# Family, the label that it adds to an engine's own (or None), help text.
_COUNTERS = (
    ("epic_requests_submitted_total", None, "Requests submitted, rejected ones included."),
    ("epic_requests_total", "outcome", "Requests that ended, by outcome."),
    ("epic_linked_requests_total", "reuse", "Ended requests that were linked, by kind of reuse."),
    ("epic_policy_requests_total", "policy", "Ended requests that were linked, by link policy."),
    ("epic_prompt_tokens_total", None, "Tokens of the prompts of ended requests."),
    ("epic_continued_tokens_total", None, "Prompt tokens whose KV is shared with the request that was continued."),
    ("epic_linked_tokens_total", None, "Prompt tokens covered by compiled chunks."),
    ("epic_recomputed_tokens_total", None, "Linked tokens that were computed anew."),
    ("epic_reused_tokens_total", None, "Linked tokens whose KV was taken as it is."),
    ("epic_generated_tokens_total", None, "Tokens of the answers of ended requests."),
    ("epic_link_rows_total", None, "Rows run through the model to link ended requests."),
    ("epic_computed_rows_total", "kind", "Rows of all steps, by what they were computed for."),
    ("epic_steps_total", None, "Forward passes of the model."),
    ("epic_preemptions_total", None, "Requests that gave their KV up to make room."),
)
# Family, name in Metrics, help text.
_HISTOGRAMS = (
    ("epic_time_to_first_token_seconds", "ttft", "From the call to the first token."),
    ("epic_time_per_output_token_seconds", "per_token", "A request's mean time of a token after the first."),
    ("epic_queue_wait_seconds", "queue_wait", "From submission to the first work on a request."),
    ("epic_link_seconds", "link", "Computing the rows that the policy chose."),
    ("epic_step_seconds", "step", "One forward pass of the model."),
    ("epic_rows_per_step", "rows_per_step", "Rows run through the model in one step."),
    ("epic_requests_per_step", "requests_per_step", "Requests that had rows in one step."),
)
_ACTIVE = ("epic_active_requests", "Requests that were submitted and have not ended.")
_QUEUE = ("epic_queue_requests", "Requests in the scheduler now, by state.")
_MEMORY = ("epic_memory_", "Memory of the engine now, by part: ")

_LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_OWN_LABELS = frozenset({"outcome", "reuse", "policy", "kind", "state", "part", "le"})


class EngineCollector:
    """Exports engines' metrics to a Prometheus registry.

    Counters are called ``epic_…_total``, histograms of times ``epic_…_seconds``. Gauges: ``epic_active_requests``,
    ``epic_queue_requests`` with label ``state``, and for each memory gauge ``epic_memory_<name>`` with label ``part``
    (``bytes`` nested as ``{"pool": {"free": 1}}`` has the part ``pool.free``); what is not a number is left out.

    Parameters
    ----------
    metrics
        Of the first engine.
    **labels
        What tells this engine from the others, for example ``engine="a"``; may be left out for a single engine.

    Raises
    ------
    ConfigError
        If a label's name is not allowed or used by the metrics themselves.
    """

    def __init__(self, metrics: Metrics, /, **labels: str) -> None:
        for name in labels:
            if not _LABEL_NAME.fullmatch(name) or name.startswith("__") or name in _OWN_LABELS:
                raise ConfigError(
                    f"label {name!r} cannot be used: take letters, digits and '_', not '__' in front, and none of "
                    f"{', '.join(sorted(_OWN_LABELS))}."
                )
        self._names = tuple(labels)
        self._lock = threading.Lock()
        self._engines: dict[tuple[str, ...], Metrics] = {}
        self.add(metrics, **labels)

    def add(self, metrics: Metrics, /, **labels: str) -> None:
        """Export another engine's metrics too.

        Raises
        ------
        ConfigError
            If the labels' names differ from the first engine's, or another engine has the same values.
        """
        values = self._values(labels)
        with self._lock:
            if values in self._engines:
                raise ConfigError(f"an engine with {_shown(labels)} is exported already: give this one another label.")
            self._engines[values] = metrics

    def remove(self, **labels: str) -> None:
        """Stop exporting an engine, for example because it was closed.

        Raises
        ------
        ConfigError
            If there is no engine with these labels.
        """
        values = self._values(labels)
        with self._lock:
            if values not in self._engines:
                raise ConfigError(
                    f"no engine with {_shown(labels)} is exported: use the labels that it was added with."
                )
            del self._engines[values]

    def register(self, registry: CollectorRegistry = REGISTRY) -> None:
        """Add this collector to a registry, by default the process's own.

        Raises
        ------
        ConfigError
            If the registry has metrics of these names already. A text page may name each only once, so a second
            engine joins the first one's collector: :meth:`add`.
        """
        try:
            registry.register(self)
        except ValueError as error:
            raise ConfigError(
                f"the registry already exports engine metrics ({error}). Call add(metrics, engine=...) on the "
                "collector that is registered there, or use another registry."
            ) from error

    def describe(self) -> Iterable[Metric]:
        """Families without values; the registry uses their names to refuse what is registered twice."""
        return self._families().values()

    def collect(self) -> Iterator[Metric]:
        """All families with what the engines say now."""
        with self._lock:
            engines = list(self._engines.items())
        families = self._families()
        for values, metrics in engines:
            now, gauges = metrics.snapshot(), metrics.gauges()
            counters: dict[str, int | Mapping[str, int]] = {
                "epic_requests_submitted_total": now.submitted,
                "epic_requests_total": now.outcomes,
                "epic_linked_requests_total": now.reuse,
                "epic_policy_requests_total": now.policies,
                "epic_link_rows_total": now.tokens["rows"],
                "epic_computed_rows_total": now.rows,
                "epic_steps_total": now.histograms["step"].count,
                "epic_preemptions_total": now.preemptions,
            }
            for kind in ("prompt", "continued", "linked", "recomputed", "reused", "generated"):
                counters[f"epic_{kind}_tokens_total"] = now.tokens[kind]
            for name, value in counters.items():
                if isinstance(value, Mapping):
                    for label, count in value.items():
                        families[name].add_metric([*values, label], count)
                else:
                    families[name].add_metric(values, value)
            for name, key, _ in _HISTOGRAMS:
                histogram = now.histograms[key]
                families[name].add_metric(values, _buckets(histogram), histogram.total)
            families[_ACTIVE[0]].add_metric(values, now.active)
            for state, number in _numbers(gauges["queue"]):
                families[_QUEUE[0]].add_metric([*values, state], number)
            for gauge, reading in gauges["memory"].items():
                name = _MEMORY[0] + gauge
                if name not in families:
                    families[name] = GaugeMetricFamily(name, f"{_MEMORY[1]}{gauge}.", labels=[*self._names, "part"])
                for part, number in _numbers(reading):
                    families[name].add_metric([*values, part], number)
        yield from families.values()

    def _families(self) -> dict[str, Any]:
        own = self._names
        families: dict[str, Any] = {}
        for name, label, text in _COUNTERS:
            families[name] = CounterMetricFamily(name, text, labels=own if label is None else (*own, label))
        for name, _, text in _HISTOGRAMS:
            families[name] = HistogramMetricFamily(name, text, labels=own)
        families[_ACTIVE[0]] = GaugeMetricFamily(*_ACTIVE, labels=own)
        families[_QUEUE[0]] = GaugeMetricFamily(*_QUEUE, labels=(*own, "state"))
        return families

    def _values(self, labels: Mapping[str, str]) -> tuple[str, ...]:
        if set(labels) != set(self._names):
            raise ConfigError(
                f"labels {_shown(labels)} do not fit: every engine of a collector needs values for exactly "
                f"{', '.join(self._names) or 'no labels; name one for the first engine too'}."
            )
        return tuple(str(labels[name]) for name in self._names)


def _shown(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in labels.items()) or "no labels"


def _buckets(histogram: HistogramSnapshot) -> list[tuple[str, float]]:
    ends = [*map(str, histogram.bounds), "+Inf"]
    return list(zip(ends, map(float, histogram.cumulative), strict=True))


def _numbers(reading: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Numbers of a nested dict with their dotted paths; the path of a bare number is empty."""
    if isinstance(reading, Mapping):
        for key, inner in reading.items():
            yield from _numbers(inner, f"{path}.{key}" if path else key)
    elif isinstance(reading, int | float):
        yield path, float(reading)
