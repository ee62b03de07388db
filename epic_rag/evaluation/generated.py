"""Data sets made on the spot, seeded and as long as wanted. Example i depends on the seed and on i alone.

=============  =====================================================================================================
``needle``     one fact at a depth (0 first, 1 last) of a filler of some length; ``needle:500,4000`` sets the lengths
``templated``  5–8 chunks of prose, each with the same sentence form and its own value; asks for one of them. Three
               questions about the same chunks, in three orders, follow each other
``fewshot``    examples of a small task as documents, in three orders; asks for one more
``order``      a ``templated`` example's documents in four orders: the answer should not change
``tenants``    a ``templated`` example under four system prompts: the documents stay compiled as they were
=============  =====================================================================================================

Every example of ``needle`` and ``templated`` has a store of its own that holds as many documents again, of the same
kind: what a chunk meets while it is compiled need not be in the prompt.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from epic_engine.errors import ConfigError

from epic_rag.evaluation.example import EvalExample
from epic_rag.evaluation.facts import FORMS, Fact, FactForm
from epic_rag.evaluation.filler import Filler
from epic_rag.evaluation.tasks import TASKS

__all__ = ["GENERATED", "NEEDLE_DEPTHS", "NEEDLE_LENGTHS", "generate"]

CountTokens = Callable[[str], int]

NEEDLE_LENGTHS = (500, 1000, 2000)
NEEDLE_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_NEEDLE_DOCUMENT = 250
_CHUNKS = (5, 8)
_CHUNK_TOKENS = (90, 160)
_FEWSHOT_ORDERS = 3
_ORDERS = 4
_QUESTIONS = 3
_FEWSHOT_SYSTEM = "Learn the task from the examples in the documents. Answer with one word."
_TENANTS = {
    "default": None,
    "clerk": "You are a clerk of a large company. Answer the question briefly, from the documents alone.",
    "teacher": "You are a patient teacher who helps people to find facts. Use the documents. Be short and precise.",
    "dated": "Today is Monday, the second of March. You work for the city. Answer in one short sentence.",
}


def _words(texts: Sequence[str]) -> set[str]:
    words = {word for text in texts for word in re.findall(r"\w+", text.lower())}
    return words | {m for text in texts for m in re.findall(r"\d+:\d+", text)}


def _needle(index: int, seed: int, count: CountTokens, lengths: tuple[int, ...]) -> EvalExample:
    rng = random.Random(f"{seed}/needle/{index}")
    cells = [(length, depth) for depth in NEEDLE_DEPTHS for length in lengths]
    length, depth = cells[index % len(cells)]
    form = rng.choice(FORMS)
    filler = Filler(rng, count)
    sentences = filler.sentences(length)
    fact = form.facts(rng, 1, _words(sentences))[0]
    ends = list(accumulate(map(count, sentences), initial=0))
    sentences.insert(min(range(len(ends)), key=lambda i: abs(ends[i] - depth * ends[-1])), fact.sentence)
    documents = _documents(sentences, count)
    place = next(i for i, document in enumerate(documents, start=1) if fact.sentence in document)
    return EvalExample(
        f"needle-{index}",
        documents,
        fact.question,
        (fact.answer,),
        corpus=f"needle-{seed}-{index}",
        others=_documents(filler.sentences(length), count),
        scorer="contains",
        group={"length": str(length), "depth": f"{depth:g}", "form": form.name, "place": str(place)},
    )


def _documents(sentences: Sequence[str], count: CountTokens) -> tuple[str, ...]:
    """Sentences as documents of about 250 tokens each."""
    documents: list[list[str]] = []
    used = 0
    for sentence in sentences:
        if used >= _NEEDLE_DOCUMENT or not documents:
            documents.append([])
            used = 0
        documents[-1].append(sentence)
        used += count(sentence)
    return tuple(" ".join(document) for document in documents)


def _records(base: int, seed: int, count: CountTokens) -> tuple[FactForm, list[str], list[Fact]]:
    """Chunks that each hold a fact of one form in prose: the first half for the prompt, the others for its store."""
    rng = random.Random(f"{seed}/templated/{base}")
    form = FORMS[base % len(FORMS)]
    chunks = rng.randint(*_CHUNKS)
    filler = Filler(rng, count)
    # The fact comes on top of the prose.
    room = count(form.sentence) + 4
    texts = [filler.sentences(rng.randint(*_CHUNK_TOKENS) - room) for _ in range(2 * chunks)]
    facts = form.facts(rng, len(texts), _words([s for text in texts for s in text]))
    for text, fact in zip(texts, facts, strict=True):
        text.insert(rng.randint(0, len(text)), fact.sentence)
    return form, [" ".join(text) for text in texts], facts


def _templated(index: int, seed: int, count: CountTokens, lengths: tuple[int, ...]) -> EvalExample:
    base, turn = divmod(index, _QUESTIONS)
    form, texts, facts = _records(base, seed, count)
    chunks = len(texts) // 2
    order = list(range(chunks))
    random.Random(f"{seed}/templated/{base}/asked").shuffle(order)
    asked = order[turn]
    random.Random(f"{seed}/templated/{base}/{turn}").shuffle(order)
    return EvalExample(
        f"templated-{index}",
        tuple(texts[i] for i in order),
        facts[asked].question,
        (facts[asked].answer,),
        corpus=f"templated-{seed}-{base}",
        others=tuple(texts[chunks:]),
        scorer="contains",
        group={
            "form": form.name,
            "chunks": str(chunks),
            "place": str(order.index(asked) + 1),
            "records": str(base),
        },
    )


def _fewshot(index: int, seed: int, count: CountTokens, lengths: tuple[int, ...]) -> EvalExample:
    base, order = divmod(index, _FEWSHOT_ORDERS)
    rng = random.Random(f"{seed}/fewshot/{base}")
    task = TASKS[base % len(TASKS)]
    pairs = rng.sample(task.pairs, len(task.pairs))
    (word, answer), shown = pairs[0], pairs[1:]
    size = rng.randint(4, 6)
    documents = [
        "\n\n".join(task.show(*pair) for pair in shown[start : start + size])
        for start in range(0, len(shown) - size + 1, size)
    ]
    random.Random(f"{seed}/fewshot/{base}/{order}").shuffle(documents)
    return EvalExample(
        f"fewshot-{base}-{order}",
        tuple(documents),
        task.ask(word),
        (answer,),
        system=_FEWSHOT_SYSTEM,
        scorer="contains",
        group={"task": task.name, "base": str(base), "order": str(order)},
    )


def _order(index: int, seed: int, count: CountTokens, lengths: tuple[int, ...]) -> EvalExample:
    base, order = divmod(index, _ORDERS)
    example = _templated(base * _QUESTIONS, seed, count, lengths)
    asked = int(example.group["place"]) - 1
    places = list(range(len(example.documents)))
    if order:
        random.Random(f"{seed}/order/{index}").shuffle(places)
    return replace(
        example,
        example_id=f"order-{base}-{order}",
        documents=tuple(example.documents[i] for i in places),
        group={
            "form": example.group["form"],
            "place": str(places.index(asked) + 1),
            "base": str(base),
            "order": str(order),
        },
    )


def _tenants(index: int, seed: int, count: CountTokens, lengths: tuple[int, ...]) -> EvalExample:
    base, number = divmod(index, len(_TENANTS))
    example = _templated(base * _QUESTIONS, seed, count, lengths)
    tenant, system = list(_TENANTS.items())[number]
    group = {"form": example.group["form"], "place": example.group["place"], "tenant": tenant, "base": str(base)}
    return replace(example, example_id=f"tenants-{base}-{tenant}", system=system, group=group)


GENERATED: dict[str, Callable[[int, int, CountTokens, tuple[int, ...]], EvalExample]] = {
    "needle": _needle,
    "templated": _templated,
    "fewshot": _fewshot,
    "order": _order,
    "tenants": _tenants,
}
"""Makers of one example from its number, the seed, a token counter and the lengths of ``needle``."""


def generate(name: str, *, limit: int, seed: int, count_tokens: CountTokens) -> list[EvalExample]:
    """Make the first ``limit`` examples of a generated data set.

    Parameters
    ----------
    name
        One of :data:`GENERATED`, ``needle`` optionally with lengths in tokens as in ``"needle:500,4000"``.
    limit
        How many; a larger limit adds examples behind the same ones.
    seed
        Same seed, same examples.
    count_tokens
        Tokens of a text.

    Raises
    ------
    ConfigError
        If the argument behind the colon cannot be used.
    """
    base, _, argument = name.partition(":")
    lengths: tuple[int, ...] = NEEDLE_LENGTHS
    if argument:
        try:
            lengths = tuple(int(part) for part in argument.split(","))
        except ValueError:
            lengths = ()
        if base != "needle" or not lengths or min(lengths) < 1:
            raise ConfigError(
                f"data set {name!r} cannot be made: only needle takes an argument, lengths in tokens as in "
                "'needle:500,4000'."
            )
    return [GENERATED[base](index, seed, count_tokens, lengths) for index in range(limit)]
