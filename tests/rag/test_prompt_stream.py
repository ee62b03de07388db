"""Answers to prompts whose compiled texts are linked, while those texts come and go."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from epic_engine import ConfigError, ContextLengthError, Engine, SamplingParams

from epic_rag.prompt import TextPart
from epic_rag.prompt_stream import PromptStream, chat_stream, chat_streams
from epic_rag.texts import CompiledTexts, TextItem, cut_known
from tests.damage import damage
from tests.rag.stack import TEXTS, model, tokenizer

GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
MESSAGES = [{"role": "user", "content": f"Read:\n{TEXTS['ferry']}\n\n{TEXTS['bakery']}\n\nWhat is open?"}]


@pytest.fixture
def texts(tmp_path: Path) -> Iterator[CompiledTexts]:
    with (
        Engine(model(), tokenizer=tokenizer(), selftest=False, store=tmp_path / "chunks") as engine,
        CompiledTexts(tmp_path, engine, context="isolated", policy="naive") as made,
    ):
        made.add([TextItem(name, text) for name, text in TEXTS.items()])
        yield made


def direct(texts: CompiledTexts, computed: frozenset[str] = frozenset()) -> tuple[int, ...]:
    """The engine's own answer, with some texts computed instead of linked."""
    rendered = tokenizer().apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    ferry, bakery = TEXTS["ferry"].strip(), TEXTS["bakery"]
    before, _, rest = rendered.partition(ferry)
    between, _, after = rest.partition(bakery)
    prompt = []
    for part, name in ((before, ""), (ferry, "ferry"), (between, ""), (bakery, "bakery"), (after, "")):
        ids = tokenizer()(part, add_special_tokens=False)["input_ids"]
        prompt.append(texts.engine.compile(ids, "isolated") if name and name not in computed else ids)
    return texts.engine.generate(prompt, GREEDY, policy="naive").token_ids


def ran(stream: PromptStream) -> tuple[int, ...]:
    text = "".join(stream)
    assert text == stream.completion.text
    return stream.completion.token_ids


def test_answers_are_the_engines(texts: CompiledTexts) -> None:
    stream = chat_stream(texts, MESSAGES, GREEDY)
    with pytest.raises(ConfigError, match="not ended"):
        _ = stream.completion
    assert ran(stream) == direct(texts)
    assert stream.completion.stats.reuse == "composed"
    assert stream.completion.stats.times.tokenise > 0
    assert chat_stream(texts, MESSAGES, GREEDY, policy="full").parts == stream.parts
    with pytest.raises(ContextLengthError, match="2048"):
        chat_stream(texts, [{"role": "user", "content": "word " * 2000}], GREEDY)


@pytest.mark.parametrize("what", ["removed", "changed"])
def test_a_text_that_goes_after_it_was_found_is_computed(
    texts: CompiledTexts, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = texts.find

    def found_just_before(text: str) -> list[TextPart]:
        parts = find(text)
        if what == "removed":
            texts.remove(["ferry"])
        else:
            texts.add([TextItem("ferry", "The ferry sank.")])
        return parts

    monkeypatch.setattr(texts, "find", found_just_before)
    stream = chat_stream(texts, MESSAGES, GREEDY)
    assert ran(stream) == direct(texts, frozenset({"ferry"}))
    assert stream.completion.stats.linked == len(texts.encode(TEXTS["bakery"]))


def test_damaged_and_lost_kv_is_compiled_again(
    texts: CompiledTexts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    want = direct(texts)
    assert damage(tmp_path / "chunks")
    with (
        caplog.at_level(logging.WARNING),
        Engine(model(), tokenizer=tokenizer(), selftest=False, store=tmp_path / "chunks") as again,
        CompiledTexts(tmp_path, again, context="isolated", policy="naive") as later,
    ):
        stream = chat_stream(later, MESSAGES, GREEDY)
        assert ran(stream) == want
    # Both are loaded at once, so the second may be found out and set aside with the first.
    assert sum(record.name == "epic_rag.prompt_stream" for record in caplog.records) in (1, 2)
    assert stream.completion.stats.reuse == "composed"


def test_closing_cancels(texts: CompiledTexts) -> None:
    stream = chat_stream(texts, MESSAGES, SamplingParams(max_tokens=1000, ignore_eos=True))
    next(stream)
    stream.close()
    stream.close()
    assert stream.completion.finish_reason == "cancelled"
    assert stream.completion.stats.generated < 1000
    unused = chat_stream(texts, MESSAGES, GREEDY)
    unused.close()
    assert unused.completion.finish_reason == "cancelled"
    assert list(unused) == []


def test_known_texts_are_cut_out_in_their_order() -> None:
    text = "No. One: No. Two: Yes."
    parts = cut_known(text, [("y", "Yes."), ("n", "No.")])
    assert parts == [TextPart("No. One: No. Two: "), TextPart("Yes.", "y")]
    parts = cut_known(text, [("n", "No."), ("m", "No."), ("x", "Maybe."), ("y", "Yes.")])
    assert [p.name for p in parts] == ["n", None, "m", None, "y"]
    assert "".join(p.text for p in parts) == text


async def test_an_event_loop_reads_the_same(texts: CompiledTexts, tmp_path: Path) -> None:
    want = direct(texts)
    stream = chat_stream(texts, MESSAGES, GREEDY)
    assert "".join([piece async for piece in stream]) == stream.completion.text
    assert stream.completion.token_ids == want
    assert damage(tmp_path / "chunks")
    with (
        Engine(model(), tokenizer=tokenizer(), selftest=False, store=tmp_path / "chunks") as again,
        CompiledTexts(tmp_path, again, context="isolated", policy="naive") as later,
    ):
        stream = chat_stream(later, MESSAGES, GREEDY)
        assert "".join([piece async for piece in stream]) == stream.completion.text
        assert stream.completion.token_ids == want
    stream = chat_stream(texts, MESSAGES, SamplingParams(max_tokens=1000, ignore_eos=True))
    await stream.next_event()
    await stream.aclose()
    assert stream.completion.finish_reason == "cancelled"


@pytest.mark.parametrize("constrained", [False, True])
def test_several_answers_are_those_of_several_calls(texts: CompiledTexts, constrained: bool) -> None:
    drawn = SamplingParams(max_tokens=6, ignore_eos=not constrained, temperature=1.0, seed=7)
    form = (lambda: texts.grammars.regex("[a-z ]{6,}")) if constrained else None
    several = chat_streams(texts, MESSAGES, drawn, 3, constraint=form)
    found = ["".join(stream) for stream in several]
    assert found == [
        "".join(chat_stream(texts, MESSAGES, replace(drawn, seed=7 + index), constraint=form)) for index in range(3)
    ]
    assert len(set(found)) == 3
    late = chat_stream(texts, MESSAGES, SamplingParams(max_tokens=1500, ignore_eos=True), timeout=0.2)
    for _ in late:
        pass
    assert late.completion.finish_reason == "timeout"
