"""Every supported kind of model: ``full`` equals Hugging Face, linked prompts equal the one-forward oracle."""

from __future__ import annotations

import random

import pytest
import torch
from epic_engine import Engine, SamplingParams

from tests.engine.models import KINDS, tiny
from tests.engine.oracle import Piece, linked_logits, plain_logits, untouched


def _ids(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 199) for _ in range(count)]


def _frozen(kind: str) -> int | None:
    return 512 if kind.endswith(("dynamic", "longrope")) else None


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def test_full_equals_hugging_face(kind: str) -> None:
    ids = _ids(150, seed=1)
    with Engine(tiny(kind), policy="full") as engine:
        got = engine.score([ids[:100]], ids[100:])
    want = plain_logits(untouched(tiny(kind), freeze_at=_frozen(kind)), ids)[99:-1]
    assert (got - want).abs().max() < 1e-4
    assert want.std() > 0.05


def test_full_recomputes_chunks_exactly(kind: str) -> None:
    a, b, question = _ids(40, 2), _ids(30, 3), _ids(9, 4)
    with Engine(tiny(kind)) as engine:
        keys = engine.compile_many([a, b])
        got = engine.score([question, keys[1], keys[0], question], [5], policy="full")
    want = plain_logits(untouched(tiny(kind), freeze_at=_frozen(kind)), question + b + a + question)[-1:]
    assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("policy", ["naive", "legolink:5"])
def test_linked_equals_one_forward(kind: str, policy: str) -> None:
    a, b, head, question = _ids(40, 2), _ids(30, 3), _ids(11, 5), _ids(9, 4)
    first = frozenset(range(5)) if policy != "naive" else frozenset()
    with Engine(tiny(kind)) as engine:
        keys = engine.compile_many([a, b])
        got = engine.score([head, keys[0], keys[1], keys[0], question], [7], policy=policy)
    pieces = [Piece(tuple(head)), *(Piece(tuple(x), first) for x in (a, b, a)), Piece(tuple(question))]
    want = linked_logits(untouched(tiny(kind), freeze_at=_frozen(kind)), pieces)[-1:]
    assert (got - want).abs().max() < 1e-4
    # The oracle itself must tell linking from full recomputation, or equality would prove nothing.
    full = plain_logits(untouched(tiny(kind), freeze_at=_frozen(kind)), head + a + b + a + question)[-1:]
    assert (want - full).abs().max() > 1e-3


def test_greedy_text_equals_hugging_face(kind: str) -> None:
    ids = _ids(30, seed=6)
    with Engine(tiny(kind)) as engine:
        got = engine.generate([ids], SamplingParams(max_tokens=24), policy="full").token_ids
    twin = untouched(tiny(kind), freeze_at=_frozen(kind))
    want: list[int] = []
    while len(want) < 24:
        token = int(plain_logits(twin, ids + want)[-1].argmax())
        if token == 2:
            break
        want.append(token)
    assert list(got) == want


@pytest.mark.parametrize("kind", ["llama", "qwen3", "phi3-partial", "cohere2", "gpt-neox"])
def test_bfloat16_error_is_hugging_faces_own(kind: str) -> None:
    ids = _ids(200, seed=8)
    truth = plain_logits(untouched(tiny(kind)), ids)[99:-1]
    low = tiny(kind, torch.bfloat16)
    own = (plain_logits(untouched(low), ids)[99:-1].float() - truth).norm()
    with Engine(low, policy="full") as engine:
        got = (engine.score([ids[:100]], ids[100:]) - truth).norm()
    assert got <= 1.5 * own
