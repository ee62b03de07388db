"""Metrics: counts that add up from any thread, exact quantiles, and what Prometheus reads back."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from epic_engine import ConfigError
from epic_engine.metrics import Metrics, quantile
from epic_engine.prometheus import EngineCollector
from epic_engine.request import RequestStats, StageTimes
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

WINDOW = 1024
SECONDS = st.floats(0, 1e4, allow_nan=False)


def _request(prompt: int = 100, reuse: Any = "composed", policy: str = "legolink:16", **times: float) -> RequestStats:
    return RequestStats(
        prompt=prompt,
        continued=10,
        linked=80,
        recomputed=32,
        rows=52,
        generated=5,
        reuse=reuse,
        policy=policy,
        times=StageTimes(**{"link": 0.3, "first_token": 0.5, "per_token": 0.02, "total": 0.6, **times}),
    )


def _busy() -> Metrics:
    """One of everything."""
    metrics = Metrics()
    for _ in range(8):
        metrics.request_submitted()
    metrics.request_finished(_request(), "stop", 0.1)
    metrics.request_finished(_request(reuse="exact", policy="full"), "length", 0.2)
    metrics.request_finished(_request(first_token=0.04, link=0.0002), "timeout", 7.5)
    metrics.request_finished(RequestStats(policy="full"), "cancelled", None)
    metrics.request_failed("failed", 0.3)
    metrics.request_failed("rejected")
    metrics.step(0.25, link_rows=100, decode_rows=3, requests=4)
    metrics.step(0.01, link_rows=0, decode_rows=3, requests=3, other_rows=9)
    metrics.preempted()
    metrics.register_gauge("queue", "waiting", lambda: 2)
    metrics.register_gauge("queue", "running", lambda: 1)
    metrics.register_gauge("memory", "pages", lambda: {"free": 10, "used": 6})
    metrics.register_gauge("memory", "bytes", lambda: {"pool": {"slabs": 4096, "kind": "cpu"}, "mapped": 512})
    return metrics


def test_stats_counts_what_happened_and_fits_json() -> None:
    stats = _busy().stats()
    assert json.loads(json.dumps(stats, allow_nan=False)) == stats
    assert stats["requests"] == {
        "submitted": 8,
        "active": 2,
        "outcomes": {"stop": 1, "length": 1, "cancelled": 1, "timeout": 1, "failed": 1, "rejected": 1},
        # The cancelled one was never linked.
        "reuse": {"exact": 1, "composed": 2, "none": 0},
        "policies": {"legolink:16": 2, "full": 1},
    }
    assert stats["tokens"] == {
        "prompt": 300,
        "continued": 30,
        "linked": 240,
        "recomputed": 96,
        "reused": 144,
        "rows": 156,
        "generated": 15,
    }
    assert stats["steps"] == {
        "count": 2,
        "preemptions": 1,
        "rows": {"link": 100, "decode": 6, "other": 9},
        "seconds_per_step": pytest.approx(0.13),
        "rows_per_step": 57.5,
        "requests_per_step": 3.5,
    }
    assert stats["queue"] == {"waiting": 2, "running": 1}
    assert stats["memory"] == {
        "pages": {"free": 10, "used": 6},
        "bytes": {"pool": {"slabs": 4096, "kind": "cpu"}, "mapped": 512},
    }
    latency = stats["latency"]
    assert {name: part["count"] for name, part in latency.items()} == {
        "ttft": 3,
        "per_token": 3,
        "queue_wait": 4,
        "link": 3,
    }
    assert latency["queue_wait"]["mean"] == pytest.approx((0.1 + 0.2 + 7.5 + 0.3) / 4)


def test_nothing_observed_is_none_and_not_zero() -> None:
    metrics = Metrics()
    # One token: there is a first token, and no time per further token.
    metrics.request_finished(RequestStats(prompt=5, generated=1, times=StageTimes(first_token=0.5)), "stop", None)
    latency = metrics.stats()["latency"]
    assert latency["per_token"] == {"p50": None, "p95": None, "p99": None, "count": 0, "mean": None}
    assert latency["link"] == {"count": 0, "mean": None}
    assert latency["ttft"] == {"p50": 0.5, "p95": 0.5, "p99": 0.5, "count": 1, "mean": 0.5}
    assert latency["queue_wait"]["count"] == 0
    # Served at once is a wait of 0, not the lack of one.
    metrics.request_finished(_request(), "stop", 0.0)
    assert metrics.stats()["latency"]["queue_wait"] == {"p50": 0.0, "p95": 0.0, "p99": 0.0, "count": 1, "mean": 0.0}


@given(st.lists(SECONDS, min_size=1, max_size=200), st.floats(0, 1))
def test_quantile_is_numpys(values: list[float], fraction: float) -> None:
    assert quantile(sorted(values), fraction) == pytest.approx(
        float(np.quantile(values, fraction)), rel=1e-9, abs=1e-12
    )


@pytest.mark.parametrize("count", [1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 7])
def test_quantiles_are_exact_over_the_window(count: int) -> None:
    rng = np.random.default_rng(count)
    metrics = Metrics()
    drawn = {name: rng.lognormal(size=count) for name in ("ttft", "per_token", "queue_wait")}
    for first, per, wait in zip(*(map(float, values) for values in drawn.values()), strict=True):
        metrics.request_finished(_request(first_token=first, per_token=per), "stop", wait)
    for name, values in drawn.items():
        told = metrics.stats()["latency"][name]
        expected = np.quantile(values[-WINDOW:], [0.5, 0.95, 0.99])
        assert [told["p50"], told["p95"], told["p99"]] == pytest.approx(expected.tolist())
        assert told["count"] == count
        assert told["mean"] == pytest.approx(values.mean())


@given(st.lists(st.tuples(SECONDS, st.integers(0, 40_000), st.integers(0, 3000)), max_size=60))
def test_histograms_put_every_value_into_its_bucket(steps: list[tuple[float, int, int]]) -> None:
    metrics = Metrics()
    bounds = metrics.snapshot().histograms["step"].bounds
    # Values on a bound belong below it.
    steps = [*steps, *((bound, 16, 4) for bound in bounds[:3])]
    for seconds, rows, requests in steps:
        metrics.step(seconds, link_rows=rows, decode_rows=0, requests=requests)
    histograms = metrics.snapshot().histograms
    for place, name in enumerate(("step", "rows_per_step", "requests_per_step")):
        values, histogram = [step[place] for step in steps], histograms[name]
        assert list(histogram.bounds) == sorted(set(histogram.bounds))
        assert histogram.cumulative[:-1] == tuple(sum(v <= bound for v in values) for bound in histogram.bounds)
        assert sum(histogram.counts) == histogram.cumulative[-1] == histogram.count == len(values)
        assert histogram.total == pytest.approx(math.fsum(values))


@pytest.fixture
def many_switches() -> Iterator[None]:
    """Threads change places as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("many_switches")
def test_threads_lose_nothing_and_never_see_half_of_a_record() -> None:
    metrics, threads, rounds = Metrics(), 6, 400
    writing = threading.Event()
    writing.set()
    torn: list[Any] = []

    def write() -> None:
        for turn in range(rounds):
            metrics.request_submitted()
            metrics.step(0.001, link_rows=7, decode_rows=2, requests=3, other_rows=1)
            metrics.preempted()
            if turn % 4:
                metrics.request_finished(_request(policy=f"p{turn % 3}"), "stop", 0.1)
            else:
                metrics.request_failed("failed", 0.1)

    def read() -> None:
        while writing.is_set():
            now = metrics.snapshot()
            rows, ended = now.histograms["rows_per_step"], sum(now.outcomes.values())
            if not (
                sum(now.rows.values()) == rows.total == 10 * rows.count
                and now.histograms["step"].count == now.histograms["requests_per_step"].count == rows.count
                and now.histograms["queue_wait"].count == ended
                and now.tokens["prompt"] == 100 * now.outcomes["stop"]
            ):
                torn.append(now)

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write) for _ in range(threads)]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    writing.clear()
    reader.join()
    assert not torn
    stats, total = metrics.stats(), threads * rounds
    stopped = total - threads * len(range(0, rounds, 4))
    assert stats["requests"]["submitted"] == stats["steps"]["count"] == stats["steps"]["preemptions"] == total
    assert stats["requests"]["active"] == 0
    assert stats["requests"]["outcomes"]["stop"] == sum(stats["requests"]["policies"].values()) == stopped
    assert stats["steps"]["rows"] == {"link": 7 * total, "decode": 2 * total, "other": total}
    assert stats["latency"]["queue_wait"]["count"] == total
    assert stats["latency"]["ttft"]["count"] == stopped


@pytest.mark.timeout(30)
def test_a_gauge_may_use_the_metrics_and_keeps_its_own_state() -> None:
    metrics, live = Metrics(), {"free": {3: 1}}

    def read() -> Any:
        metrics.preempted()
        return live

    metrics.register_gauge("memory", "pages", read)
    told = metrics.stats()["memory"]["pages"]
    assert told == {"free": {"3": 1}}
    told["free"]["3"] = 5
    assert live == {"free": {3: 1}}


def test_policies_that_differ_in_each_request_do_not_pile_up() -> None:
    metrics = Metrics()
    for number in range(1000):
        metrics.request_finished(_request(policy=f"query_aware:{number / 1000}"), "stop", None)
    metrics.request_finished(_request(policy="query_aware:0.0"), "stop", None)
    policies = metrics.stats()["requests"]["policies"]
    assert len(policies) == 65
    assert sum(policies.values()) == 1001
    assert policies["query_aware:0.0"] == 2
    assert policies["other"] == 1000 - 64


def test_what_is_not_counted_is_refused_and_leaves_no_trace() -> None:
    metrics = Metrics()
    before = metrics.stats()
    with pytest.raises(ConfigError, match=r"reason='eos'.*stop, length"):
        metrics.request_finished(_request(), "eos", 0.1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"reuse='some'"):
        metrics.request_finished(_request(reuse="some"), "stop", 0.1)
    with pytest.raises(ConfigError, match=r"kind='stop'.*rejected"):
        metrics.request_failed("stop", 0.1)  # type: ignore[arg-type]
    for name in ("Pages", "", "a-b"):
        with pytest.raises(ConfigError, match="gauge name"):
            metrics.register_gauge("memory", name, dict)
    with pytest.raises(ConfigError, match=r"section='disk'.*queue, memory"):
        metrics.register_gauge("disk", "pages", dict)  # type: ignore[arg-type]
    assert metrics.stats() == before
    metrics.register_gauge("memory", "pages", dict)
    with pytest.raises(ConfigError, match=r"memory\.pages is registered already"):
        metrics.register_gauge("memory", "pages", dict)


Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def _scrape(registry: CollectorRegistry) -> Samples:
    """What the library's two parsers read; the OpenMetrics one also refuses a page that breaks the rules."""

    def samples(families: Any) -> Samples:
        read = [(s.name, frozenset(s.labels.items()), s.value) for family in families for s in family.samples]
        told = {(name, labels): value for name, labels, value in read}
        assert len(told) == len(read)
        return told

    text = generate_latest(registry).decode()
    types = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    plain = samples(parse_text(text))
    assert plain == samples(parse_openmetrics(generate_openmetrics(registry).decode()))
    return plain


def _key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


def test_prometheus_reads_the_same_numbers() -> None:
    metrics, registry = _busy(), CollectorRegistry()
    EngineCollector(metrics).register(registry)
    told, stats = _scrape(registry), metrics.stats()
    counted: dict[str, Any] = {
        "epic_requests_submitted_total": 8,
        "epic_active_requests": 2,
        "epic_steps_total": 2,
        "epic_preemptions_total": 1,
        "epic_link_rows_total": stats["tokens"]["rows"],
    }
    counted |= {f"epic_{kind}_tokens_total": n for kind, n in stats["tokens"].items() if kind != "rows"}
    expected = {_key(name): value for name, value in counted.items()}
    for name, label, values in (
        ("epic_requests_total", "outcome", stats["requests"]["outcomes"]),
        ("epic_linked_requests_total", "reuse", stats["requests"]["reuse"]),
        ("epic_policy_requests_total", "policy", stats["requests"]["policies"]),
        ("epic_computed_rows_total", "kind", stats["steps"]["rows"]),
        ("epic_queue_requests", "state", stats["queue"]),
        ("epic_memory_pages", "part", stats["memory"]["pages"]),
        ("epic_memory_bytes", "part", {"pool.slabs": 4096, "mapped": 512}),
    ):
        expected |= {_key(name, **{label: kind}): value for kind, value in values.items()}
    for name, key in (
        ("epic_time_to_first_token_seconds", "ttft"),
        ("epic_time_per_output_token_seconds", "per_token"),
        ("epic_queue_wait_seconds", "queue_wait"),
        ("epic_link_seconds", "link"),
        ("epic_step_seconds", "step"),
        ("epic_rows_per_step", "rows_per_step"),
        ("epic_requests_per_step", "requests_per_step"),
    ):
        histogram = metrics.snapshot().histograms[key]
        expected[_key(f"{name}_count")] = histogram.count
        expected[_key(f"{name}_sum")] = histogram.total
        running = 0
        for bound, count in zip((*histogram.bounds, math.inf), histogram.counts, strict=True):
            running += count
            expected[_key(f"{name}_bucket", le="+Inf" if bound == math.inf else str(bound))] = running
    assert told == expected


def test_engines_of_one_process_are_told_apart_by_labels() -> None:
    first, second, registry = _busy(), Metrics(), CollectorRegistry()
    second.request_submitted()
    second.register_gauge("memory", "pages", lambda: {"free": 3})
    collector = EngineCollector(first, engine="a", model='odd "name"\n')
    collector.add(second, model="b", engine="b")
    collector.register(registry)
    told = _scrape(registry)
    assert told[_key("epic_requests_submitted_total", engine="a", model='odd "name"\n')] == 8
    assert told[_key("epic_requests_submitted_total", engine="b", model="b")] == 1
    assert told[_key("epic_memory_pages", engine="a", model='odd "name"\n', part="free")] == 10
    assert told[_key("epic_memory_pages", engine="b", model="b", part="free")] == 3
    assert told[_key("epic_requests_total", engine="b", model="b", outcome="stop")] == 0
    collector.remove(engine="a", model='odd "name"\n')
    left = _scrape(registry)
    assert left == {key: value for key, value in told.items() if ("engine", "b") in key[1]}


def test_a_second_registration_is_refused_by_name() -> None:
    registry = CollectorRegistry()
    collector = EngineCollector(Metrics(), engine="a")
    collector.register(registry)
    with pytest.raises(ConfigError, match=r"epic_requests_total.*add\(metrics"):
        collector.register(registry)
    other = EngineCollector(Metrics(), engine="b")
    with pytest.raises(ConfigError, match="epic_requests_total"):
        other.register(registry)
    with pytest.raises(ValueError, match="epic_requests_total"):
        registry.register(other)
    registry.unregister(collector)
    other.register(registry)
    assert _key("epic_steps_total", engine="b") in _scrape(registry)


def test_labels_that_cannot_tell_engines_apart_are_refused() -> None:
    collector = EngineCollector(Metrics(), engine="a")
    with pytest.raises(ConfigError, match="engine='a' is exported already"):
        collector.add(Metrics(), engine="a")
    with pytest.raises(ConfigError, match="exactly engine"):
        collector.add(Metrics(), model="a")
    with pytest.raises(ConfigError, match="no engine with engine='z'"):
        collector.remove(engine="z")
    with pytest.raises(ConfigError, match="name one for the first engine too"):
        EngineCollector(Metrics()).add(Metrics(), engine="b")
    for name in ("le", "policy", "__a", "a-b"):
        with pytest.raises(ConfigError, match="cannot be used"):
            EngineCollector(Metrics(), **{name: "x"})


def test_metrics_need_neither_torch_nor_prometheus_and_the_collector_names_its_extra() -> None:
    code = (
        "import sys\n"
        "sys.modules['prometheus_client'] = None\n"
        "import epic_engine.metrics\n"
        "assert 'torch' not in sys.modules\n"
        "import epic_engine.prometheus\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'epic-rag[metrics]'" in done.stderr.splitlines()[-1]
