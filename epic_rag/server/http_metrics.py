"""Counts and times of HTTP requests, by route and status."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

__all__ = ["HttpMetrics", "metrics_page"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_METHODS = frozenset({"GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS"})


class HttpMetrics:
    """Counts requests; also a collector for Prometheus. Any number of threads may use one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str, str], int] = {}
        self._times: dict[str, tuple[list[int], float]] = {}

    def observe(self, scope: Any, status: int, seconds: float) -> None:
        """Count a request that has ended.

        Parameters
        ----------
        scope
            Of the request; its route is the template of its path, so that what clients ask for makes no new series.
        status
            Of the response; 0 if there was none, which counts as 499.
        seconds
            From the first byte of the request to the last of the response.
        """
        route = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        key = (method, route, str(status or 499))
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + 1
            buckets, total = self._times.get(route, ([0] * (len(_SECONDS) + 1), 0.0))
            buckets[bisect_left(_SECONDS, seconds)] += 1
            self._times[route] = buckets, total + seconds

    def collect(self) -> Iterator[Any]:
        """The families, for ``prometheus_client``."""
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        requests = CounterMetricFamily(
            "epic_http_requests_total", "HTTP requests that ended.", labels=("method", "route", "status")
        )
        times = HistogramMetricFamily(
            "epic_http_request_seconds", "From a request to the end of its response.", labels=("route",)
        )
        with self._lock:
            for labels, count in self._counts.items():
                requests.add_metric(labels, count)
            for route, (buckets, total) in self._times.items():
                ends = [*map(str, _SECONDS), "+Inf"]
                sums = [float(sum(buckets[: i + 1])) for i in range(len(buckets))]
                times.add_metric((route,), list(zip(ends, sums, strict=True)), total)
        yield from (requests, times)


def metrics_page(*collectors: Any) -> tuple[bytes, str]:
    """All that the collectors say now, in Prometheus's text format, and its content type.

    Raises
    ------
    ImportError
        If prometheus-client is not installed.
    """
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry.register(collector)
    return generate_latest(registry), CONTENT_TYPE_LATEST
