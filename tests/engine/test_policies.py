"""Link policies: their names, the tokens they recompute, and the cache of exact prefixes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from epic_engine import ConfigError, Engine, SamplingParams, parse_policy, policy_names
from epic_engine.linking.layout import Body, Layout, LinkPlan, runs_between
from epic_engine.linking.policies import Full, LegoLink, Naive, Prefix
from epic_engine.memory.prefix_cache import PrefixCache
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.engine.models import tiny
from tests.engine.oracle import plain_logits, untouched

HEAD = (44, 91, 17, 130, 61)
SHORT = SamplingParams(max_tokens=1)


def _ids(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 199) for _ in range(count)]


A, B, QUESTION = _ids(20, 1), _ids(3, 2), _ids(6, 3)


# -- names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("full", Full),
        ("naive", Naive),
        ("prefix", Prefix),
        ("legolink:0", LegoLink),
        ("legolink:16", LegoLink),
    ],
)
def test_a_policy_is_read_back_from_its_string(text: str, kind: type) -> None:
    policy = parse_policy(text)
    assert type(policy) is kind
    assert str(policy) == text
    assert parse_policy(policy) is policy
    assert type(parse_policy(f" {policy} ")) is kind


def test_names_are_listed() -> None:
    assert {n.partition(":")[0] for n in policy_names()} == {
        "full",
        "naive",
        "prefix",
        "legolink",
        "cacheblend",
        "query_aware",
        "damp",
    }


@pytest.mark.parametrize("text", ["", "legolnik:3", "Full", "lego", ":", "cachebland:0.2"])
def test_an_unknown_name_lists_the_known(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_policy(text)
    assert repr(text) in str(caught.value)
    assert all(name in str(caught.value) for name in policy_names())


@pytest.mark.parametrize("text", ["legolink", "legolink:", "legolink:x", "legolink:1.5", "legolink:-1", "full:3"])
def test_a_bad_argument_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"needs a number of tokens|takes no argument"):
        parse_policy(text)


def test_a_bad_default_policy_is_refused_when_the_engine_is_made() -> None:
    with pytest.raises(ConfigError, match="unknown link policy 'blend'"):
        Engine(tiny("llama"), policy="blend")


# -- rows ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny("llama"), head=HEAD, selftest=False)


def _counts(engine: Engine, prompt: Sequence[object], policy: str) -> tuple[int, int, int, int, str]:
    stats = engine.generate(prompt, SHORT, policy=policy).stats  # type: ignore[arg-type]
    assert stats.policy == policy
    assert stats.reused == stats.linked - stats.recomputed
    return stats.prompt, stats.linked, stats.recomputed, stats.rows, stats.reuse


@pytest.mark.parametrize("k", [0, 1, 5, 16])
def test_legolink_recomputes_the_first_tokens_of_every_chunk(engine: Engine, k: int) -> None:
    a, b = engine.compile_many([A, B])
    counts = _counts(engine, [HEAD, a, b, a, QUESTION], f"legolink:{k}")
    recomputed = 2 * min(k, len(A)) + min(k, len(B))  # B has three tokens
    plain = len(HEAD) + len(QUESTION)
    assert counts == (plain + 43, 43, recomputed, plain + recomputed, "composed")


def test_legolink_leaves_an_exact_chunk_alone(engine: Engine) -> None:
    alone, behind_head = engine.compile(A), engine.compile(A, "head")
    # An isolated chunk is exact at the beginning of a prompt and nowhere else.
    assert _counts(engine, [alone, QUESTION], "legolink:4") == (26, 20, 0, 6, "exact")
    assert _counts(engine, [alone, alone, QUESTION], "legolink:4") == (46, 40, 4, 10, "composed")
    # A chunk compiled behind the head is exact behind exactly that head.
    assert _counts(engine, [HEAD, behind_head, QUESTION], "legolink:4") == (31, 20, 0, 11, "exact")
    assert _counts(engine, [HEAD[:2], HEAD[2:], behind_head, QUESTION], "legolink:4") == (
        31,
        20,
        0,
        11,
        "exact",
    )
    for other in (HEAD[:-1], (*HEAD, 3), (*HEAD[:-1], 3)):
        length = len(other)
        assert _counts(engine, [other, behind_head, QUESTION], "legolink:4") == (
            length + 26,
            20,
            4,
            length + 10,
            "composed",
        )
    assert _counts(engine, [behind_head, QUESTION], "legolink:4")[2] == 4


def test_exact_reuse_equals_full_computation(engine: Engine) -> None:
    behind_head = engine.compile(A, "head")
    got = engine.score([HEAD, behind_head, QUESTION], [9, 8, 7], policy="naive")
    want = plain_logits(untouched(tiny("llama")), [*HEAD, *A, *QUESTION, 9, 8])[-3:]
    assert (got - want).abs().max() < 1e-4


def test_naive_and_full(engine: Engine) -> None:
    a, b = engine.compile_many([A, B])
    assert _counts(engine, [HEAD, a, b, QUESTION], "naive") == (34, 23, 0, 11, "composed")
    assert _counts(engine, [HEAD, a, b, QUESTION], "full") == (34, 23, 23, 34, "none")
    assert _counts(engine, [QUESTION], "naive") == (6, 0, 0, 6, "none")
    # The last token of a prompt is always computed, for its logits are wanted.
    assert _counts(engine, [QUESTION, a], "naive") == (26, 20, 1, 7, "composed")
    assert _counts(engine, [a], "naive") == (20, 20, 1, 1, "exact")


@given(st.integers(1, 40), st.data())
def test_runs_are_what_lies_between_the_slots(length: int, data: st.DataObject) -> None:
    slots = sorted(data.draw(st.frozensets(st.integers(0, length - 1))))
    runs = runs_between(length, slots)
    covered = [s for a, b in runs for s in range(a, b)]
    assert covered == [s for s in range(length) if s not in slots]
    assert all(a < b for a, b in runs)
    assert all(b < c for (_, b), (c, _) in pairwise(runs))  # maximal: a slot lies between two


def test_slots_outside_a_segment_are_refused() -> None:
    layout = Layout([(A, Body(torch.zeros(1, 2, 1, len(A), 4), ())), (QUESTION, None)])
    for slots in ([-1], [len(A)]):
        with pytest.raises(ValueError, match="lie outside a segment of 20"):
            LinkPlan(layout, {0: slots})


# -- prefix ----------------------------------------------------------------------------------------------------


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    same = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        same += 1
    return same


PROMPTS = st.lists(
    st.lists(st.integers(3, 5), min_size=1, max_size=12), min_size=2, max_size=7
)  # three different tokens: many shared prefixes


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(PROMPTS)
def test_prefix_reuses_the_longest_common_prefix(prompts: list[list[int]]) -> None:
    twin = untouched(tiny("llama"))
    with Engine(tiny("llama"), policy="prefix", selftest=False) as engine:
        for number, ids in enumerate(prompts):
            # The model may not skip the last token, so that one is computed even if it was seen before.
            longest = max((_common(ids, other) for other in prompts[:number]), default=0)
            stats = engine.generate([ids], SHORT).stats
            assert stats.linked == longest
            assert stats.reused == min(longest, len(ids) - 1)
            assert stats.rows == len(ids) - stats.reused
            assert stats.reuse == ("exact" if stats.reused else "none")
            want = plain_logits(twin, [*ids, 9, 8])[-3:]
            assert (engine.score([ids], [9, 8, 7]) - want).abs().max() < 1e-4


def test_linked_kv_never_enters_the_prefix_cache() -> None:
    want = plain_logits(untouched(tiny("llama")), [*HEAD, *A, *QUESTION])[-1:]
    with Engine(tiny("llama"), selftest=False) as engine:
        key = engine.compile(A)
        for policy in ("naive", "legolink:4", "full"):
            engine.score([HEAD, key, QUESTION], [5], policy=policy)
        assert engine._serving.prefixes.nbytes == 0
        # The first request of the prefix policy computes all of it, although a chunk is at hand.
        stats = engine.generate([HEAD, key, QUESTION], SHORT, policy="prefix").stats
        assert (stats.linked, stats.rows) == (0, 31)
        assert engine._serving.prefixes.nbytes == 31 * engine.spec.kv_bytes_per_token
        got = engine.score([HEAD, key, QUESTION], [5], policy="prefix")
        assert (got - want).abs().max() < 1e-4
        # And linking goes on ignoring the cache.
        assert engine.generate([HEAD, key, QUESTION], SHORT, policy="naive").stats.linked == len(A)


def test_a_prefix_cache_without_budget_keeps_nothing() -> None:
    with Engine(tiny("llama"), policy="prefix", prefix_cache_bytes=0, selftest=False) as engine:
        for _ in range(2):
            assert engine.generate([A], SHORT).stats.linked == 0


# -- the cache by itself: token t at place p has KV (t, p), so wrong pieces are seen at once ---------------------

PER_TOKEN = 2 * 4 * 2  # one layer, one head of two float32 numbers, keys and values


def _kv(ids: Sequence[int], start: int = 0) -> Tensor:
    pairs = torch.tensor([[float(t), float(p)] for p, t in enumerate(ids)])[start:]
    return pairs.expand(1, 2, 1, -1, 2)


def _check_pieces(cache: PrefixCache, ids: Sequence[int], longest: int) -> None:
    done = 0
    for piece, body in cache.longest(ids):
        assert piece == tuple(ids[done : done + len(piece)])
        assert torch.equal(body.kv, _kv(ids)[:, :, :, done : done + len(piece)])
        assert body.rotation_base == done
        assert body.context_ids == tuple(ids[:done])
        done += len(piece)
    assert done == longest


@settings(max_examples=200, deadline=None)
@given(PROMPTS)
def test_radix_tree_against_brute_force(prompts: list[list[int]]) -> None:
    cache = PrefixCache(1 << 20)
    for number, ids in enumerate(prompts):
        longest = max((_common(ids, other) for other in prompts[:number]), default=0)
        _check_pieces(cache, ids, longest)
        cache.insert(ids, _kv(ids, longest), longest)
        distinct = {tuple(p[:n]) for p in prompts[: number + 1] for n in range(1, len(p) + 1)}
        assert cache.nbytes == PER_TOKEN * len(distinct)  # every prefix is kept once
        for other in prompts[: number + 1]:
            _check_pieces(cache, other, len(other))
    cache.clear()
    assert cache.nbytes == 0
    _check_pieces(cache, prompts[0], 0)


@settings(max_examples=200, deadline=None)
@given(PROMPTS, st.integers(0, 30))
def test_the_budget_is_kept(prompts: list[list[int]], tokens: int) -> None:
    cache = PrefixCache(tokens * PER_TOKEN)
    for ids in prompts:
        known = sum(len(piece) for piece, _ in cache.longest(ids))
        cache.insert(ids, _kv(ids, known), known)
        assert cache.nbytes <= tokens * PER_TOKEN
        for other in prompts:
            found = cache.longest(other)  # whatever is left is right
            _check_pieces(cache, other, sum(len(piece) for piece, _ in found))


def test_the_least_recently_used_prompt_goes_first() -> None:
    cache = PrefixCache(8 * PER_TOKEN)
    for ids in ([3, 3, 3, 3], [4, 4, 4, 4]):
        cache.insert(ids, _kv(ids), 0)
    cache.longest([3, 3])  # used again
    cache.insert([5, 5], _kv([5, 5]), 0)
    _check_pieces(cache, [3, 3, 3, 3], 4)
    _check_pieces(cache, [5, 5], 2)
    _check_pieces(cache, [4, 4, 4, 4], 0)


def test_a_tail_whose_beginning_is_gone_is_not_kept() -> None:
    cache = PrefixCache(1 << 20)
    cache.insert([3, 4, 5], _kv([3, 4, 5], 2), 2)
    assert cache.nbytes == 0
    _check_pieces(cache, [3, 4, 5], 0)
