"""``bench serve``: its draws against exact expectations, its figures against a server in virtual time."""

from __future__ import annotations

import io
import itertools
import json
import random
import statistics
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from epic_engine import ChunkKey, Engine
from epic_engine.errors import ConfigError
from rich.console import Console

from epic_rag.benchmarks.arrivals import poisson_arrivals, weighted_sample, zipf_weights
from epic_rag.benchmarks.serve import ServeSettings, bench_serve
from epic_rag.benchmarks.serve_clients import Clients, Outcome, engine_memory
from epic_rag.benchmarks.serve_corpus import Chunk, Corpus, Request, compile_corpus
from epic_rag.benchmarks.serve_figures import closed_figures, decode_rate, load_figures, median_ratio, quantiles
from epic_rag.benchmarks.serve_plot import draw_serve
from epic_rag.console import serve_tables
from epic_rag.evaluation.datasets import load
from tests.rag.conftest import Run
from tests.rag.stack import model, tokenizer
from tests.rag.virtual_time import FakeEngine, VirtualTime

HELD = {"private_bytes": 30, "chunk_bytes": 70, "peak_bytes": 100, "budget_bytes": 1000}


def corpus(chunks: int = 40, tokens: int = 20, max_model_len: int = 4096) -> Corpus:
    rng = random.Random(5)

    def chunk(number: int) -> Chunk:
        ids = tuple(rng.randrange(1000) for _ in range(tokens + number % 5))
        return Chunk(ChunkKey.of("fake", "default", "isolated", ids), ids)

    return Corpus(chunk(0), tuple(map(chunk, range(chunks))), ((1, 2, 3), (4, 5, 6, 7)), max_model_len)


def settings(**changes: Any) -> ServeSettings:
    small = {"policies": ("full", "legolink:4"), "rates": (1.0,), "requests": 12, "k": 3, "rounds": 2, "concurrency": 3}
    return ServeSettings(**{**small, **changes})


def measure(engine: FakeEngine, chosen: ServeSettings, **options: Any) -> dict[str, Any]:
    options = {"read_memory": lambda _: HELD, "timeline": engine.timeline, **options}
    return bench_serve(engine, corpus(), chosen, **options)  # type: ignore[arg-type]


# -- draws -------------------------------------------------------------------------------------------------------


def test_arrivals_are_poisson() -> None:
    arrivals = poisson_arrivals(4.0, 20_000, random.Random(1))
    gaps = [b - a for a, b in itertools.pairwise([0.0, *arrivals])]
    assert min(gaps) > 0
    # Mean and standard deviation of exponential gaps are both 1/rate; the mean's own error is 1/(rate √n).
    assert statistics.mean(gaps) == pytest.approx(0.25, abs=4 * 0.25 / 20_000**0.5)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.05)
    # Arrivals a second: the variance of a Poisson count is its mean.
    counted = Counter(int(a) for a in arrivals)
    per_second = [counted[s] for s in range(int(arrivals[-1]))]
    assert statistics.variance(per_second) == pytest.approx(statistics.mean(per_second), rel=0.1)
    assert poisson_arrivals(4.0, 50, random.Random(1)) == arrivals[:50]
    with pytest.raises(ConfigError, match="above 0"):
        poisson_arrivals(0.0, 1, random.Random(1))


def test_popularity_follows_the_rank() -> None:
    weights = zipf_weights(50, 1.5)
    assert sum(weights) == pytest.approx(1)
    assert weights[0] / weights[7] == pytest.approx(8**1.5)
    assert zipf_weights(4, 0) == [0.25] * 4
    rng = random.Random(2)
    drawn = Counter(i for _ in range(8000) for i in weighted_sample(zipf_weights(8, 1.5), 3, rng))
    times = [drawn[i] for i in range(8)]
    assert times == sorted(times, reverse=True)
    with pytest.raises(ConfigError, match="cannot be drawn"):
        weighted_sample(weights, 51, rng)
    with pytest.raises(ConfigError, match="0"):
        zipf_weights(3, -1)


def test_draws_without_replacement_have_the_chances_of_an_urn() -> None:
    weights, count, rng = [0.6, 0.3, 0.1], 30_000, random.Random(3)
    draws = [tuple(weighted_sample(weights, 2, rng)) for _ in range(count)]
    for pair in itertools.combinations(range(3), 2):
        a, b = (weights[i] for i in pair)
        chance = a * b / (1 - a) + b * a / (1 - b)  # first one, then the other, of what is left
        for order in (pair, pair[::-1]):  # either order, equally often
            assert draws.count(order) / count == pytest.approx(chance / 2, abs=0.012)


def test_requests_depend_on_the_seed_alone() -> None:
    shared = corpus()

    def draw(seed: int) -> list[Request]:
        return shared.draw(20, 6, 16, 1.0, random.Random(seed))

    assert draw(1) == draw(1) != draw(2)
    for request in draw(1):
        assert len(set(request.chunks)) == 6
        assert request.prompt[0] == shared.head.key
        assert request.prompt[1:-1] == tuple(shared.chunks[i].key for i in request.chunks)
        parts = [shared.head.token_ids, *(shared.chunks[i].token_ids for i in request.chunks), request.prompt[-1]]
        assert request.length == sum(map(len, parts))
    # Popular chunks stand anywhere: else prefix caches would find every prompt's beginning.
    many = shared.draw(2000, 6, 16, 1.0, random.Random(4))
    places = Counter(r.chunks.index(0) for r in many if 0 in r.chunks)
    assert max(places.values()) < 1.4 * min(places.values())


def test_prompts_fit_the_context() -> None:
    small = corpus(max_model_len=110)
    request = small.request(range(10), 0, 10)
    assert request.chunks == (0, 1, 2)  # 20 + 3 + 10 tokens leave room for 20, 21 and 22, not for 23 more
    assert request.length == 20 + 20 + 21 + 22 + 3
    assert small.request([], 0, 87).length == 23
    with pytest.raises(ConfigError, match="shorter answers"):
        small.request([], 0, 88)
    pieces = small.pieces(8, 0, 1)
    assert len(pieces) == len(set(pieces)) == 8
    assert 110 - 8 < 20 + sum(map(len, pieces)) + 3 + 1 <= 110


def test_disjoint_sets_are_disjoint_and_of_one_size() -> None:
    shared = corpus(chunks=41)
    sets = shared.disjoint(8, 5)
    flat = [i for chosen in sets for i in chosen]
    assert len(flat) == len(set(flat)) == 40
    sizes = [sum(len(shared.chunks[i].token_ids) for i in chosen) for chosen in sets]
    assert max(sizes) - min(sizes) <= 4
    assert [len(s) for s in shared.disjoint(20, 5)] == [2] * 20
    with pytest.raises(ConfigError, match="load more examples"):
        shared.disjoint(42, 1)


# -- figures -----------------------------------------------------------------------------------------------------


def test_quantiles_interpolate() -> None:
    values = [random.Random(6).expovariate(1) for _ in range(200)]
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert quantiles(values) == {f"p{q}": pytest.approx(cuts[q - 1]) for q in (50, 95, 99)}
    assert quantiles([3.0]) == {"p50": 3, "p95": 3, "p99": 3}
    assert quantiles([]) == {}


def test_ratios_are_taken_round_by_round() -> None:
    # The machine slows down to a tenth: the ratio of medians would be 2, each round says 4.
    assert median_ratio([40.0, 4.0, 20.0], [10.0, 1.0, 5.0]) == 4
    assert median_ratio([1.0, 1.0], [0.0, 0.5]) == 2
    assert median_ratio([], []) is None


def outcome(due: float, *times: float, **changes: Any) -> Outcome:
    return Outcome(due, list(times), **{"state": "done", "prompt": 10, "linked": 8, "reused": 6, **changes})


def test_load_figures_count_from_when_a_request_was_due() -> None:
    found = [
        outcome(1.0, 2.0, 2.5, 3.0, held_bytes=12),
        outcome(2.0, 6.0, 6.25, 6.5, held_bytes=16, prompt=30),
        Outcome(4.0, state="refused", error="full"),
    ]
    figures = load_figures(found, begin=0.0)
    assert figures["offered_rps"] == 3 / 4
    assert figures["reached_rps"] == 2 / 6.5
    assert figures["output_tokens_s"] == 6 / 6.5
    assert figures["ttft_s"]["p50"] == (1 + 4) / 2
    assert figures["per_token_s"]["p50"] == (0.5 + 0.25) / 2
    assert (figures["linked_share"], figures["reused_share"]) == (16 / 40, 12 / 40)
    assert figures["prompt_tokens"] == 20
    assert figures["peak_bytes"] == 16
    assert (figures["done"], figures["refused"], figures["error"]) == (2, 1, "full")
    nothing = load_figures([Outcome(1.0, state="failed")], begin=0.0)
    assert (nothing["reached_rps"], nothing["ttft_s"], nothing["peak_bytes"]) == (0, {}, None)
    assert json.loads(json.dumps(nothing)) == nothing
    assert closed_figures([Outcome(1.0, state="failed")])["rps"] == 0


def test_decoding_is_timed_where_all_decode() -> None:
    a = outcome(0, *[1 + 0.5 * i for i in range(11)])  # 1 … 6
    b = outcome(0, *[3 + 0.5 * i for i in range(11)])  # 3 … 8
    rate, together = decode_rate([a, b])
    assert together
    assert rate == pytest.approx(12 / 3)  # (3, 6]: six tokens each
    # One after another: no time in which both decode.
    rate, together = decode_rate([outcome(0, 1.0, 2.0, 3.0), outcome(0, 10.0, 11.0, 12.0)])
    assert (rate, together) == (1.0, False)
    assert decode_rate([outcome(0, 1.0)]) == (0.0, False)


# -- parts, in virtual time --------------------------------------------------------------------------------------


def test_load_waits_as_a_queue_does() -> None:
    service = {"full": 1.5, "legolink:4": 0.25}
    engine = FakeEngine(VirtualTime(), lambda prompt, policy: service[policy], lambda prompt: 0.125)
    result = measure(engine, settings(parts=("load",), rates=(0.5, 1.0), tokens=(1, 3), requests=30))
    cells = result["load"]
    assert [(c["tokens"], c["rate"]) for c in cells] == [(t, r) for t in (1, 3) for r in (0.5, 1.0) for _ in range(2)]
    for cell in cells:
        arrivals = [r["arrival_s"] for r in cell["requests"]]
        # Lindley's recursion for one server: what a request waits is what its predecessor left.
        busy = service[cell["policy"]] + 0.125 * (cell["tokens"] - 1)
        free, expected = 0.0, []
        for at in arrivals:
            begin = max(at, free)
            free = begin + busy
            expected.append(begin + service[cell["policy"]] - at)
        assert [r["ttft_s"] for r in cell["requests"]] == pytest.approx(expected)
        assert cell["ttft_s"]["p95"] == pytest.approx(statistics.quantiles(expected, n=100, method="inclusive")[94])
        assert cell["reached_rps"] == pytest.approx(30 / free)
        assert cell["offered_rps"] == pytest.approx(30 / arrivals[-1])
        assert cell["per_token_s"].get("p50") == (None if cell["tokens"] == 1 else pytest.approx(0.125))
        assert cell["peak_bytes"] == 100
    # A queue that grows is seen: full cannot serve one a second.
    overloaded = next(c for c in cells if (c["policy"], c["rate"], c["tokens"]) == ("full", 1.0, 3))
    assert overloaded["ttft_s"]["p99"] > 10 * service["full"]
    assert overloaded["reached_rps"] < 0.6


def test_every_policy_is_given_the_same() -> None:
    def asked() -> dict[str, list[tuple[Any, ...]]]:
        engine = FakeEngine(VirtualTime(), lambda prompt, policy: 0.01)
        measure(engine, settings(parts=("load", "saturation")))
        return {
            p: [(prompt, n) for policy, _, prompt, n in engine.asked if policy == p] for p in ("full", "legolink:4")
        }

    first, second = asked(), asked()
    assert first == second
    assert first["full"] == first["legolink:4"]
    prompts = [prompt for prompt, _ in first["full"]]
    assert len(prompts) == 1 + 12 + 2 * 12  # one warms up
    assert len(set(prompts)) > 34  # each round has new ones


def test_saturation_compares_in_rounds() -> None:
    service = {"full": 2.0, "prefix": 1.0, "legolink:4": 0.5}
    engine = FakeEngine(VirtualTime(), lambda prompt, policy: service[policy])
    result = measure(engine, settings(parts=("saturation",), policies=tuple(service), tokens=(4,), rounds=3))
    table = result["saturation"]
    assert {p: e["rps"] for p, e in table.items()} == {p: pytest.approx(1 / s) for p, s in service.items()}
    assert table["legolink:4"]["vs_full"] == pytest.approx(4)
    assert table["legolink:4"]["vs_prefix"] == pytest.approx(2)
    assert table["full"]["vs_full"] == 1
    assert table["full"]["output_tokens_s"] == pytest.approx(4 * 0.5)
    assert table["prefix"]["done"] == 3 * 12
    order = [p for p, _ in itertools.groupby(policy for policy, *_ in engine.asked)]
    # After the warm-up; the first of each round follows the last of the one before.
    assert order[3:] == [
        *("full", "prefix", "legolink:4"),
        *("prefix", "legolink:4", "full"),
        "legolink:4",
        "full",
        "prefix",
    ]


def test_saturation_keeps_the_concurrency() -> None:
    time = VirtualTime()
    engine = FakeEngine(time, lambda prompt, policy: 1.0, together=True)
    result = measure(engine, settings(parts=("saturation",), policies=("full",), concurrency=3, requests=12, rounds=1))
    starts = Counter(at for policy, at, *_ in engine.asked[1:])
    assert list(starts.values()) == [3, 3, 3, 3]
    assert result["saturation"]["full"]["rps"] == pytest.approx(3)


def test_decode_compares_shared_with_different_chunks() -> None:
    def token(prompt: Sequence[Any]) -> float:
        return 0.125 if sum(tokens == 40 for *_, tokens in engine.asked) <= 3 else 0.5

    engine = FakeEngine(VirtualTime(), lambda prompt, policy: 0.5, token, together=True)
    chosen = settings(parts=("decode",), policies=("full", "naive"), concurrency=3, rounds=1, decode_tokens=40)
    table = measure(engine, chosen)["decode"]
    assert list(table) == ["naive"]  # full links nothing
    prompts = [p[1:-1] for _, _, p, tokens in engine.asked if tokens == 40]
    assert len({frozenset(p) for p in prompts[:3]}) == 1
    assert len(set(prompts[:3])) > 1  # in other orders
    assert all(set(a).isdisjoint(b) for a, b in itertools.combinations(prompts[3:], 2))
    entry = table["naive"]
    assert (entry["same_tokens_s"], entry["disjoint_tokens_s"]) == pytest.approx((3 / 0.125, 3 / 0.5))
    assert entry["ratio"] == pytest.approx(4)
    assert entry["together"]
    assert (entry["done"], entry["failed"]) == (6, 0)


def test_short_requests_are_timed_alone_and_beside_long_ones() -> None:
    def link(prompt: Sequence[Any], policy: str) -> float:
        return 0.5 if len(prompt) > 20 else 0.01

    engine = FakeEngine(VirtualTime(), link)
    table = measure(engine, settings(parts=("beside",), short_requests=10, beside_chunks=30))["beside"]
    entry = table["legolink:4"]
    assert list(table) == ["legolink:4"]
    assert entry["alone_s"]["p50"] == pytest.approx(0.01)
    # One server, always linking: a short one waits for what is left of a long one.
    assert 0.01 < entry["beside_s"]["p50"] <= 0.51 + 0.01
    assert entry["ratio"]["p50"] == pytest.approx(entry["beside_s"]["p50"] / 0.01)
    assert (entry["chunks"], entry["done"], entry["long"]["cancelled"]) == (30, 2 * 20, 2)
    assert entry["long"]["done"] >= 8
    assert not engine.running


def test_memory_is_what_further_requests_add() -> None:
    private = {"full": 260, "legolink:4": 30}

    def held(engine: Any) -> dict[str, int]:
        bytes_ = sum(private[p] for p in engine.running.values())
        return {"private_bytes": bytes_, "chunk_bytes": 640, "peak_bytes": 0, "budget_bytes": 0}

    engine = FakeEngine(VirtualTime(), lambda prompt, policy: 0.5, lambda prompt: 0.1, together=True)
    table = measure(engine, settings(parts=("memory",), concurrency=4), read_memory=held)["memory"]
    for policy, entry in table.items():
        assert entry["held"] == 4
        assert entry["added_bytes"] == private[policy]
        assert entry["share"] == pytest.approx(private[policy] / entry["copy_bytes"])
        assert entry["prompt_tokens"] == pytest.approx(entry["copy_bytes"] / 10, abs=1)
    assert not engine.running
    # One that has ended before the last has begun: no figure is better than a wrong one.
    ended = FakeEngine(VirtualTime(), lambda prompt, policy: 0.5, lambda prompt: 0.001)
    entry = measure(ended, settings(parts=("memory",)), read_memory=held)["memory"]["full"]
    assert entry["held"] < 3
    assert "share" not in entry


def test_what_is_refused_or_fails_is_counted() -> None:
    engine = FakeEngine(VirtualTime(), lambda prompt, policy: 0.1)
    chosen = settings(policies=("full", "refuses", "breaks"), tokens=(4,), requests=6, short_requests=2)
    result = measure(engine, chosen)
    cells = {c["policy"]: c for c in result["load"]}
    assert [(cells[p]["done"], cells[p]["refused"], cells[p]["failed"]) for p in chosen.policies] == [
        (6, 0, 0),
        (0, 6, 0),
        (0, 0, 6),
    ]
    assert "queue is full" in cells["refuses"]["error"]
    assert "out of pages" in cells["breaks"]["error"]
    assert result["saturation"]["refuses"]["rps"] == 0
    assert result["saturation"]["refuses"]["vs_full"] == 0
    assert not engine.running
    for table in serve_tables(result):
        assert all(column.header for column in table.columns)
        Console(file=io.StringIO(), width=200).print(table)
    assert draw_serve(result)


def test_ctrl_c_cancels_and_keeps_what_was_measured() -> None:
    engine = FakeEngine(VirtualTime(stop_at=60.0), lambda prompt, policy: 0.5, lambda prompt: 5.0, together=True)
    saved: list[str] = []
    threads = set(threading.enumerate())
    result = measure(
        engine,
        settings(parts=("saturation", "load"), requests=20, rates=(1.0, 0.5), tokens=(2,)),
        save=lambda found: saved.append(json.dumps(found)),
    )
    assert result["interrupted"]
    assert 1 <= len(result["load"]) < 4
    assert "saturation" not in result  # load comes first
    assert not engine.running
    assert json.loads(saved[-1])["load"] == json.loads(json.dumps(result))["load"]
    assert len(saved) == len(result["load"])
    assert not [t for t in threading.enumerate() if t not in threads and t.is_alive()]


def test_settings_refuse_what_cannot_be_measured() -> None:
    for wrong, message in (
        ({"parts": ("load", "speed")}, "load, saturation, decode, beside, memory"),
        ({"rates": (0.0,)}, "above 0"),
        ({"requests": 0}, "1 or more"),
        ({"concurrency": 1}, "2 or more"),
    ):
        with pytest.raises(ConfigError, match=message):
            settings(**wrong)
    small = ServeSettings(rates=(1.0, 2.0, 3.0), tokens=(1, 16)).capped()
    assert (small.rates, small.tokens, small.requests, small.rounds) == ((1.0, 2.0), (1,), 8, 1)
    engine = FakeEngine(VirtualTime(), lambda prompt, policy: 0.1)
    with pytest.raises(ConfigError, match="load more examples"):
        measure(engine, settings(parts=("load", "decode"), concurrency=41))
    assert not engine.asked


# -- the real engine ---------------------------------------------------------------------------------------------


def test_all_parts_on_a_tiny_model() -> None:
    with Engine(model(), tokenizer=tokenizer(), dtype="float32", max_model_len=1024) as engine:
        examples = load("templated", limit=4, count_tokens=lambda text: len(text) // 4)
        short = [e.__class__(e.example_id, tuple(d[:40] for d in e.documents), e.question) for e in examples]
        bars: list[tuple[int, int]] = []
        shared = compile_corpus(engine, short, progress=lambda done, total: bars.append((done, total)))
        assert bars[-1] == (bars[-1][1],) * 2
        chosen = settings(
            policies=("full", "prefix", "legolink:4"), rates=(100.0,), tokens=(3,), requests=5, rounds=1,
            concurrency=2, decode_tokens=6, beside_chunks=8, short_requests=3, k=2,
        )  # fmt: skip
        seen: list[tuple[str, int, int]] = []
        result = bench_serve(engine, shared, chosen, progress=lambda *step: seen.append(step))
        assert {"private_bytes", "chunk_bytes", "budget_bytes"} <= engine_memory(engine).keys()
        assert Clients(engine).ask(shared.request([0], 0, 2), "naive").state == "done"
    assert {part: (done, total) for part, done, total in seen} == {
        "load": (3, 3), "saturation": (3, 3), "decode": (1, 1), "beside": (1, 1), "memory": (3, 3),
    }  # fmt: skip
    cells = {c["policy"]: c for c in result["load"]}
    assert [c["done"] for c in cells.values()] == [5, 5, 5]
    assert (
        cells["full"]["reused_share"] == 0 < cells["legolink:4"]["reused_share"] < cells["legolink:4"]["linked_share"]
    )
    assert all(e["done"] == 5 and e["rps"] > 0 for e in result["saturation"].values())
    assert result["decode"]["legolink:4"]["ratio"] > 0
    assert result["beside"]["legolink:4"]["done"] == 6
    full, linked = (result["memory"][p] for p in ("full", "legolink:4"))
    assert (full["held"], linked["held"]) == (2, 2)
    assert 0 < linked["share"] < full["share"]
    assert result["memory_at_end"]["private_bytes"] == 0
    json.dumps(result)


def test_the_command_writes_json_and_a_picture(run: Run, tmp_path: Path) -> None:
    data, out, png = tmp_path / "data.jsonl", tmp_path / "serve.json", tmp_path / "serve.png"
    texts = [f"The price for lot {n} is {3 * n} crowns." for n in range(1, 9)]
    data.write_text(json.dumps({"id": "q", "documents": texts, "question": "?"}))
    arguments = ("--dataset", str(data), "--quick", "--rates", "50,100", "--requests", "3", "--k", "2")
    more = ("--policies", "full,legolink:4", "--concurrency", "2", "--decode-tokens", "4", "--tokens", "2")
    code, printed, error = run(
        "bench", "serve", *arguments, *more, "--beside-chunks", "4", "--json", str(out), "--png", str(png)
    )
    assert (code, error) == (0, error)
    result = json.loads(out.read_text())
    assert {"load", "saturation", "decode", "beside", "memory"} <= result.keys()
    assert [c["rate"] for c in result["load"]] == [50, 50, 100, 100]
    assert result["command"].startswith("epic-rag bench serve")
    assert not result["interrupted"]
    assert png.read_bytes().startswith(b"\x89PNG")
    for word in ("legolink:4", "vs full", "TTFT p50", "share"):
        assert word in printed


def test_the_command_refuses_before_the_model_is_loaded(run: Run) -> None:
    code, _, error = run("bench", "serve", "--parts", "speed", "--model", "/nowhere")
    assert code == 1
    assert "saturation" in error
    assert run("bench", "serve", "--rates", "fast", "--model", "/nowhere")[0] == 2


def test_nothing_measured_draws_nothing() -> None:
    assert draw_serve({"settings": {"policies": ["full"]}}) is None
    assert serve_tables({"load": []}) == []
