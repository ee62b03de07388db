"""Linked prompts of random shapes against the one-forward oracle, and the pieces that attention is made of."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from epic_engine import ChunkKey, ConfigError, Engine, LinkPolicy
from epic_engine.attention import spans as spans_module
from epic_engine.attention import torch_backend
from epic_engine.attention.base import PrivateKV, Run, SequenceRows
from epic_engine.attention.torch_backend import dense_math
from epic_engine.linking.layout import Body, Layout, LinkPlan
from epic_engine.model.rope import RotaryTable
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.engine.models import KINDS, build
from tests.engine.oracle import Piece, linked_logits, untouched

MAX_LEN = 128
LENGTHS = (1, 1, 2, 5, 9, 17, 30)  # of the chunks in the pool
HEAD = (44, 91, 17, 130, 61)
SINK = 1  # the models' bos token
CONTEXTS: dict[str, tuple[int, ...]] = {
    "isolated": (),
    "sink:1": (SINK,),
    "sink:4": (SINK,) * 4,
    "head": HEAD,
}
KIND_NAMES = ("llama-float64", "qwen3", "phi3-partial")


class WideNorm(LlamaRMSNorm):
    """Hugging Face normalises in float32; in float64 rounding cannot hide a wrong term."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon)


class Chosen(LinkPolicy):
    """Recomputes the slots it was given, one set per linked segment."""

    name = "chosen"
    usage = "chosen"

    def __init__(self, slots: Sequence[frozenset[int]]) -> None:
        self.slots = slots

    def select(self, layout: Layout) -> Mapping[int, Sequence[int]]:
        linked = [i for i, s in enumerate(layout.segments) if s.body is not None]
        return {i: sorted(s) for i, s in zip(linked, self.slots, strict=True)}


@dataclass(frozen=True)
class Part:
    """A segment: ``chunk`` is an index into the pool, or None for plain tokens."""

    ids: tuple[int, ...]
    chunk: int | None = None
    context: str = "isolated"
    recompute: frozenset[int] = frozenset()


def _ids(count: int, seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(3, 199) for _ in range(count))


POOL = tuple(_ids(n, 100 + i) for i, n in enumerate(LENGTHS))


@lru_cache
def model_of(kind: str) -> Any:
    if kind != "llama-float64":
        return build(*KINDS[kind])
    model = build("Llama", {}, torch.float64)
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.__class__ = WideNorm
    return model


def exact_angles(positions: Tensor) -> Tensor:
    """RoPE's angles (Su et al. 2021, eq. 15) in float64, ``(..., 4 pairs)``; transformers takes them in float32."""
    return positions.double()[..., None] * 10000.0 ** (-torch.arange(4).double() / 4)


@lru_cache
def oracle_of(kind: str) -> Any:
    twin = untouched(model_of(kind))
    if kind == "llama-float64":
        twin.set_attn_implementation("sdpa")  # eager takes its softmax in float32

        def exact(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            angles = exact_angles(position_ids).repeat(1, 1, 2)
            return angles.cos(), angles.sin()

        twin.model.rotary_emb.forward = exact
    return twin


@lru_cache(maxsize=32)
def engine_of(kind: str, rows_per_step: int) -> Engine:
    engine = Engine(
        model_of(kind),
        max_model_len=MAX_LEN,
        rows_per_step=rows_per_step,
        head=HEAD,
        selftest=False,
    )
    if kind == "llama-float64":
        angles = exact_angles(torch.arange(MAX_LEN))
        table = engine.decoder.tables[0]
        assert table is not None
        assert (table.factors - torch.polar(torch.ones_like(angles), angles)).abs().max() < 1e-5
        engine.decoder.tables = [RotaryTable(torch.polar(torch.ones_like(angles), angles))] * engine.spec.num_layers
    return engine


def engine_logits(engine: Engine, parts: Sequence[Part], continuation: Sequence[int]) -> Tensor:
    """What :meth:`Engine.score` gives, in the model's own data type."""
    prompt: list[Sequence[int] | ChunkKey] = [
        p.ids if p.chunk is None else engine.compile(p.ids, p.context) for p in parts
    ]
    policy = Chosen([p.recompute for p in parts if p.chunk is not None])
    score = engine.score(prompt, continuation, policy=policy)
    if engine.spec.dtype != torch.float64:
        return score
    linked = engine.link(prompt, policy=policy, room=len(continuation))
    rows = [linked.logits]
    if len(continuation) > 1:
        places = range(len(linked.layout), len(linked.layout) + len(continuation) - 1)
        rows.append(engine._forward(continuation[:-1], [linked.rows(places)], last=len(places)))
    wide = torch.cat(rows)
    assert torch.equal(wide.float(), score)
    return wide


def oracle_logits(kind: str, parts: Sequence[Part], continuation: Sequence[int]) -> Tensor:
    pieces = []
    for number, part in enumerate(parts, start=1):
        if part.chunk is None:
            pieces.append(Piece(part.ids))
            continue
        ends = {len(part.ids) - 1} if number == len(parts) else set()
        pieces.append(Piece(part.ids, part.recompute | ends, CONTEXTS[part.context]))
    if len(continuation) > 1:
        pieces.append(Piece(tuple(continuation[:-1])))
    return linked_logits(oracle_of(kind), pieces)[-len(continuation) :]


def _reads_something(rows: SequenceRows, _: Any) -> bool:
    return any(rows.positions[-1] >= run.after for run in rows.runs)


def _never(*_: Any) -> bool:
    return False


@contextlib.contextmanager
def road(spans: bool | None) -> Iterator[None]:
    """Reading shared KV by moving queries, by laying keys out in small blocks, or as the backend thinks best."""
    with contextlib.ExitStack() as stack:
        if spans is not None:
            stack.enter_context(patch.object(torch_backend, "worth_a_span", _reads_something if spans else _never))
            stack.enter_context(patch.object(torch_backend, "_FEW_SLICES", 0))  # all pieces are mixed by one product
            for name, value in (("_KEYS_PER_BLOCK", 11), ("_CALL_COST", 10)):
                stack.enter_context(patch.object(spans_module, name, value))
        yield


def check(
    kind: str, rows_per_step: int, parts: Sequence[Part], continuation: Sequence[int], spans: bool | None = None
) -> None:
    want = oracle_logits(kind, parts, continuation)
    with road(spans):
        got = engine_logits(engine_of(kind, rows_per_step), parts, continuation)
    tolerance = 1e-9 if kind == "llama-float64" else 1e-4
    assert (got - want).abs().max() <= tolerance * max(1.0, float(want.abs().max()))


@st.composite
def parts_of(draw: st.DrawFn) -> list[Part]:
    """A prompt of up to seven segments; sometimes it and the continuation end exactly at the model's limit."""
    parts: list[Part] = []
    for _ in range(draw(st.integers(1, 7))):
        if draw(st.integers(0, 3)) == 0:
            parts.append(Part(_ids(draw(st.integers(1, 9)), draw(st.integers(0, 50)))))
            continue
        number = draw(st.integers(0, len(POOL) - 1))
        slots = draw(st.frozensets(st.integers(0, LENGTHS[number] - 1), max_size=8))
        context = draw(st.sampled_from(sorted(CONTEXTS)))
        parts.append(Part(POOL[number], number, context, slots))
    while sum(len(p.ids) for p in parts) > MAX_LEN - 3:
        parts.pop()
    return parts


def _pushed_to_the_end(parts: list[Part], continuation: Sequence[int]) -> list[Part]:
    room = MAX_LEN - sum(len(p.ids) for p in parts) - len(continuation)
    return [Part(_ids(room, 9)), *parts] if room else parts


def _chunk(number: int, slots: Sequence[int] = (), context: str = "isolated") -> Part:
    return Part(POOL[number], number, context, frozenset(slots))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from(KIND_NAMES),
    parts=parts_of(),
    continuation=st.lists(st.integers(3, 198), min_size=1, max_size=3),
    at_the_end=st.booleans(),
    rows_per_step=st.sampled_from((1, 2, 3, 7, 2048)),
    spans=st.sampled_from((None, False, True)),
)
@example("llama-float64", [_chunk(6)], [5, 6], False, 2048, None)  # one chunk alone, nothing recomputed
@example("llama-float64", [_chunk(0)], [5, 6], True, 1, False)
@example("llama-float64", [_chunk(0), _chunk(0), _chunk(1)], [5], False, 2048, True)  # one-token chunks only
@example("llama-float64", [_chunk(0, [0]), _chunk(2, [0, 1])], [5, 7], False, 2048, None)  # nothing is left to share
@example("llama-float64", [_chunk(6, [3, 9, 10, 20]), _chunk(6, [0, 29]), _chunk(6)], [5, 7], True, 3, False)
@example("qwen3", [_chunk(5, [8], "head"), _chunk(5, [8], "sink:4"), _chunk(5)], [5, 7], True, 2, True)
@example("phi3-partial", [Part((3, 4, 5)), Part((6,))], [5, 7], False, 1, None)  # no chunk at all
def test_any_linked_prompt_equals_one_forward(
    kind: str, parts: list[Part], continuation: list[int], at_the_end: bool, rows_per_step: int, spans: bool | None
) -> None:
    if at_the_end:
        parts = _pushed_to_the_end(parts, continuation)
    check(kind, rows_per_step, parts, continuation, spans)


MIXED = [
    Part((7, 8, 9)),
    _chunk(6, [0, 1, 14]),
    _chunk(4, [], "sink:4"),
    _chunk(6, [5, 29]),
    _chunk(6, [0, 1, 14]),
    _chunk(3, [0], "head"),
    Part((31, 32, 33, 34)),
]


@pytest.mark.parametrize("spans", [False, True])
@pytest.mark.parametrize("pairs", [1, 3, 64])
@pytest.mark.parametrize("kind", KIND_NAMES)
def test_blocks_of_any_size(kind: str, pairs: int, spans: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "_PAIRS_PER_BLOCK", pairs)
    check(kind, 5, MIXED, [11, 12, 13], spans)


def test_the_oracle_sees_every_detail() -> None:
    """If the oracle did not react to these changes, equality with it would prove nothing."""
    want = oracle_logits("llama-float64", MIXED, [11])
    for index, part in (
        (1, _chunk(6, [0, 1])),
        (2, _chunk(4)),
        (3, _chunk(6, [5])),
        (5, _chunk(3, [0], "sink:1")),
    ):
        other = oracle_logits("llama-float64", [*MIXED[:index], part, *MIXED[index + 1 :]], [11])
        assert (want - other).abs().max() > 1e-7


# -- pieces ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("rows", "keys", "causal"), [(1, 1, False), (5, 17, False), (9, 9, True), (1, 1, True)])
@pytest.mark.parametrize("dense", [torch_backend.dense_cpu, dense_math])
def test_dense_attention_and_its_log_sum_exp(
    dense: Any, rows: int, keys: int, causal: bool, dtype: torch.dtype, tolerance: float
) -> None:
    generator = torch.Generator().manual_seed(rows * 31 + keys)
    q, k, v = (torch.randn(1, 2, n, 8, generator=generator, dtype=dtype) for n in (rows, keys, keys))
    out, lse = dense(q, k, v, 0.3, causal)
    scores = torch.einsum("bhid,bhjd->bhij", q.double(), k.double()) * 0.3
    for row in range(rows):
        seen = keys if not causal else row + 1
        weights = torch.exp(scores[:, :, row, :seen])
        want = torch.einsum("bhj,bhjd->bhd", weights / weights.sum(-1, keepdim=True), v[:, :, :seen].double())
        assert (out[:, row] - want).abs().max() < tolerance
        assert (lse[:, row] - torch.log(weights.sum(-1))).abs().max() < tolerance


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_matrix_products_equal_the_flash_kernel(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(model_of(kind), max_model_len=MAX_LEN, head=HEAD, selftest=False)
    flash = engine_logits(engine, MIXED, [11, 12, 13])
    calls = []

    def counted(*arguments: Any) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return dense_math(*arguments)

    monkeypatch.setattr(engine.backend, "_dense", counted)
    products = engine_logits(engine, MIXED, [11, 12, 13])
    assert calls
    assert (flash - products).abs().max() <= (1e-9 if kind == "llama-float64" else 1e-4)


def _sequence(engine: Engine, parts: Sequence[Part], kvs: Mapping[int, Tensor]) -> tuple[list[int], SequenceRows]:
    layout = Layout([(p.ids, None if p.chunk is None else Body(kvs[p.chunk], ())) for p in parts])
    chosen = {i: sorted(p.recompute) for i, p in enumerate(parts) if p.chunk is not None}
    plan = LinkPlan(layout, chosen)
    return plan.row_ids, SequenceRows(plan.rows, PrivateKV(engine.spec, len(plan.rows), engine.device), plan.runs)


@pytest.mark.parametrize("spans", [False, True])
@pytest.mark.parametrize("kind", KIND_NAMES)
def test_a_batch_that_shares_runs_equals_each_sequence_alone(kind: str, spans: bool) -> None:
    engine = engine_of(kind, 2048)
    kvs = {n: engine.chunk(engine.compile(POOL[n])).kv for n in (4, 6)}
    batch = [
        [Part((3, 4)), _chunk(6, [0]), _chunk(4), Part((9, 10))],
        [_chunk(4), _chunk(6, [0]), _chunk(6, [0]), Part((9,))],
        [Part((50, 51, 52)), _chunk(6, [0]), Part((70,))],
        [Part((12,))],
    ]
    sequences = [_sequence(engine, parts, kvs) for parts in batch]
    ids = [t for row_ids, _ in sequences for t in row_ids]
    with road(spans):
        together = engine._forward(ids, [rows for _, rows in sequences], last=len(ids))
    done = 0
    for (row_ids, _), parts in zip(sequences, batch, strict=True):
        done += len(row_ids)
        alone = oracle_logits(kind, parts, [0])[-1]
        assert (together[done - 1] - alone).abs().max() <= (1e-9 if kind == "llama-float64" else 1e-4)


def test_private_kv_says_when_it_is_full() -> None:
    engine = engine_of("qwen3", 2048)
    private = PrivateKV(engine.spec, 3, engine.device)
    assert private.capacity == 3
    engine._forward([5, 6], [SequenceRows([0, 1], private, [])], last=0)
    assert private.length == 2
    with pytest.raises(ConfigError, match="2 rows do not fit a private KV of 3 tokens that holds 2"):
        engine.backend.plan([SequenceRows([2, 3], private, [])])
    assert private.length == 2


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (2, 1), (0, 6), (-1, 2)])
def test_a_run_lies_inside_its_kv(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="is empty or outside 5 slots"):
        Run(torch.zeros(2, 2, 1, 5, 8), start, stop, 0, 0)


def test_linking_leaves_the_chunks_as_they_were() -> None:
    engine = engine_of("llama-float64", 3)
    keys = [engine.compile(POOL[n], c) for n, c in ((6, "isolated"), (4, "sink:4"), (3, "head"))]
    before = [engine.chunk(k).kv.clone() for k in keys]
    engine_logits(engine, MIXED, [11, 12])
    assert all(torch.equal(engine.chunk(k).kv, kv) for k, kv in zip(keys, before, strict=True))


def test_a_key_is_stored_at_its_own_slot_whatever_stood_before() -> None:
    """Layer 0's keys do not depend on other tokens, so every context must give the same ones, and values, too."""
    engine = engine_of("llama-float64", 2048)
    forms = [engine.chunk(engine.compile(POOL[5], c)).kv[0] for c in CONTEXTS]
    for form in forms[1:]:
        assert (form - forms[0]).abs().max() < 1e-12
    deep = [engine.chunk(engine.compile(POOL[5], c)).kv[1] for c in CONTEXTS]
    assert all((d - deep[0]).abs().max() > 1e-4 for d in deep[1:])
