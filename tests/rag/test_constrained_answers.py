"""Models that answer in a form: with the engine, in threads, over compiled texts, and a real one."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from epic_engine import Engine, SamplingParams, TokenConstraint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from epic_rag.call_syntax import HERMES
from epic_rag.prompt_stream import chat_stream, text_stream
from epic_rag.structured import Grammars
from epic_rag.texts import CompiledTexts, TextItem
from tests.damage import damage
from tests.engine.models import build
from tests.rag.grammar_walks import PADDING, grammars, tokenizer
from tests.rag.schemas_for_tests import SCHEMAS, fits
from tests.rag.stack import TEXTS
from tests.rag.tokenizers_for_tests import smollm2_folder


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    # Wider than the tokenizer, as many models are.
    width = len(tokenizer("bytes")) + PADDING
    model = build("Llama", {"vocab_size": width, "max_position_embeddings": 2048})
    with Engine(model, tokenizer=tokenizer("bytes"), selftest=False) as made:
        yield made


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS, seed=st.integers(0, 1 << 30), temperature=st.sampled_from([0.0, 1.0, 3.0]))
def test_what_a_model_writes_under_a_schema_fits_it(
    engine: Engine, schema: dict[str, Any], seed: int, temperature: float
) -> None:
    close = dict.fromkeys(tokenizer("bytes").convert_tokens_to_ids(['"', "}", "]"]), 4.0)
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=seed, logit_bias=close)
    done = engine.generate([[5, 6, 7]], params, constraint=grammars("bytes").json_schema(schema))
    if done.finish_reason == "stop":
        assert fits(json.loads(done.text), schema)
    else:
        assert done.stats.generated == 60


def test_two_threads_may_share_grammars(engine: Engine) -> None:
    made = Grammars(tokenizer("bytes"), engine.spec.vocab_size, [2, 0])
    schema = {"type": "array", "items": {"enum": ["one", "two", 3]}, "minItems": 2, "maxItems": 4}

    def answer(seed: int) -> str:
        params = SamplingParams(max_tokens=60, temperature=2.0, seed=seed)
        return engine.generate([[5, 6, 7]], params, constraint=made.json_schema(schema)).text

    alone = {seed: answer(seed) for seed in range(6)}
    together: dict[int, str] = {}

    def work(seeds: Sequence[int]) -> None:
        for seed in seeds:
            together[seed] = answer(seed)

    threads = [threading.Thread(target=work, args=(seeds,)) for seeds in ((0, 1, 2), (3, 4, 5))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone
    assert all(fits(json.loads(text), schema) for text in alone.values())
    assert len(set(alone.values())) > 1


def test_a_grammar_is_compiled_once_and_the_oldest_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Grammars(tokenizer("bytes"), len(tokenizer("bytes")), [2])
    compiled: list[str] = []
    compile_ = made._compile
    monkeypatch.setattr(made, "_compile", lambda grammar, what: compiled.append(grammar) or compile_(grammar, what))
    for _ in range(3):
        made.json_schema({"type": "integer"})
    assert len(compiled) == 1
    for n in range(64):
        made.choice([f"option {n}"])
    made.choice(["option 63"])
    assert len(compiled) == 65
    made.json_schema({"type": "integer"})
    assert len(compiled) == 66


SCHEMA = {
    "type": "object",
    "properties": {"open": {"type": "boolean"}, "at": {"type": "integer"}},
    "required": ["open"],
}


@pytest.fixture
def texts(tmp_path: Path, engine: Engine) -> Iterator[CompiledTexts]:
    with (
        Engine(
            build("Llama", {"vocab_size": engine.spec.vocab_size, "max_position_embeddings": 2048}),
            tokenizer=tokenizer("bytes"),
            selftest=False,
            store=tmp_path / "chunks",
        ) as own,
        CompiledTexts(tmp_path, own, context="isolated", policy="naive") as made,
    ):
        made.add([TextItem(name, text) for name, text in TEXTS.items()])
        yield made


def test_prompts_with_compiled_texts_are_answered_in_form(texts: CompiledTexts) -> None:
    messages = [{"role": "user", "content": f"{TEXTS['bakery']}\n\nWhen?"}]
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=1)
    for stream in (
        chat_stream(texts, messages, params, constraint=lambda: texts.grammars.json_schema(SCHEMA)),
        text_stream(texts, TEXTS["ferry"] + " When?", params, constraint=lambda: texts.grammars.json_schema(SCHEMA)),
    ):
        text = "".join(stream)
        assert stream.completion.finish_reason == "stop"
        assert stream.completion.stats.linked > 0
        assert fits(json.loads(text), {**SCHEMA, "additionalProperties": False})
    assert texts.grammars is texts.grammars


def test_a_second_attempt_has_a_constraint_of_its_own(texts: CompiledTexts, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": f"{TEXTS['ferry']}\n\n{TEXTS['bakery']}\n\nWhen?"}]
    params = SamplingParams(max_tokens=40)
    want = "".join(chat_stream(texts, messages, params, constraint=lambda: texts.grammars.json_schema(SCHEMA)))
    assert damage(tmp_path / "chunks")
    model = build("Llama", {"vocab_size": texts.engine.spec.vocab_size, "max_position_embeddings": 2048})
    made: list[TokenConstraint] = []

    def constraint() -> TokenConstraint:
        made.append(later.grammars.json_schema(SCHEMA))
        return made[-1]

    with (
        Engine(model, tokenizer=tokenizer("bytes"), selftest=False, store=tmp_path / "chunks") as again,
        CompiledTexts(tmp_path, again, context="isolated", policy="naive") as later,
    ):
        assert "".join(chat_stream(later, messages, params, constraint=constraint)) == want
    assert len(made) == len({id(c) for c in made})
    assert len(made) in (2, 3)  # two texts were damaged, and may have been found out together
    assert fits(json.loads(want), SCHEMA)


@pytest.mark.smollm2
@pytest.mark.slow
@pytest.mark.skipif(smollm2_folder() is None, reason="the SmolLM2 wheel is not installed")
def test_a_real_model_fills_a_form(tmp_path: Path) -> None:
    class Guest(BaseModel):
        name: str = Field(max_length=30)
        age: int = Field(ge=0, le=120)
        city: Literal["Oslo", "Lima", "Kyoto"]

    messages = [
        {"role": "user", "content": "Marta Lind is 34 years old and lives in Lima. Give name, age and city as JSON."}
    ]
    with (
        Engine("smollm2", selftest=False, dtype="float32") as engine,
        CompiledTexts(tmp_path, engine, context="isolated", policy="naive") as texts,
    ):
        form = Guest.model_json_schema()
        stream = chat_stream(
            texts, messages, SamplingParams(max_tokens=80), constraint=lambda: texts.grammars.json_schema(form)
        )
        guest = Guest.model_validate_json("".join(stream))
        assert stream.completion.finish_reason == "stop"
        assert (guest.age, guest.city) == (34, "Lima")
        assert "Marta" in guest.name
        tools = {"look_up": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
        stream = chat_stream(
            texts,
            [{"role": "user", "content": "How warm is it in Lima?"}],
            SamplingParams(max_tokens=60),
            constraint=lambda: texts.grammars.tool_calls(HERMES, tools, required=True, parallel=False),
        )
        call = json.loads("".join(stream).removeprefix(HERMES.begin).removesuffix(HERMES.end))
        assert call["name"] == "look_up"
        assert isinstance(call["arguments"]["city"], str)
